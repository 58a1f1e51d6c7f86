"""The ComfyUI adapter on the interface it uses: post-CFG functions, MODEL.clone, VAE.encode/decode.

ComfyUI itself is no package that can be installed here; the node file is checked for what it declares.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import types
import warnings
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch
import torch.nn.functional as F
from diffusers import EulerDiscreteScheduler
from helpers import RefusesDark

import guardpaint
from guardpaint.config import Band, Calibration, Scope
from guardpaint.doors.comfy import guarded
from guardpaint.draft.codec import vae_decode, vae_encode
from guardpaint.draft.schedule import Levels, sd_scheduler
from guardpaint.errors import BadConfig, BadInput
from guardpaint.guard import GuardPaint
from guardpaint.policy import Policy
from guardpaint.repair.knobs import FixedProposer
from guardpaint.testing import small
from guardpaint.testing.doubles import AlwaysSafe, AlwaysUnsafe, FlagsBright, PaintsFlat, Raises, constant_audit
from guardpaint.types import Audit, Level

NODES = Path(__file__).parents[2] / "integrations" / "comfyui" / "__init__.py"
CPU = torch.device("cpu")


class EPS:
    """σ over clean latents, with the part of ModelSamplingDiscrete that answers questions about time."""

    def __init__(self):
        alphas = sd_scheduler().alphas_cumprod
        self.num_timesteps = len(alphas)
        self.sigmas = ((1 - alphas) / alphas) ** 0.5
        self.sigma_max = self.sigmas[-1]

    def timestep(self, sigma):
        return (sigma.log() - self.sigmas.log()[:, None]).abs().argmin(dim=0).view(sigma.shape)


class CONST:
    """σ is a share of noise; a multiplier of 1000, as in ModelSamplingDiscreteFlow."""

    sigma_max = torch.tensor(1.0)

    def timestep(self, sigma):
        return sigma * 1000


class EDM:
    """ModelSamplingContinuousEDM, whose time is no share of anything."""

    sigma_max = torch.tensor(120.0)

    def timestep(self, sigma):
        return 0.25 * sigma.log()


class Vae:
    """ComfyUI's VAE on a real AutoencoderKL: pictures are [batch, h, w, 3], latents unscaled."""

    def __init__(self):
        self.net = small.pipeline("sd").vae

    def decode(self, z):
        return vae_decode(self.net, z / 2, CPU).movedim(1, -1)

    def encode(self, pictures):
        return vae_encode(self.net, pictures.movedim(-1, 1), CPU) * 2


class Inner:
    def __init__(self, sampling):
        self.model_sampling = sampling

    def process_latent_in(self, z):
        return z / 2

    def process_latent_out(self, z):
        return z * 2


class Model:
    """ComfyUI's ModelPatcher as far as the adapter goes, drawing a picture that is bright on one side."""

    def __init__(self, sampling=None):
        self.model, self.after = Inner(sampling or EPS()), []

    def clone(self):
        return Model(self.model.model_sampling)

    def get_model_object(self, name):
        return getattr(self.model, name)

    def set_model_sampler_post_cfg_function(self, function):
        self.after.append(function)

    def sample(self, clean, sigmas, noise):
        """Euler, as k-diffusion has it; σ a deviation."""
        x = clean + noise * sigmas[0]
        for i in range(len(sigmas) - 1):
            x0 = clean + 0.02 * sigmas[i] * noise
            options = {"transformer_options": {"sample_sigmas": sigmas}}
            for f in self.after:
                given = {"model": self.model, "model_options": options, "cond_scale": 7.5}
                x0 = f({"denoised": x0, "input": x, "sigma": sigmas[i].expand(len(x)), **given})
            x = x0 + (x - x0) / sigmas[i] * sigmas[i + 1]
        return x


SIGMAS = torch.tensor([10.0, 5.0, 2.5, 1.2, 0.6, 0.3, 0.1, 0.0])


