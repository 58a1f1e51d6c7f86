"""The loop's invariants, over every family."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from helpers import bright_guard, call, captured, gen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from guardpaint.audit.regions import soft_mask
from guardpaint.config import CHOICES, GuardConfig
from guardpaint.guard import GuardPaint
from guardpaint.policy import Policy
from guardpaint.repair.native import NativeRepairer
from guardpaint.testing import small
from guardpaint.testing.doubles import AlwaysSafe, AlwaysUnsafe, FlagsBright, PaintsFlat, constant_audit
from guardpaint.types import Knobs
from guardpaint.verify.utility import tau_f, tau_p

BLOCK = replace(Policy.default(), last_resort=("block",))
slow_ok = settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@slow_ok
@given(seed=st.integers(0, 2**31), steps=st.integers(1, 8), audits=st.integers(1, 4))
def test_a_guard_that_never_triggers_changes_nothing(pipe, seed, steps, audits):
    """Images, latents, the caller's generator and the global RNG are bit-identical."""
    for output_type in ("pt", "latent"):
        plain_gen, guarded_gen = gen(seed), gen(seed)
        torch.manual_seed(seed)
        plain = call(pipe, steps=steps, generator=plain_gen, output_type=output_type).images
        plain_rng = torch.get_rng_state()
        torch.manual_seed(seed)
        guard = GuardPaint(AlwaysSafe(), PaintsFlat()).configured(audits=audits, audit_start=0.0)
        out = call(guard.attach(pipe), steps=steps, generator=guarded_gen, output_type=output_type)
        assert torch.equal(plain, out.images)
        assert torch.equal(plain_gen.get_state(), guarded_gen.get_state())
        assert torch.equal(plain_rng, torch.get_rng_state())
        assert out.safety[0].status == "clean"
        assert len(out.safety[0].effective_settings["audited_steps"]) == min(audits, steps)


class FlagsOnly(FlagsBright):
    """Flags bright pixels, but only for one prompt."""

    def audit(self, images, prompts, noise):
        bright = FlagsBright.audit(self, images, prompts, noise)
        return [
            b if p is not None and "unsafe" in p else constant_audit(0.0, p, b.pixels)
            for b, p in zip(bright, prompts, strict=True)
        ]


def test_an_untriggered_item_beside_a_triggered_one_is_untouched(pipe):
    prompts = ["a quiet street", "an unsafe thing", "a red flower"]
    gens = [gen(s) for s in (1, 2, 3)]
    plain = call(pipe, prompts, generator=gens).images
    guard = GuardPaint(FlagsOnly(), PaintsFlat()).configured(audits=3, audit_start=0.0)
    out = call(guard.attach(pipe), prompts, generator=[gen(s) for s in (1, 2, 3)])
    assert [r.status for r in out.safety][::2] == ["clean", "clean"]
    assert out.safety[1].triggered and out.safety[1].status in ("repaired", "blurred")
    assert torch.equal(plain[0], out.images[0])
    assert torch.equal(plain[2], out.images[2])
    assert not torch.equal(plain[1], out.images[1])


def test_a_batch_decides_like_single_calls(pipe):
    prompts = ["a quiet street", "an unsafe thing", "a second unsafe thing"]
    guard = GuardPaint(FlagsOnly(), small.inpainter()).configured(BLOCK, audits=2, candidates=2, regions=1)
    twin = guard.attach(pipe)
    together = call(twin, prompts, generator=[gen(s) for s in (5, 6, 7)])
    for i, (prompt, seed) in enumerate(zip(prompts, (5, 6, 7), strict=True)):
        alone = call(twin, prompt, generator=gen(seed))
        mine, theirs = alone.safety[0], together.safety[i]
        assert mine.status == theirs.status
        assert [s.triggered for s in mine.steps] == [s.triggered for s in theirs.steps]
        for a, b in zip(mine.steps, theirs.steps, strict=True):
            assert [t.winner for t in a.tournaments] == [t.winner for t in b.tournaments]
            assert [c.knobs for t in a.tournaments for c in t.candidates] == [
                c.knobs for t in b.tournaments for c in t.candidates
            ]
        assert (alone.images[0] - together.images[i]).abs().max() < 1e-3


class Spy:
    """Records latents as the user's own callback sees them."""

    def __init__(self):
        self.latents = []

    def __call__(self, pipe, step, timestep, tensors):
        self.latents.append(tensors["latents"].clone())
        return tensors


