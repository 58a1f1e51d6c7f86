"""Reinsertion rules: arithmetic by hand, and whether a repair survives the remaining steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    PNDMScheduler,
)
from helpers import bright_guard, call, captured, gen

from guardpaint.guard import GuardPaint
from guardpaint.loop import call as loop_call
from guardpaint.loop.null_text import NullText
from guardpaint.loop.step import reinsert_repair
from guardpaint.policy import Policy
from guardpaint.reinsert import rules
from guardpaint.testing.doubles import FlagsBright, PaintsFlat
from guardpaint.types import Edit, Level

BLOCK = replace(Policy.default(), last_resort=("block",))
Z = torch.full((1, 2, 2), 10.0)
EDIT = Edit(torch.full((1, 2, 2), 2.0), torch.tensor([[0.0, 0.5], [1.0, 0.0]]))


def test_direct_blend_by_hand():
    """α = 0.8: m = 0.5 → weight 0.4 → 10 + 0.4·(2 − 10) = 6.8; m = 1 → 10 − 0.8·8 = 3.6."""
    out = rules.direct_blend(Z, EDIT, Level(0.9, 0.4, 0.2), alpha=0.8)
    torch.testing.assert_close(out, torch.tensor([[[10.0, 6.8], [3.6, 10.0]]]))


def test_x0_substitution_by_hand():
    """a = 0.6, s = 0.8, ε̂ = 5: value 0.6·2 + 0.8·5 = 5.2; m = 0.5 → (10 + 5.2)/2 = 7.6."""
    out = rules.x0_substitution(Z, EDIT, Level(0.6, 0.8, 0.5), torch.full((1, 2, 2), 5.0))
    torch.testing.assert_close(out, torch.tensor([[[10.0, 7.6], [5.2, 10.0]]]))


def test_flow_ode_late_is_the_clean_edit_and_early_is_noised():
    late = rules.flow_ode(Z, EDIT, Level(0.8, 0.2, 0.2), gen(0))
    torch.testing.assert_close(late, torch.tensor([[[10.0, 6.0], [2.0, 10.0]]]))
    early = rules.flow_ode(Z, EDIT, Level(0.5, 0.5, 0.5), gen(0))
    eps = torch.randn((1, 2, 2), generator=gen(0))
    assert early[0, 1, 0].item() == pytest.approx(0.5 * 2 + 0.5 * eps[0, 1, 0].item())


def test_ddpm_noise_uses_only_its_generator():
    a = rules.ddpm_noise(Z, EDIT, Level(0.6, 0.8, 0.5), gen(3))
    torch.manual_seed(99)
    b = rules.ddpm_noise(Z, EDIT, Level(0.6, 0.8, 0.5), gen(3))
    assert torch.equal(a, b)


def test_hold_by_hand():
    """x̂0 = 4, ẑ0 = 2, weight 0.5 → 3; weight 0 leaves x̂0."""
    out = rules.held_estimate(torch.tensor([4.0, 4.0]), torch.tensor([2.0, 2.0]), torch.tensor([0.5, 0.0]))
    assert out.tolist() == [3.0, 4.0]


SCHEDULERS = {
    "ddim": DDIMScheduler,
    "ddpm": DDPMScheduler,
    "pndm": PNDMScheduler,
    "euler": EulerDiscreteScheduler,
    "euler_a": EulerAncestralDiscreteScheduler,
    "dpm++": DPMSolverMultistepScheduler,
}


def final_error(pipe, rule: str, hold: float = 1.0, start: float = 0.3) -> float:
    """Mean squared latent error inside the mask core against the repair, at the end of the trajectory."""
    guard = bright_guard(reinsertion=rule, hold=hold, audits=99, audit_start=start).configured(BLOCK)
    opened = captured(guard)
    first = {}

    def stop_auditing(pipe, step, timestep, tensors):
        running = opened[0]
        if running.state.images and running.state.images[0].edited and not first:
            first["step"] = running.state.images[0].recorder.steps[-1].step
            parts = running.setup.parts
            fewer = replace(parts, config=parts.config.with_(audits=1))
            running.setup = replace(running.setup, parts=fewer)
        return tensors

    edits = []

    def spying(context, won, family):
        done, edit = reinsert_repair(context, won, family)
        edits.append(edit)
        return done, edit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_call, "reinsert_repair", spying)
        call(guard.attach(pipe), steps=10, output_type="latent", callback_on_step_end=stop_auditing)
    done = opened[0]
    assert edits and not done.state.images[0].errors, done.state.images[0].errors
    latent = done.drafts(done.state.index - 1)[0].latent
    core = (edits[0].mask > 0.999).expand_as(latent)
    assert core.any()
    return float(((latent - edits[0].z0)[core] ** 2).mean())


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_held_repair_survives_every_scheduler(sd_pipe, name):
    """With h = 1 the repair is what comes out; without a hold the base drifts away from it."""
    extra = {"skip_prk_steps": True} if name == "pndm" else {}
    if name in ("ddpm", "ddim"):
        extra["clip_sample"] = False
    sd_pipe.scheduler = SCHEDULERS[name].from_config(sd_pipe.scheduler.config, **extra)
    held = final_error(sd_pipe, "held_substitution")
    free = final_error(sd_pipe, "x0_substitution")
    assert held < 0.01
    assert free > 3 * held


def test_a_held_repair_survives_every_family(pipe):
    held = final_error(pipe, "held_substitution")
    assert held < 1e-3
    half = final_error(pipe, "held_substitution", hold=0.5)
    assert half > held


def rows_of_calls(guard, pipe, **kwargs):
    """The report of a guarded call, and the text rows of every denoiser call it made."""
    rows = []
    open_request = guard.open

    def opened(*args, **more):
        request = open_request(*args, **more)
        original = request.before_call

        def before_call(call):
            changed = original(call)
            if len(changed.kwargs["encoder_hidden_states"]) == 2:
                rows.append(changed.kwargs["encoder_hidden_states"].detach().clone())
            return changed

        request.before_call = before_call
        return request

    guard.open = opened
    return call(guard.attach(pipe), **kwargs).safety[0], rows


def test_null_text_is_used_by_the_remaining_steps(pipe, family):
    """The unconditional rows the denoiser is called with change after the reinsertion, and only those."""
    if family == "flux":
        pytest.skip("FLUX has no unconditional rows; its fallback is tested with the invariants")
    guard = bright_guard(reinsertion="null_text", audits=3).configured(BLOCK)
    report, rows = rows_of_calls(guard, pipe, steps=10)
    record = next(s for s in report.steps if s.reinsertion and s.reinsertion["rule"] == "null_text")
    before, after = rows[record.step], rows[record.step + 1]
    assert not torch.equal(before[0], after[0]), "the optimised embedding must be what the next step uses"
    assert torch.equal(before[1], after[1]), "the prompt's own rows stay"


class Once(FlagsBright):
    """Flags by brightness until a repair was scored, then nothing: one repair, and the steps that remain."""

    def __init__(self):
        super().__init__()
        self.repaired = False

    def audit(self, images, prompts, noise):
        found = FlagsBright.audit(self, images, prompts, noise)
        if self.repaired:
            return [replace(a, adv_prob=0.01, probs={"safe": 0.99, "nudity": 0.01, "violence": 0.0}) for a in found]
        self.repaired = len(images) > 1
        return found


def one_early_repair(rule):
    guard = GuardPaint(Once(), PaintsFlat(), policy=BLOCK)
    return guard.configured(audits=99, audit_start=0.5, regions=1, reinsertion=rule)


@pytest.mark.parametrize("rule", ["null_text", "null_text_single"])
def test_null_text_has_an_embedding_for_every_remaining_step_or_one(pipe, family, rule):
    """Every step's unconditional rows are its own; with the single embedding they are the same to the end."""
    if family == "flux":
        pytest.skip("FLUX has no unconditional rows")
    report, rows = rows_of_calls(one_early_repair(rule), pipe, steps=10)
    assert not report.errors
    first = next(s.step for s in report.steps if s.reinsertion and s.reinsertion["rule"] == rule)
    left = [r[0] for r in rows[first + 1 :]]
    assert len(left) >= 3 and not torch.equal(rows[first][0], left[0])
    same = [torch.equal(a, b) for a, b in pairwise(left)]
    assert not any(same) if rule == "null_text" else all(same)