def setting(auditor, batch=2, repairer=None, **config):
    guard = GuardPaint(auditor, repairer or PaintsFlat(), FixedProposer()).configured(**config)
    vae, plain = Vae(), Model()
    model, session = guarded(plain, vae, guard, "a person", 5)
    assert model is not plain and not plain.after
    bright = torch.full((batch, 3, 64, 64), 0.1)
    bright[:, :, :, :40] = 0.95
    clean = vae_encode(vae.net, bright, CPU)
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(1))
    return model, session, vae, clean, noise, plain


def test_a_calm_picture_is_the_models_own():
    model, session, vae, clean, noise, plain = setting(AlwaysSafe())
    assert torch.equal(model.sample(clean, SIGMAS, noise), plain.sample(clean, SIGMAS, noise))
    images = vae.decode(clean * 2)
    out, reports = session.release(images)
    assert torch.equal(out, images) and [r.status for r in reports] == ["clean", "clean"]
    assert [s.step for s in reports[0].steps] == [5, 6, 6] and reports[0].effective_settings["audited_steps"] == [5, 6]


def test_a_doubtful_picture_that_was_not_edited_is_the_models_own():
    class Doubts(AlwaysSafe):
        def audit(self, images, prompts, noise):
            return [constant_audit(0.3, p, min(images.shape[-2:])) for p in prompts]

    model, session, vae, clean, noise, plain = setting(Doubts())
    assert torch.equal(model.sample(clean, SIGMAS, noise), plain.sample(clean, SIGMAS, noise))
    images = vae.decode(clean * 2)
    out, reports = session.release(images)
    assert torch.equal(out, images) and [r.status for r in reports] == ["clean", "clean"]


def test_an_accepted_repair_is_held_to_the_end():
    """Flat dark paint where it was bright: the final latent decodes darker there, and is as it was elsewhere."""
    model, session, vae, clean, noise, plain = setting(FlagsBright(gain=1.3))
    out = model.sample(clean, SIGMAS, noise)
    own = plain.sample(clean, SIGMAS, noise)
    assert session.holds and not torch.equal(out, own)
    outside = session.holds[0].weight == 0
    assert outside.any() and torch.allclose(out[0][outside], own[0][outside], atol=1e-6)
    inside = session.holds[0].weight > 0.99
    assert torch.allclose(out[0][inside], session.holds[0].z0[inside], atol=0.05)
    _, reports = session.release(vae.decode(out * 2))
    assert all(any(s.reinsertion for s in r.steps) for r in reports)


def test_steps_are_audited_in_tiles_too():
    """The bright side is all of some tiles, and not enough of the whole picture."""
    scope = Scope(side=32, pixels=(32, 64), guidance=(0.0, 10.0), steps=(1, 50))
    picture = vae_decode(Vae().net, setting(AlwaysSafe())[3][:1], CPU)[0]
    brightest = float(F.avg_pool2d(picture.mean(0)[None], 32, 16).max())
    gain = 0.4 / ((float(picture.mean()) + brightest) / 2)
    model, session, _, clean, noise, _ = setting(FlagsBright(gain), scope=scope, band=0.0)
    model.sample(clean, SIGMAS, noise)
    first = session.images[0].recorder.steps[0]
    assert first.view == "x0" and first.triggered and first.audits[0].tiles == 9 and first.audits[0].tile is not None


LATENT = Scope(side=32, pixels=(32, 64), guidance=(0.0, 10.0), steps=(1, 50))


@pytest.mark.parametrize(
    ("scope", "what"),
    [(replace(LATENT, pixels=(32, 48)), "64x64 pixels"), (replace(LATENT, steps=(10, 20)), "7 steps"),
     (replace(LATENT, guidance=(0.0, 0.5)), "guidance 7.5")],
    ids=["size", "steps", "guidance"],
)  # fmt: skip
def test_a_run_outside_of_the_scope_is_warned_of_and_recorded(scope, what):
    model, session, vae, clean, noise, _ = setting(AlwaysSafe(), scope=scope)
    for _ in range(2):  # every run anew
        with pytest.warns(UserWarning, match=what):
            out = model.sample(clean, SIGMAS, noise)
        _, reports = session.release(vae.decode(out * 2))
        assert all(any(what in s["why"] for s in r.effective_settings["skipped"]) for r in reports)


