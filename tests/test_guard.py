"""Saving and loading a whole guard; reports and their pages; tiny decoders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch
from helpers import bright_guard, call

import guardpaint
from guardpaint.errors import BadCheckpoint, BadConfig, BadInput
from guardpaint.guard import GuardPaint
from guardpaint.loop.report import load_report, report_schema
from guardpaint.parts.checks import check_protocols
from guardpaint.policy import Policy
from guardpaint.repair.inpainter import Inpainter
from guardpaint.repair.knobs import FixedProposer, UniformProposer
from guardpaint.repair.native import NativeRepairer
from guardpaint.repair.ranker import Ranker
from guardpaint.store.images import from_pil
from guardpaint.testing import small
from guardpaint.testing.doubles import AlwaysSafe, Approves, PaintsFlat
from guardpaint.types import Knobs
from guardpaint.verify.seam import PixelSeam


def test_a_guard_round_trips_and_decides_the_same(tmp_path, sd_pipe):
    guard = small.guard(candidates=2, regions=1)
    guard.save_pretrained(tmp_path / "g")
    again = GuardPaint.from_pretrained(tmp_path / "g")
    assert again.config == guard.config and again.policy == guard.policy
    assert again.decoders.keys() == guard.decoders.keys()
    a, b = call(guard.attach(sd_pipe), steps=3), call(again.attach(sd_pipe), steps=3)
    assert torch.equal(a.images, b.images)
    assert [s.audits for s in a.safety[0].steps] == [s.audits for s in b.safety[0].steps]
    assert again.weight_hashes() == guard.weight_hashes()
    changed = GuardPaint.from_pretrained(tmp_path / "g", candidates=7)
    assert changed.config.candidates == 7


@pytest.mark.parametrize(
    "missing", ["guardpaint.json", "policy.yaml", "auditor", "repairer", "proposer", "decoders/sd"]
)
def test_missing_parts_are_named(tmp_path, missing):
    import shutil

    small.guard().save_pretrained(tmp_path)
    target = tmp_path / missing
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    with pytest.raises((BadCheckpoint, BadConfig)) as caught:
        GuardPaint.from_pretrained(tmp_path)
    assert missing.split("/")[-1] in str(caught.value)


def test_fixed_knobs_are_kept(tmp_path):
    knobs = Knobs(cfg=4.0, dilation=0.7, feather=0.2, jitter=0.0, depth=3, seed_offset=0)
    base = small.guard()
    GuardPaint(base.parts.auditor, base.parts.repairer, FixedProposer(knobs, "optimised")).save_pretrained(tmp_path)
    assert GuardPaint.from_pretrained(tmp_path).parts.proposer == FixedProposer(knobs, "optimised")
    manifest = json.loads((tmp_path / "guardpaint.json").read_text())
    manifest["parts"]["proposer"]["options"]["knobs"] = {"colour": "red"}
    (tmp_path / "guardpaint.json").write_text(json.dumps(manifest))
    with pytest.raises(BadCheckpoint, match="knobs"):
        GuardPaint.from_pretrained(tmp_path)


def test_bad_paths_never_reach_the_network(tmp_path):
    for name in ("/nowhere/at/all", "./nothing", "not-a-hub-id", str(tmp_path / "file.txt")):
        with pytest.raises(BadCheckpoint, match="not a directory"):
            GuardPaint.from_pretrained(name)


def test_reports_follow_the_published_schema(pipe):
    schema = report_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for guard in (bright_guard(), bright_guard(f_gate="off", p_gate="off"), small.guard(candidates=2)):
        for report in call(guard.attach(pipe)).safety:
            jsonschema.validate(json.loads(report.to_json()), schema)


def test_report_saves_loads_and_refuses_others(tmp_path, sd_pipe):
    report = call(bright_guard().attach(sd_pipe)).safety[0]
    report.save(tmp_path / "r.json")
    assert load_report(tmp_path / "r.json") == report.to_dict()
    (tmp_path / "x.json").write_text("{}")
    (tmp_path / "y.json").write_text('{"half": ')
    for name, word in (("x", "not a GuardPaint report"), ("y", "not a report"), ("z", "no such")):
        with pytest.raises(BadInput, match=word):
            load_report(tmp_path / f"{name}.json")


def test_html_shows_the_story_and_frames_the_winner(sd_pipe):
    report = call(bright_guard(log_prompts=True).attach(sd_pipe), "a <b>street</b>").safety[0]
    page = report.to_html()
    assert "a &lt;b&gt;street&lt;/b&gt;" in page and "<b>street" not in page
    assert page.count('class="won"') >= 1 and "data:image/png" in page and "trigger 0.40" in page
    assert "<script" not in page and "http" not in page


def test_evidence_is_blurred_unless_retained(sd_pipe):
    """Blurred pictures keep about three cells across: next to nothing of the original."""
    plain = call(bright_guard().attach(sd_pipe)).safety[0].evidence
    clear = call(bright_guard(retain_evidence=True).attach(sd_pipe)).safety[0].evidence
    assert plain and all(e.blurred for e in plain) and not any(e.blurred for e in clear)

    def detail(e):
        image = from_pil(e.image)
        return float((image[:, 1:] - image[:, :-1]).abs().mean())

    assert detail(plain[0]) < 0.2 * detail(clear[0])


def test_blurred_evidence_takes_little_memory_and_is_large_enough_to_see(sd_pipe):
    """Services and guards keep that of 256 requests; at 96 px and with dozens of candidates it was 50 MB."""
    report = call(bright_guard().attach(sd_pipe)).safety[0]
    pictures = [e for e in report.evidence if e.heat is None]
    assert pictures and all(e.bytes <= 3 * 24 * 24 for e in pictures)
    assert all(min(e.image.size) == 96 for e in report.evidence)
    assert all(e.heat.untyped_storage().nbytes() == 4 * e.heat.numel() for e in report.evidence if e.heat is not None)
    assert report.evidence_bytes == sum(e.bytes for e in report.evidence)


def test_the_reports_that_are_kept_are_bounded(sd_pipe):
    guard = bright_guard()
    guard.remember_requests(2)
    twin = guard.configured(candidates=1).attach(sd_pipe)
    for name in "abc":
        call(twin, request_id=name)
    own = twin._guardpaint
    assert own.reports("b") and own.reports("c") == own.reports()
    with pytest.raises(BadInput, match="latest 2"):
        own.reports("a")


def test_operators_see_why_as_grad_cam(sd_pipe):
    policy = replace(Policy.default(), trigger=0.0001)
    for keep in (True, False):
        report = call(
            small.guard(candidates=1, regions=1, retain_evidence=keep).configured(policy).attach(sd_pipe)
        ).safety[0]
        cams = [e for e in report.evidence if e.kind.startswith("why ")]
        assert report.triggered and bool(cams) == keep and ("Grad-CAM, " in report.to_html()) == keep
        for cam in cams:
            assert cam.kind[4:] in policy.names[1:] and cam.heat.min() >= 0 and cam.heat.max() <= 1


def test_views_through_the_tiny_decoder_at_audit_size(pipe, family):
    """With a tiny decoder the VAE decodes once, for the user; without, once more per audited step."""
    guard = bright_guard(gain=0.1)
    counts = {}
    for name, decoders in (("tiny", {family: small.tiny_decoder(small.LATENT_CHANNELS[family])}), ("full", {})):
        calls = []
        decode = pipe.vae.decode
        pipe.vae.decode = lambda *a, **k: (calls.append(a[0].shape), decode(*a, **k))[1]  # noqa: B023
        try:
            g = GuardPaint(guard.parts.auditor, guard.parts.repairer, decoders=decoders)
            out = call(g.attach(pipe))
        finally:
            del pipe.vae.decode
        counts[name] = len(calls)
        assert out.safety[0].status == "clean" and out.safety[0].effective_settings["view_decoder"] == name
    assert counts == {"tiny": 1, "full": 2}


def test_a_wrong_tiny_decoder_is_refused(sd_pipe):
    guard = GuardPaint(small.auditor(), small.inpainter(), decoders={"sd": small.tiny_decoder(16)})
    with pytest.raises(BadConfig, match="16 latent channels, the pipeline has 4"):
        guard.attach(sd_pipe)


def test_resolution_modes(sd_pipe):
    """adaptive: coarse only when benign, fine when triggered or in the band; paper: by progress."""

    def sizes(gain, **config):
        out = call(bright_guard(gain, mode="monitor", **config).attach(sd_pipe), steps=4)
        return [[a.pixels for a in s.audits] for s in out.safety[0].steps]

    assert sizes(0.1) == [[32], [32]]
    assert sizes(1.0) == [[32, 64], [32, 64]]
    assert sizes(0.68, band=0.1) == [[32, 64], [32, 64]]
    assert sizes(0.68, band=0.0) == [[32], [32]]
    assert sizes(0.1, resolution="paper", audits=4, audit_start=0.0) == [[32], [32], [64], [64]]
    assert sizes(0.1, resolution="fine") == [[64], [64]]


def test_stepped_view_is_the_papers(sd_pipe):
    out = call(bright_guard(0.1, view="stepped").attach(sd_pipe))
    assert out.safety[0].steps[0].view == "stepped"
    x0 = call(bright_guard(0.1).attach(sd_pipe)).safety[0].steps[0]
    assert x0.view == "x0" and x0.noise > out.safety[0].steps[0].noise


def test_cost_terms_are_recorded(sd_pipe):
    """C_As + K(N·C_Ag + N·C_As + C_reinsert): counts and seconds of each."""
    step = call(bright_guard(candidates=3).attach(sd_pipe)).safety[0].steps[0]
    assert step.cost["candidates"] == 3 * len(step.tournaments) and step.cost["reinserts"] == 1
    assert step.cost["audits"] == len(step.audits) + 3 * len(step.tournaments)
    assert {"first_pass", "view", "repair", "verify", "reinsert"} <= step.timings.keys()
    assert all(v >= 0 for v in step.timings.values())


def test_union_tournament_when_every_region_fails(sd_pipe):
    """Regions alone gain too little; together they pass."""
    out = call(bright_guard(delta=0.05, regions=3).attach(sd_pipe))
    names = [[t.region for t in s.tournaments] for s in out.safety[0].steps]
    winners = [[t.winner for t in s.tournaments] for s in out.safety[0].steps]
    assert any("union" in n for n in names), (names, winners)
    for n, w in zip(names, winners, strict=True):
        if "union" in n:
            assert w[: n.index("union")] == [None] * n.index("union")


def test_first_candidate_selection(sd_pipe):
    best = call(bright_guard(regions=1).attach(sd_pipe)).safety[0].steps[0].tournaments[0]
    first = call(bright_guard(regions=1, selection="first").attach(sd_pipe)).safety[0].steps[0].tournaments[0]
    assert first.winner == next(i for i, c in enumerate(first.candidates) if c.utility > 0)
    assert best.candidates[best.winner].utility >= first.candidates[first.winner].utility


@pytest.mark.weights
@pytest.mark.parametrize(("name", "decibel"), [("taesd", 25.4), ("taesdxl", 25.7), ("taesd3", 30.4), ("taef1", 28.7)])
def test_real_tiny_decoders(weights, name, decibel):
    """The four TAESD decoders through our view code: the published round-trip quality."""
    from diffusers import AutoencoderTiny
    from skimage import data

    from guardpaint.draft.codec import ViewDecoder

    tae = AutoencoderTiny.from_pretrained(weights / name, torch_dtype=torch.float32)
    image = torch.from_numpy(data.astronaut()).permute(2, 0, 1)[None].float() / 255
    with torch.no_grad():
        z = tae.encode(image * 2 - 1).latents
        view = ViewDecoder(tae, None, 8, torch.device("cpu"))
        back, small = view.full(z), view.at(z, 224)
    psnr = -10 * torch.log10(((back - image) ** 2).mean()).item()
    assert psnr == pytest.approx(decibel, abs=0.3) and small.shape == (1, 3, 224, 224)


class Heavy:
    """A part with weights that is no module."""

    def __init__(self, part):
        self.part, self.at = part, None

    def __getattr__(self, name):
        return getattr(self.part, name)

    def to(self, device):
        self.at = device
        return self


def test_every_part_with_weights_is_moved():
    """Modules or not; parts without weights stay. `meta` stands for another device."""
    parts = small.guard().parts
    approver, repairer = Heavy(Approves()), Heavy(parts.repairer)
    seam, decoder = Heavy(PixelSeam()), small.tiny_decoder(4)
    ranker = Ranker()
    guard = GuardPaint(
        parts.auditor, repairer, parts.proposer, approver=approver, seam=seam, ranker=ranker, decoders={"sd": decoder}
    )
    assert guard.to("meta") is guard
    assert approver.at == repairer.at == seam.at == "meta"
    for module in (parts.auditor, parts.proposer, ranker, decoder):
        assert all(p.is_meta for p in module.parameters()), type(module)
    plain = GuardPaint(AlwaysSafe(), NativeRepairer(), UniformProposer())
    assert plain.to("cpu") is plain


def test_the_inpainter_moves_with_its_tiny_decoder():
    inpainter = Inpainter(small.inpainter().pipe, small.tiny_decoder(4))
    GuardPaint(AlwaysSafe(), inpainter).to("meta")
    moved = (inpainter.pipe.unet, inpainter.pipe.vae, inpainter.pipe.text_encoder, inpainter.tiny)
    assert all(p.is_meta for module in moved for p in module.parameters())


def test_version():
    assert guardpaint.__version__ and (Path(guardpaint.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize(
    ("role", "part", "said"),
    [
        ("auditor", object(), "auditor object: has no categories, absent, sizes, audit"),
        ("repairer", object(), "repairer object: has no name, candidates"),
        ("repairer", PaintsFlat, "repairer PaintsFlat: is a class; pass an instance"),
        ("approver", AlwaysSafe(), "approver AlwaysSafe: has no name, approve; any approver has categories"),
    ],
)
def test_a_part_that_cannot_play_its_role_is_refused_when_the_guard_is_composed(role, part, said):
    """The annotations are checked under tests only, so the guard checks by itself."""
    parts = {"auditor": AlwaysSafe(), "repairer": PaintsFlat(), "approver": None}
    check_protocols(**parts)
    with pytest.raises(BadConfig, match=said):
        check_protocols(**{**parts, role: part})


def test_compose_is_the_constructor_by_keywords():
    approver = Approves()
    guard = GuardPaint.compose(auditor=AlwaysSafe(), approver=approver, repairer=PaintsFlat(), policy=Policy.default())
    assert guard.parts.approver is approver and guard.parts.repairer.name == PaintsFlat().name
    assert GuardPaint.compose(auditor=AlwaysSafe()).parts.repairer.name == "native"