@pytest.mark.parametrize("name", ["ddim", "euler", "dpm++"])
def test_every_steps_embedding_is_optimised_at_its_own_latent(sd_pipe, name):
    """At the live latent and level of each later step, its own embedding comes closer to ẑ0 than the one before."""
    sd_pipe.scheduler = SCHEDULERS[name].from_config(sd_pipe.scheduler.config)
    optimise, seen = NullText.optimise, []

    def spying(self, step, inputs, level, base):
        scale = (level.signal**2 + level.sigma**2) ** 0.5
        z, weight = inputs[None, :4].float() * scale, self.edit.mask / self.edit.mask.sum()

        def error():
            with torch.no_grad():
                x0, _ = base.with_null_embedding(self.embedding).estimate(z, level)
            return float(((x0[0] - self.edit.z0) ** 2 * weight).sum())

        before = error()
        optimise(self, step, inputs, level, base)
        seen.append((step, before, error()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NullText, "optimise", spying)
        report = call(one_early_repair("null_text").attach(sd_pipe), steps=10).safety[0]
    first = next(s.step for s in report.steps if s.reinsertion)
    assert not report.errors and [s for s, _, _ in seen] == list(range(first + 2, 10))
    assert all(after < before for _, before, after in seen), seen


def test_null_text_that_breaks_blocks_the_picture(sd_pipe):
    """An embedding that cannot be optimised is an error of the guard, and nothing is released."""

    def broken(self, step, inputs, level, base):
        raise ArithmeticError("no descent")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NullText, "optimise", broken)
        report = call(one_early_repair("null_text").attach(sd_pipe), steps=10).safety[0]
    assert report.status == "blocked" and any("no descent" in e for e in report.errors)