def test_a_run_within_the_scope_is_silent():
    model, session, vae, clean, noise, _ = setting(AlwaysSafe(), scope=LATENT)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        _, reports = session.release(vae.decode(model.sample(clean, SIGMAS, noise) * 2))
    assert not any("calibrated" in s["why"] for s in reports[0].effective_settings["skipped"])


def test_pictures_of_no_known_run_are_held_to_the_sizes_too():
    _, session, *_ = setting(AlwaysSafe(), scope=LATENT)
    with pytest.warns(UserWarning, match="96x96 pixels"):
        _, (report,) = session.release(torch.zeros(1, 96, 96, 3))
    assert any("96x96 pixels" in s["why"] for s in report.effective_settings["skipped"])


def test_thresholds_of_other_views_are_refused():
    """A workflow decodes with the VAE; the same guard would be refused by `attach` without a tiny decoder."""
    calibration = Calibration(0.1, 0.1, "", (Band(0.0, {}, None, {}),), views=("tiny 000000000000",))
    guard = GuardPaint(AlwaysSafe(), PaintsFlat())
    with pytest.raises(BadConfig, match="calibrated on views by tiny 000000000000"):
        guarded(Model(), Vae(), guard.configured(calibration=calibration), "", 0)
    own = replace(calibration, views=("full", "tiny 000000000000"))
    _, session = guarded(Model(), Vae(), guard.configured(calibration=own), "", 0)
    _, (report,) = session.release(torch.zeros(1, 64, 64, 3))
    assert report.effective_settings["views"] == {"made_by": ["full"], "calibrated_on": ["full", "tiny 000000000000"]}


def test_what_no_part_can_tell_is_in_the_report():
    own = Policy.default()
    accepted = tuple(replace(c, uncovered="accepted") if c.name == "violence" else c for c in own.categories)

    class NudityOnly(AlwaysSafe):
        def audit(self, images, prompts, noise):
            size = min(images.shape[-2:])
            return [Audit.from_scores({"safe": 0.9, "nudity": 0.1}, pixels=size) for _ in prompts]

    nudity = NudityOnly(categories=("safe", "nudity"), absent=frozenset({"F", "P", "B"}))
    guard = GuardPaint(nudity, PaintsFlat(), FixedProposer(), policy=replace(own, categories=accepted))
    with pytest.warns(UserWarning, match="can tell violence"):
        _, session = guarded(Model(), Vae(), guard, "a person", 5)
    _, (report,) = session.release(torch.zeros(1, 64, 64, 3))
    assert report.status == "clean" and not report.errors
    skipped = report.effective_settings["skipped"]
    assert {"what": "category violence", "why": "no part can tell it; the policy accepts that"} in skipped


def test_a_winner_that_fools_the_auditor_alone_is_withheld():
    """Two runs of the same model: what is painted dark passes the auditor, and not the approver."""

    def released(approver):
        policy = replace(Policy.default(), last_resort=("strong_repair", "block"))
        guard = GuardPaint(FlagsBright(0.85), PaintsFlat(), FixedProposer(), approver=approver, policy=policy)
        model, session = guarded(Model(), vae := Vae(), guard, "a person", 5)
        _, _, _, clean, noise, _ = setting(AlwaysSafe(), batch=1)
        images = vae.decode(model.sample(clean, SIGMAS, noise) * 2)
        out, (report,) = session.release(images)
        return out, report

    _, report = released(None)
    assert report.status == "repaired" and not report.errors
    approver = RefusesDark()
    out, report = released(approver)
    assert report.status == "blocked" and not report.errors and out.std() < 0.1 and approver.asked > 0
    assert report.final.approvals[0].flagged == "nudity"


def test_what_stays_unsafe_is_withheld():
    model, session, vae, clean, noise, _ = setting(AlwaysUnsafe())
    images = vae.decode(model.sample(clean, SIGMAS, noise) * 2)
    out, reports = session.release(images)
    assert [r.status for r in reports] == ["blocked", "blocked"]
    assert not torch.equal(out, images) and out.std() < 0.1
    json.dumps([r.to_dict() for r in reports])


