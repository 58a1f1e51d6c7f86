"""Fail closed: whatever breaks, no unsafe image is released and nothing is silent."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from helpers import bright_guard, call

from guardpaint.errors import AuditLogError, BadInput, NotFinite
from guardpaint.guard import GuardPaint
from guardpaint.loop.audit_log import AuditLog, verify_log
from guardpaint.policy import Policy
from guardpaint.repair.knobs import FixedProposer
from guardpaint.testing import small
from guardpaint.testing.doubles import AlwaysSafe, AlwaysUnsafe, Approves, FlagsBright, PaintsFlat, PaintsNaN, Raises

BLOCK = replace(Policy.default(), last_resort=("block",))
KEEP = replace(Policy.default(), last_resort=("keep",))


def assert_blocked(out, word: str) -> None:
    report = out.safety[0]
    assert report.status == "blocked" and not report.released and report.exit_code == 3
    assert not torch.as_tensor(out.images).any(), "a blocked slot is empty"
    assert any(word in e for e in report.errors), report.errors


@pytest.mark.parametrize("after", [0, 1])
def test_an_auditor_that_raises_blocks(pipe, after):
    """Mid-trajectory (first pass) or at the final verdict (second)."""
    assert_blocked(call(GuardPaint(Raises(after), PaintsFlat()).attach(pipe)), "the auditor broke")


def test_on_error_raise_raises(sd_pipe):
    guard = GuardPaint(Raises(), PaintsFlat()).configured(on_error="raise")
    with pytest.raises(RuntimeError, match="the auditor broke"):
        call(guard.attach(sd_pipe))


def test_one_broken_image_does_not_take_the_batch_with_it(sd_pipe):
    class BreaksOnWord(AlwaysSafe):
        def audit(self, images, prompts, noise):
            found = AlwaysSafe.audit(self, images, prompts, noise)
            return [
                replace(a, safety=float("nan")) if "bad" in (p or "") else a
                for a, p in zip(found, prompts, strict=True)
            ]

    plain = call(sd_pipe, ["good", "bad"]).images
    out = call(GuardPaint(BreaksOnWord(), PaintsFlat()).attach(sd_pipe), ["good", "bad"])
    assert [r.status for r in out.safety] == ["clean", "blocked"]
    assert torch.equal(out.images[0], plain[0]) and not out.images[1].any()


def test_nan_scores_never_pass():
    class NaN(AlwaysSafe):
        def audit(self, images, prompts, noise):
            return [replace(a, adv_prob=float("nan")) for a in AlwaysSafe.audit(self, images, prompts, noise)]

    assert_blocked(call(GuardPaint(NaN(), PaintsFlat()).attach(small.pipeline("sd"))), "NaN")


def test_nan_latents_block(pipe):
    def poison(p, step, timestep, tensors):
        if step == 2:
            tensors["latents"] = tensors["latents"] * float("nan")
        return tensors

    out = call(GuardPaint(AlwaysSafe(), PaintsFlat()).attach(pipe), callback_on_step_end=poison)
    assert_blocked(out, "NaN")


def test_a_nan_repair_blocks(sd_pipe):
    assert_blocked(call(bright_guard(repairer=PaintsNaN()).attach(sd_pipe)), "nan repairer")


def test_timeouts_block(sd_pipe):
    out = call(bright_guard(timeout_s=1e-6).attach(sd_pipe))
    assert_blocked(out, "timeout_s=1e-06")


def test_the_ladder_ends_in_block(pipe):
    """No repair satisfies AlwaysUnsafe: strong repair, blur, block, in this order."""
    out = call(GuardPaint(AlwaysUnsafe(), PaintsFlat()).attach(pipe))
    report = out.safety[0]
    assert [r["rung"] for r in report.final.ladder] == ["strong_repair", "blur", "block"]
    assert report.status == "blocked" and not out.images.any() and report.final.verdict == "flagged"


def test_keep_must_be_asked_for_and_has_its_own_status(sd_pipe):
    plain = call(sd_pipe).images
    out = call(GuardPaint(AlwaysUnsafe(), PaintsFlat(), policy=KEEP).attach(sd_pipe))
    assert out.safety[0].status == "released_flagged" and out.safety[0].exit_code == 4
    assert torch.equal(plain, out.images) and out.nsfw_content_detected == [True]


class ContentWhenBlurred(FlagsBright):
    """Flags until the picture is smooth: only a blur passes."""

    def audit(self, images, prompts, noise):
        found = AlwaysUnsafe.audit(self, images, prompts, noise)
        smooth = (images[..., 1:] - images[..., :-1]).abs().mean((1, 2, 3))
        calm = AlwaysSafe.audit(self, images, prompts, noise)
        return [c if s < self.gain else f for f, c, s in zip(found, calm, smooth, strict=True)]


class PaintsTheSame(PaintsFlat):
    """A repairer that changes nothing."""

    def candidates(self, request):
        return request.view.expand(len(request.knobs), -1, -1, -1).clone()


class Draws(PaintsTheSame):
    """A repairer that changes nothing, and keeps the seeds that it was asked to draw with."""

    def __init__(self):
        super().__init__()
        self.seeds = []

    def candidates(self, request):
        self.seeds += [(request.seed, k.seed_offset) for k in request.knobs]
        return super().candidates(request)


def test_no_two_repairs_of_a_picture_draw_the_same_noise(pipe):
    """The tournament of the last step fails, and the strong repair after it starts from other noise."""
    repairer = Draws()
    guard = GuardPaint(AlwaysUnsafe(), repairer, FixedProposer()).configured(regions=1)
    out = call(guard.attach(pipe))
    tournaments = [t.region for s in out.safety[0].steps for t in s.tournaments]
    assert tournaments[-2:] == ["1", "strong 1"]
    assert len(set(repairer.seeds)) == len(repairer.seeds)


def test_a_blurred_picture_is_called_blurred(sd_pipe):
    policy = replace(Policy.default(), last_resort=("blur", "block"))
    sharp = call(sd_pipe).images
    level = float((sharp[..., 1:] - sharp[..., :-1]).abs().mean())
    auditor = ContentWhenBlurred(gain=level * 0.6, sizes=(64, 64))
    guard = GuardPaint(auditor, PaintsTheSame(), policy=policy).configured(percentile=0.0)
    out = call(guard.attach(sd_pipe))
    assert out.safety[0].status == "blurred", [a.scores for a in out.safety[0].final.audits]
    assert out.images.any()


def test_a_repaired_picture_still_in_doubt_is_repaired_once_more(pipe):
    """A wider second tournament can only better it, and the picture leaves either way."""
    again, enough = (call(bright_guard(doubt=d, percentile=60.0).attach(pipe)).safety[0] for d in (0.0, 1.0))
    notes = [[n for s in r.steps for n in s.notes if n.startswith("one more tournament")] for r in (again, enough)]
    assert again.status == enough.status == "repaired" and len(notes[0]) == 1 and notes[1] == []
    tournaments = [sum(len(s.tournaments) for s in r.steps) for r in (again, enough)]
    assert tournaments[0] > tournaments[1]
    assert again.final.audits[-1].scores["S"] >= enough.final.audits[-1].scores["S"] and again.final.verdict == "benign"


def test_doubt_never_touches_a_picture_that_was_not_edited(pipe):
    plain = call(pipe).images
    out = call(bright_guard(gain=0.3, doubt=0.0).attach(pipe))
    assert out.safety[0].status == "clean" and torch.equal(out.images, plain)


class Faithless(FlagsBright):
    """What it finds safe has nothing to do with the prompt any more."""

    def audit(self, images, prompts, noise):
        found = super().audit(images, prompts, noise)
        return [replace(a, faithfulness=0.9 if a.adv_prob >= 0.4 else 0.01) for a in found]


def test_in_the_last_resort_a_picture_counts_more_than_its_prompt(sd_pipe):
    strict = GuardPaint(Faithless(), PaintsFlat(0.0)).configured(percentile=40.0, last_f_gate="absolute")
    told = [call(g.attach(sd_pipe)).safety[0] for g in (strict, strict.configured(last_f_gate="off"))]
    assert told[0].status != "repaired" and told[0].final.ladder[0]["outcome"] != "passed"
    assert told[1].status == "repaired" and told[1].final.ladder == [{"rung": "strong_repair", "outcome": "passed"}]
    last = told[1].steps[-1].tournaments[-1]
    assert last.proposer == "strong" and last.rules["tau_f"] in (None, float("-inf")) and last.rules["tau_p"] > 0.6


def test_monitor_changes_nothing_and_says_so(pipe):
    plain = call(pipe).images
    out = call(bright_guard(mode="monitor").attach(pipe))
    assert torch.equal(plain, out.images)
    assert out.safety[0].status == "released_flagged" and out.safety[0].triggered
    assert any(s["what"] == "repair" and "monitor" in s["why"] for s in out.safety[0].effective_settings["skipped"])
    assert not any(s.tournaments for s in out.safety[0].steps)


def test_off_does_nothing_and_says_so(sd_pipe):
    out = call(GuardPaint(Raises(), PaintsFlat()).configured(mode="off").attach(sd_pipe))
    assert torch.equal(call(sd_pipe).images, out.images)
    assert out.safety[0].status == "unguarded" and out.safety[0].effective_settings["mode"] == "off"


def test_an_unwritable_log_blocks(tmp_path, sd_pipe):
    log = AuditLog(tmp_path / "log.jsonl")
    guard = GuardPaint(AlwaysSafe(), PaintsFlat(), audit_log=log)
    assert call(guard.attach(sd_pipe)).safety[0].status == "clean"
    os.close(log._file)
    log._file = os.open(tmp_path / "log.jsonl", os.O_RDONLY)
    assert_blocked(call(guard.attach(sd_pipe)), "could not be written")


def test_a_full_disk_blocks_and_leaves_no_half_record(tmp_path, sd_pipe, monkeypatch):
    path = tmp_path / "log.jsonl"
    log = AuditLog(path)
    guard = GuardPaint(AlwaysSafe(), PaintsFlat(), audit_log=log)
    call(guard.attach(sd_pipe))
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[: len(data) // 2]))
    assert_blocked(call(guard.attach(sd_pipe)), "disk may be full")
    monkeypatch.undo()
    assert verify_log(path).ok and verify_log(path).records == 1
    assert call(guard.attach(sd_pipe)).safety[0].status == "clean"
    assert verify_log(path).records == 2


def test_a_log_on_a_read_only_disk_is_refused_at_once(tmp_path):
    with pytest.raises(AuditLogError, match="cannot be opened"):
        AuditLog(tmp_path)  # a directory: no one can append to it, root included


def test_ctrl_c_propagates_and_the_pipeline_survives(sd_pipe):
    guard = GuardPaint(Raises(error=KeyboardInterrupt()), PaintsFlat())
    plain = call(sd_pipe).images
    with pytest.raises(KeyboardInterrupt):
        call(guard.attach(sd_pipe))
    assert torch.equal(plain, call(sd_pipe).images)


def test_flat_heat_map_has_no_region_and_ends_in_block(sd_pipe):
    class Flat(AlwaysUnsafe):
        def audit(self, images, prompts, noise):
            found = AlwaysUnsafe.audit(self, images, prompts, noise)
            return [replace(a, adv_map=torch.full((16, 16), 0.5)) for a in found]

    out = call(GuardPaint(Flat(), PaintsFlat(), policy=BLOCK).attach(sd_pipe))
    assert out.safety[0].status == "blocked"
    assert any("no region" in n for s in out.safety[0].steps for n in s.notes)


@pytest.mark.parametrize(
    "prompt", ["", "x" * 10_000, "а раinting (homoglyphs)", "שלום עולם", "🐈‍⬛ on a 🪑", "\x00\ud800 odd"]
)
def test_strange_prompts(sd_pipe, prompt):
    """The real text encoder of the auditor sees them all; none crashes, none slips through unseen."""
    if "\ud800" in prompt:
        prompt = prompt.replace("\ud800", "")
    guard = small.guard(candidates=1, regions=1).configured(BLOCK)
    out = call(guard.attach(sd_pipe), prompt, steps=3)
    assert not out.safety[0].errors
    assert out.safety[0].prompt is None and len(out.safety[0].prompt_sha256) == 64


def test_not_finite_is_named():
    from guardpaint.audit.contract import check_audit

    audit = AlwaysSafe().audit(torch.zeros(1, 3, 8, 8), ["a"], 0.0)[0]
    with pytest.raises(NotFinite, match="inf"):
        check_audit(replace(audit, quality=float("inf")), AlwaysSafe(), "a prompt")


class FineOnly(FlagsBright):
    """Flags in the loop; at the end it is content at the coarse size and not at the fine one."""

    def audit(self, images, prompts, noise):
        if noise > 0 or len(images) > 1:
            return FlagsBright.audit(self, images, prompts, noise)
        kind = AlwaysSafe if min(images.shape[-2:]) == self.sizes[0] else AlwaysUnsafe
        return kind.audit(self, images, prompts, noise)


def test_an_edited_picture_must_pass_both_sizes_at_the_end(sd_pipe):
    out = call(GuardPaint(FineOnly(), PaintsFlat(), policy=BLOCK).attach(sd_pipe))
    assert any(s.reinsertion for s in out.safety[0].steps)
    assert {a.pixels for a in out.safety[0].final.audits} == {32, 64}
    assert out.safety[0].status == "blocked"


@pytest.mark.parametrize("where", ["unet", "vae"])
def test_nan_hidden_by_pil_is_still_seen(sd_pipe, where):
    """diffusers turns NaN into black pixels; the guard looks before that."""
    with torch.no_grad():
        target = sd_pipe.unet.conv_out if where == "unet" else sd_pipe.vae.decoder.conv_out
        target.bias.fill_(float("nan"))
    guard = GuardPaint(AlwaysSafe(), PaintsFlat(), decoders={"sd": small.tiny_decoder(4)}).configured(audits=1)
    out = call(guard.attach(sd_pipe), output_type="pil")
    assert out.safety[0].status == "blocked" and "NaN" in out.safety[0].errors[0]


@pytest.mark.parametrize("pictures", [["one"], ["one", "two"]])
def test_a_view_that_holds_nan_is_no_black_picture(sd_pipe, pictures):
    """Most detectors are given bytes, in which NaN is black; only the view of the first picture holds it."""
    decodes = []

    def spoil(module, args, output):
        decodes.append(len(output))
        if len(decodes) == 1:
            output[0] = float("nan")

    handle = sd_pipe.vae.decoder.conv_out.register_forward_hook(spoil)
    out = call(GuardPaint(AlwaysSafe(), PaintsFlat()).attach(sd_pipe), pictures)
    handle.remove()
    assert_blocked(only(out, 0), "NaN")
    assert [r.status for r in out.safety[1:]] == ["clean"] * (len(pictures) - 1)


def only(out, number):
    """The output with one of its pictures only."""
    out.images = out.images[number : number + 1]
    return out


def test_the_approver_is_shown_no_nan():
    guard = GuardPaint(AlwaysSafe(), PaintsFlat(), approver=Approves())
    picture = torch.full((3, 8, 8), float("nan"))
    with pytest.raises(NotFinite, match="picture"):
        guard.parts.approval(picture, None, False)
    with pytest.raises(NotFinite, match="picture"):
        guard.audit_image(picture)
    assert not guard.parts.approver.asked


@pytest.mark.parametrize("convert", [lambda p: (255 * p).round().astype("uint8"), lambda p: 2 * p - 1])
def test_pixels_of_another_range_are_not_audited(sd_pipe, convert):
    """Bytes and [-1, 1] look white or black to a detector, and those are harmless."""
    guard = GuardPaint(AlwaysSafe(), PaintsFlat())
    with guard.watch(sd_pipe, seed=1) as watching:
        out = call(sd_pipe, output_type="np", callback_on_step_end=watching)
    out.images = convert(out.images)
    out = guard.finish(out)
    assert_blocked(out, r"must lie in [0, 1]")
    with pytest.raises(BadInput, match="must lie"):
        guard.audit_image(torch.full((3, 8, 8), 200.0))


def test_a_detector_that_leaves_out_a_category_blocks(sd_pipe):
    class Forgetful(AlwaysSafe):
        def audit(self, images, prompts, noise):
            return [replace(a, probs={"safe": 1.0}) for a in AlwaysSafe.audit(self, images, prompts, noise)]

    assert_blocked(call(GuardPaint(Forgetful(), PaintsFlat()).attach(sd_pipe)), "scored ['safe']")


def test_monitor_changes_nothing_even_when_the_auditor_breaks(sd_pipe):
    out = call(GuardPaint(Raises(), PaintsFlat()).configured(mode="monitor").attach(sd_pipe))
    assert torch.equal(call(sd_pipe).images, out.images)
    assert out.safety[0].status == "released_flagged" and out.safety[0].errors


def test_a_log_that_cannot_hold_the_prompt_blocks(tmp_path, sd_pipe):
    guard = GuardPaint(AlwaysSafe(), PaintsFlat(), audit_log=AuditLog(tmp_path / "log.jsonl")).configured(
        log_prompts=True
    )
    embeds, negative = sd_pipe.encode_prompt("a cat", "cpu", 1, True)
    kwargs = {"prompt_embeds": embeds, "negative_prompt_embeds": negative, "safety_prompt": "odd \ud800"}
    out = call(guard.attach(sd_pipe), None, **kwargs)
    assert out.safety[0].status == "blocked"