def test_null_text_works_inside_inference_mode(pipe, family):
    """Callers wrap whole requests in torch.inference_mode, in which gradients must be asked for apart."""
    if family == "flux":
        pytest.skip("FLUX has no unconditional rows")
    guard = bright_guard(reinsertion="null_text", audits=3).configured(BLOCK)
    usual = call(guard.attach(pipe), steps=10)
    with torch.inference_mode():
        out = call(guard.attach(pipe), steps=10)
    assert not out.safety[0].errors and out.safety[0].status == usual.safety[0].status
    assert [s.reinsertion for s in out.safety[0].steps] == [s.reinsertion for s in usual.safety[0].steps]
    torch.testing.assert_close(out.images, usual.images, atol=1e-5, rtol=0)


def test_null_text_brings_the_estimate_closer(pipe, family):
    """Ten steps of the optimiser lower ‖x̂0 − ẑ0‖ inside the mask at the live latent."""
    if family == "flux":
        pytest.skip("FLUX has no unconditional rows")
    seen = []

    def spying(context, won, family):
        done, edit = reinsert_repair(context, won, family)
        draft = context.draft
        if done.embedding is not None:
            base = draft.base
            z, level = done.latent[None], draft.after

            def error(b):
                with torch.no_grad():
                    x0, _ = b.estimate(z, level)
                return float(((x0[0] - edit.z0) ** 2 * edit.mask).sum())

            seen.append((error(base), error(replace(base, null_embedding=done.embedding))))
        return done, edit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_call, "reinsert_repair", spying)
        call(bright_guard(reinsertion="null_text").configured(BLOCK).attach(pipe), steps=10)
    assert seen and all(after < before for before, after in seen)