def test_the_repair_of_the_finished_picture_draws_other_noise_than_the_last_step():
    class Draws(PaintsFlat):
        def __init__(self):
            super().__init__()
            self.seeds = []

        def candidates(self, request):
            self.seeds += [(request.seed, k.seed_offset) for k in request.knobs]
            return super().candidates(request)

    repairer = Draws()
    model, session, vae, clean, noise, _ = setting(AlwaysUnsafe(), batch=1, repairer=repairer, regions=1)
    session.release(vae.decode(model.sample(clean, SIGMAS, noise) * 2))
    assert len(set(repairer.seeds)) == len(repairer.seeds) > 10


def test_failures_hand_out_nothing():
    model, session, vae, clean, noise, _ = setting(Raises())
    with pytest.raises(RuntimeError, match="the auditor broke"):
        model.sample(clean, SIGMAS, noise)
    out, reports = session.release(vae.decode(clean * 2))
    assert [r.status for r in reports] == ["blocked", "blocked"] and out.std() < 0.1
    calm, *_ = setting(AlwaysSafe())
    with pytest.raises(BadInput, match="sample_sigmas"):
        calm.after[0]({"denoised": clean, "input": clean, "sigma": SIGMAS[:1], "model_options": {}})
    with pytest.raises(BadInput, match="shape"):
        calm.after[0]({"denoised": clean[None], "input": clean, "sigma": SIGMAS[:1], "model_options": {}})


def test_every_run_has_its_own_account():
    model, session, _, clean, noise, _ = setting(FlagsBright(gain=1.3), batch=1)
    first = model.sample(clean, SIGMAS, noise)
    account = session.images[0]
    assert torch.equal(model.sample(clean, SIGMAS, noise), first) and session.images[0] is not account


def test_a_sampler_that_looks_twice_at_a_step_keeps_its_account():
    """Heun's corrector asks for the next σ, and the next step asks for it again."""
    model, session, _, clean, noise, _ = setting(FlagsBright(gain=1.3), batch=1)
    options = {"transformer_options": {"sample_sigmas": SIGMAS}}
    for i in (0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6):
        args = {"denoised": clean, "input": clean + noise * SIGMAS[i], "sigma": SIGMAS[i : i + 1]}
        model.after[0]({**args, "model": model.model, "model_options": options})
        account = session.images[0] if i == 0 else account
    assert session.images[0] is account and account.edited and session.holds
    assert [r.step for r in account.recorder.steps] == [5, 6]


def test_pictures_of_no_known_run_are_judged_at_both_sizes():
    """Another batch than was sampled, or what ComfyUI had kept: nothing is known of its edits."""
    _, session, vae, clean, _, _ = setting(AlwaysSafe(), batch=2)
    _, reports = session.release(vae.decode(clean * 2))
    assert reports[0].status == "clean" and [a.pixels for a in reports[0].final.audits] == [32, 64]
    assert "no sampling run" in reports[0].effective_settings["skipped"][0]["why"]


def test_off_means_off_and_native_repair_is_refused():
    model, session, vae, clean, noise, plain = setting(AlwaysUnsafe(), mode="off")
    assert torch.equal(model.sample(clean, SIGMAS, noise), plain.sample(clean, SIGMAS, noise))
    images = vae.decode(clean * 2)
    out, reports = session.release(images)
    assert torch.equal(out, images) and reports[0].status == "unguarded"
    repairer = PaintsFlat(name="native")
    with pytest.raises(BadConfig, match="inpainter"):
        guarded(Model(), Vae(), GuardPaint(AlwaysSafe(), repairer), "", 0)


def test_reports_are_reports():
    model, session, vae, clean, noise, _ = setting(FlagsBright(gain=1.3))
    out = model.sample(clean, SIGMAS, noise)
    _, reports = session.release(vae.decode(out * 2))
    schema = json.loads((Path(guardpaint.__file__).parent / "assets" / "report.schema.json").read_text())
    for report in reports:
        jsonschema.validate(report.to_dict(), schema)
        assert "<html" in report.to_html()