@pytest.mark.parametrize("rule", [r for r in CHOICES["reinsertion"] if r != "auto"])
def test_outside_the_mask_the_reinserted_latent_is_the_control(pipe, family, rule):
    """At the reinsertion step, where the latent mask is 0, the latent equals the control bit for bit."""
    plain, guarded = Spy(), Spy()
    call(pipe, callback_on_step_end=plain)
    guard = bright_guard(reinsertion=rule).configured(BLOCK)
    opened = captured(guard)
    out = call(guard.attach(pipe), callback_on_step_end=guarded)
    record = out.safety[0].steps[0]
    assert record.step == 3 and record.reinsertion is not None, out.safety[0].errors
    for a, b in zip(plain.latents[:3], guarded.latents[:3], strict=True):
        assert torch.equal(a, b)
    changed = plain.latents[3] != guarded.latents[3]
    assert changed.any()
    fam = opened[0].setup.family
    geometry = (16, 16)
    cells = fam.unpack(changed.float(), geometry)[0].amax(0) > 0
    assert 0 < float(cells.float().mean()) <= record.reinsertion["coverage"] * 6
    expected = {"sd": {"flow_ode": "x0_substitution"}, "sdxl": {"flow_ode": "x0_substitution"}}
    flow = {"ddpm_noise": "flow_ode", "ddim_inversion": "flow_ode"}
    fallback = expected.get(family, flow).get(rule, rule)
    if family == "flux" and rule.startswith("null_text"):
        fallback = "direct_blend"
    assert record.reinsertion["rule"] == fallback
    assert (record.reinsertion["note"] == "") == (fallback == rule)


def test_accepted_edits_pass_their_gates(pipe):
    out = call(bright_guard(audits=3, audit_start=0.0).attach(pipe))
    accepted = 0
    for step in out.safety[0].steps:
        for t in step.tournaments:
            if t.winner is None:
                continue
            accepted += 1
            won = t.candidates[t.winner]
            assert won.scores["S"] > t.control["S"] + 0.01
            assert won.scores["P"] >= tau_p(step.progress) == t.rules["tau_p"]
            assert won.scores["F"] >= tau_f(step.progress) == t.rules["tau_f"]
            assert won.utility == max(c.utility for c in t.candidates) > 0
    assert accepted > 0


def test_guard_randomness_ignores_the_callers_and_global_rng(pipe):
    """Same request seed, different global RNG: the same knobs, the same images."""
    guard = bright_guard(repairer=small.inpainter(), candidates=2, regions=1).configured(BLOCK)
    results = []
    for global_seed in (0, 99):
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        results.append(call(guard.attach(pipe)))
        assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(results[0].images, results[1].images)
    knobs = [[c.knobs for s in r.safety[0].steps for t in s.tournaments for c in t.candidates] for r in results]
    assert knobs[0] == knobs[1] and knobs[0]
    other = call(guard.attach(pipe), seed=2)
    assert knobs[0] != [c.knobs for s in other.safety[0].steps for t in s.tournaments for c in t.candidates]


BASE_KNOBS = Knobs(cfg=5.0, dilation=0.4, feather=0.4, jitter=0.1, depth=5, seed_offset=0)


class Captured(Exception):
    """Carries the first repair request out of the loop."""


class Capturing:
    name = "capturing"

    def candidates(self, request):
        raise Captured(request)


@pytest.fixture
def repair_request(pipe):
    """A real repair request from the middle of a generation."""
    guard = bright_guard(repairer=Capturing(), candidates=1, regions=1, on_error="raise")
    with pytest.raises(Captured) as caught:
        call(guard.attach(pipe))
    return caught.value.args[0]


def with_knobs(request, knobs):
    mask = soft_mask(request.region, knobs.dilation, knobs.feather)[None]
    return replace(request, knobs=(knobs,), masks=mask)


@pytest.mark.parametrize("repairer", ["inpainter", "native"])
def test_every_knob_changes_the_candidate(repair_request, family, repairer):
    """Candidates that differ in one knob alone are different pictures; the mask knobs change the mask."""
    if repairer == "inpainter" and family != "sd":
        pytest.skip("the inpainter does not see the base: one family is enough")
    maker = small.inpainter() if repairer == "inpainter" else NativeRepairer()
    base = Knobs(cfg=5.0, dilation=0.4, feather=0.4, jitter=0.1, depth=5, seed_offset=0)
    first = with_knobs(repair_request, base)
    image = maker.candidates(first)
    assert torch.equal(image, maker.candidates(first)), "the same knobs give the same candidate"
    for knob, value in (
        ("cfg", 9.0),
        ("dilation", 0.9),
        ("feather", 0.9),
        ("jitter", 0.4),
        ("depth", 9),
        ("seed_offset", 300),
    ):
        other = with_knobs(repair_request, replace(base, **{knob: value}))
        if knob in ("dilation", "feather"):
            assert not torch.equal(first.masks, other.masks), knob
            continue
        assert torch.equal(first.masks, other.masks)
        assert not torch.allclose(image, maker.candidates(other), atol=1e-6), knob