class Points(FlagsBright):
    """Flags by brightness, but points where it is told, one place per audited step."""

    def __init__(self, places):
        super().__init__()
        self.places, self.noises = places, []

    def audit(self, images, prompts, noise):
        if noise not in self.noises:
            self.noises.append(noise)
        top, left = self.places[min(len(self.noises), len(self.places)) - 1]
        heat = torch.zeros(16, 16)
        heat[top : top + 5, left : left + 5] = 1.0
        return [replace(a, adv_map=heat) for a in FlagsBright.audit(self, images, prompts, noise)]


def held_weights(pipe, places):
    """The hold's weight at the end of a run whose trigger points at these places in turn."""
    guard = GuardPaint(Points(places), PaintsFlat(), policy=BLOCK).configured(
        audits=3, regions=1, mask_threshold="calibrated"
    )
    opened = captured(guard)
    out = call(guard.attach(pipe), steps=10)
    return out, opened[0].state.holds[0].weight.amax(0)


def test_a_hold_that_fails_an_audit_is_released(sd_pipe):
    """The second trigger points into the held region: that hold is released and its region repaired again."""
    out, _ = held_weights(sd_pipe, [(2, 2), (2, 2)])
    notes = [n for s in out.safety[0].steps for n in s.notes]
    assert any("the hold is released" in n for n in notes)


def test_a_hold_elsewhere_stands(sd_pipe):
    """The second trigger points elsewhere: both regions are held at the end."""
    out, weight = held_weights(sd_pipe, [(1, 1), (10, 10)])
    assert not any("released" in n for s in out.safety[0].steps for n in s.notes)
    assert weight[2:5, 2:5].min() > 0.9 and weight[11:14, 11:14].min() > 0.9


def test_ddim_inversion_by_hand():
    """A model that always says ε = 1: x̂0 stays ẑ0, so the inverted latent is a·ẑ0 + s·1 at the target level."""

    class Constant:
        def level(self, noise):
            angle = noise * torch.pi / 2
            return Level(float(torch.cos(torch.tensor(angle))), float(torch.sin(torch.tensor(angle))), noise)

        def estimate(self, z, level):
            eps = torch.ones_like(z)
            return (z - level.sigma * eps) / level.signal, eps

    target = Constant().level(0.5)
    edit = Edit(torch.full((1, 2, 2), 2.0), torch.ones(2, 2))
    out = rules.ddim_inversion.__wrapped__(Z, edit, target, 1.0, Constant())
    torch.testing.assert_close(out, torch.full((1, 2, 2), target.signal * 2.0 + target.sigma), atol=1e-4, rtol=0)


def test_tiny_guard_runs_every_rule_without_error(sd_pipe):
    for rule in ("ddim_inversion", "null_text", "direct_blend"):
        out = call(bright_guard(reinsertion=rule, regions=1).configured(BLOCK).attach(sd_pipe), steps=6)
        assert not out.safety[0].errors


@pytest.mark.parametrize("name", ["sd", "flux"])
def test_a_draft_without_recorded_calls_takes_its_default_rule(name):
    """Nothing is asked of a denoiser that was never heard; rules that need one give way, a family's own does not."""
    from guardpaint.draft.denoiser import Denoiser
    from guardpaint.draft.families import family_of
    from guardpaint.reinsert.apply import choose
    from guardpaint.testing import small
    from guardpaint.types import Draft

    pipe = small.pipeline(name)
    family = family_of(pipe)
    base = Denoiser(pipe, pipe.vae, family, calls=(), batch=1, image=0)
    zero, level = torch.zeros(4, 8, 8), Level(0.5, 0.5, 0.5)
    draft = Draft(3, 6, zero, zero, zero, level, level, base)
    assert choose("auto", draft, family) == (family.default_reinsertion, "")
    assert choose("ddim_inversion", draft, family)[0] == ("flow_ode" if name == "flux" else "direct_blend")
    assert choose("null_text", draft, family)[0] == "direct_blend"