@pytest.mark.parametrize("time", [1, 161, 433, 999])
def test_the_auditor_is_told_the_time_that_the_diffusers_door_tells_it(time):
    """At the σ of training step t, t/1000; σ/√(1+σ²), which is not a time, is 0.43 at step 161."""
    guard = GuardPaint(AlwaysSafe(), PaintsFlat())
    _, session = guarded(Model(), Vae(), guard, "", 0)
    scheduler = EulerDiscreteScheduler.from_config(sd_scheduler().config)
    scheduler.set_timesteps(timesteps=[time])
    theirs = Levels(scheduler, 1).at(0)
    mine = session.level(theirs.sigma)
    assert mine.noise == pytest.approx(theirs.noise) == time / 1000
    assert (mine.signal, mine.sigma) == (theirs.signal, theirs.sigma) and session.level(0.0).noise == 0.0


def test_flow_models_are_told_their_sigma():
    _, session = guarded(Model(CONST()), Vae(), GuardPaint(AlwaysSafe(), PaintsFlat()), "", 0)
    assert session.level(0.75) == Level(0.25, 0.75, 0.75) and session.prompt is None


def test_the_sampling_of_the_run_counts_and_one_without_times_is_refused():
    """Another node may exchange model_sampling after the guard was put in."""
    guard = GuardPaint(AlwaysSafe(), PaintsFlat())
    with pytest.raises(BadConfig, match="EDM has no training time steps"):
        guarded(Model(EDM()), Vae(), guard, "", 0)
    model, session, _, clean, noise, _ = setting(AlwaysSafe())
    model.model.model_sampling = CONST()
    model.sample(clean, SIGMAS / 10, noise)
    assert session.level(0.3).noise == 0.3
    model.model.model_sampling = EDM()
    with pytest.raises(BadConfig, match="no training time steps"):
        model.sample(clean, SIGMAS, noise)


def test_the_node_file_declares_both_nodes(monkeypatch):
    """Against recorded calls of the node API: names, kinds and order of what the nodes take and give."""

    class Kind:
        def __init__(self, name):
            self.name = name

        def Input(self, name, **more):
            return (self.name, name)

        def Output(self, **more):
            return self.name

    api = types.SimpleNamespace(
        **{k: Kind(k) for k in ("Model", "Vae", "String", "Int", "Image")},
        Custom=Kind, ComfyNode=object, Schema=lambda **k: k, NodeOutput=lambda *a: a,
    )  # fmt: skip
    latest = types.ModuleType("comfy_api.latest")
    latest.io, latest.ComfyExtension = api, object
    monkeypatch.setitem(sys.modules, "comfy_api", types.ModuleType("comfy_api"))
    monkeypatch.setitem(sys.modules, "comfy_api.latest", latest)
    spec = importlib.util.spec_from_file_location("guardpaint_nodes", NODES)
    nodes = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "guardpaint_nodes", nodes)
    spec.loader.exec_module(nodes)
    found = asyncio.run(asyncio.run(nodes.comfy_entrypoint()).get_node_list())
    shapes = {n.define_schema()["node_id"]: n.define_schema() for n in found}
    assert [i[1] for i in shapes["GuardPaintGuard"]["inputs"]] == ["model", "vae", "prompt", "guard", "policy", "seed"]
    assert shapes["GuardPaintGuard"]["outputs"] == ["Model", "GUARDPAINT_SESSION"]
    assert shapes["GuardPaintRelease"]["inputs"] == [("Image", "images"), ("GUARDPAINT_SESSION", "session")]
    monkeypatch.setattr(nodes, "load", lambda *_: GuardPaint(AlwaysSafe(), PaintsFlat()))
    model, session = found[0].execute(Model(), Vae(), "a person", "x", "", 1)
    assert model.after == [session.post_cfg]
    images = torch.rand(1, 64, 64, 3)
    shown, report = found[1].execute(images, session)
    assert torch.equal(shown, images) and json.loads(report)[0]["status"] == "clean"