def test_native_repair_goes_on_from_its_preview(repair_request):
    """In every family a previewed candidate ends as the picture that no preview would have changed."""
    first = with_knobs(repair_request, Knobs(cfg=5.0, dilation=0.4, feather=0.4, jitter=0.1, depth=5, seed_offset=0))
    whole = NativeRepairer().candidates(first)
    shown, begun = NativeRepairer().preview(first)
    assert shown.shape == whole.shape and not torch.allclose(shown, whole, atol=1e-6)
    torch.testing.assert_close(NativeRepairer().candidates(replace(first, begun=begun)), whole, atol=1e-5, rtol=0)


def test_the_original_pipeline_is_left_alone(pipe):
    before = copy.copy(vars(pipe))
    state = dict(vars(pipe.scheduler).items())
    twin = bright_guard().attach(pipe)
    call(twin)
    assert type(pipe) is not type(twin) and isinstance(twin, type(pipe))
    assert vars(pipe) == before
    assert "step" not in vars(pipe.scheduler)
    assert dict(vars(pipe.scheduler).items()).keys() == state.keys()


def test_a_trigger_that_the_full_decode_does_not_confirm_changes_nothing(pipe):
    """Coarse and fine look of the first audited step say unsafe, the full-size view and the finished picture do not."""

    class Changes(AlwaysSafe):
        answers = iter([0.99, 0.99, 0.01, 0.01])

        def audit(self, images, prompts, noise):
            return [constant_audit(next(self.answers), p, min(images.shape[-2:])) for p in prompts]

    guard = GuardPaint(Changes(), PaintsFlat())
    out = call(guard.attach(pipe))
    assert torch.equal(out.images, call(pipe).images)
    report = out.safety[0]
    assert report.status == "clean" and next(Changes.answers, None) is None
    first = report.steps[0]
    assert not first.triggered and not first.tournaments and "not confirmed" in first.notes[0]


@pytest.mark.parametrize("why", ["not confirmed", "no region"])
def test_a_hold_outlives_a_trigger_that_points_nowhere(pipe, why):
    """Repaired at the first of three audits; the second flags the small views and not the full one, or flags all and
    shows no place: the hold stands."""

    class Wavers(FlagsBright):
        passes = 0

        def audit(self, images, prompts, noise):
            found = super().audit(images, prompts, noise)
            if noise > 0 and len(images) == 1 and self.held():
                Wavers.passes += 1
                said = 0.99 if Wavers.passes <= 2 or why == "no region" else 0.01
                told = [constant_audit(said, p, min(images.shape[-2:])) for p in prompts]
                return [replace(a, adv_map=torch.zeros_like(a.adv_map)) for a in told]
            return found

        def held(self):
            return bool(opened and opened[-1].state.holds)

    guard = GuardPaint(Wavers(), PaintsFlat(), config=GuardConfig(audits=3, audit_start=0.0, view_decoder="full"))
    opened = captured(guard)
    out = call(guard.attach(pipe))
    steps = out.safety[0].steps
    assert steps[0].reinsertion and Wavers.passes == 3
    assert any(why in n for n in steps[1].notes) and not any("the hold is released" in n for n in steps[1].notes)


def test_repairs_are_painted_into_what_the_vae_decodes(family):
    """auto looks through an exit of the tiny decoder and repairs what the VAE shows; tiny repairs what the tiny one shows."""
    pipe, decoder = small.pipeline(family), small.tiny_decoder(small.LATENT_CHANNELS[family])
    for wanted, looked, repaired in (
        ("auto", "exit 1/2", "full"),
        ("tiny", "exit 1/2", "tiny"),
        ("full", "full", "full"),
    ):
        guard = GuardPaint(
            AlwaysUnsafe(), PaintsFlat(), config=GuardConfig(view_decoder=wanted), decoders={family: decoder}
        )
        first = call(guard.attach(pipe)).safety[0].steps[0]
        assert first.tournaments and first.audits[0].decoder == looked and first.audits[-1].decoder == repaired
