"""The approver: a second look that takes no part in choosing, and without which nothing is released."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jsonschema
import pytest
import torch
from helpers import RefusesDark, bright_guard, call

from guardpaint.config import Scope
from guardpaint.errors import BadConfig
from guardpaint.guard import GuardPaint
from guardpaint.loop.log_replay import replay
from guardpaint.loop.report import report_schema
from guardpaint.policy import Category, Policy
from guardpaint.testing.doubles import CATEGORIES, AlwaysSafe, AlwaysUnsafe, Approves, PaintsFlat
from guardpaint.types import SAFE, Approval, Audit

SEED = 3


def drawn(guard, pipe, **more):
    return call(guard.attach(pipe), generator=torch.Generator().manual_seed(SEED), **more)


@dataclass
class BareScores:
    """An auditor in ten lines: bright pictures are nudity; it gives neither F nor P nor B, nor a violence score."""

    categories: tuple[str, ...] = (SAFE, "nudity")
    absent: frozenset[str] = frozenset({"F", "P", "B"})
    sizes: tuple[int, int] = (32, 64)

    def audit(self, images, prompts, noise):
        light = images.float().mean(1)
        return [
            Audit.from_scores({SAFE: 1 - float(p.mean()), "nudity": float(p.mean())}, p, pixels=int(p.shape[-1]))
            for p in light
        ]


def test_a_picture_that_both_pass_is_the_base_s_and_was_shown_once(pipe):
    approver = Approves()
    out = drawn(GuardPaint(AlwaysSafe(), PaintsFlat(), approver=approver), pipe)
    plain = call(pipe, generator=torch.Generator().manual_seed(SEED))
    report = out.safety[0]
    assert torch.equal(out.images, plain.images) and report.status == "clean" and approver.asked == 1
    assert [a.by for a in report.final.approvals] == ["approves"] and report.final.approvals[0].flagged is None
    assert report.effective_settings["approver"] == "approves" and not replay(report.to_dict())
    jsonschema.validate(report.to_dict(), report_schema())


def test_what_only_the_auditor_passes_is_not_released(pipe):
    out = drawn(GuardPaint(AlwaysSafe(), PaintsFlat(), approver=Approves(harm=0.9)), pipe)
    report = out.safety[0]
    assert report.status == "blocked" and not out.images.any() and not report.errors
    assert all(a.flagged == "nudity" for a in report.final.approvals) and report.final.verdict == "flagged"
    assert [r["rung"] for r in report.final.ladder] == ["strong_repair", "blur", "block"] and report.triggered
    jsonschema.validate(report.to_dict(), report_schema())


def test_a_winner_that_fools_the_auditor_alone_is_not_released(sd_pipe):
    """`PaintsFlat` paints bright pictures dark, which satisfies the auditor; the approver refuses dark patches."""
    repaired = drawn(bright_guard(), sd_pipe).safety[0]
    assert repaired.status == "repaired", "without the approver the repair is released"
    approver = RefusesDark()
    out = drawn(bright_guard(approver=approver), sd_pipe)
    report = out.safety[0]
    assert report.status in ("blurred", "blocked") and report.final.approvals[0].flagged == "nudity"
    if report.status == "blurred":
        assert report.final.approvals[-1].flagged is None
    assert not replay(report.to_dict())


@dataclass
class RefusesUntouched(Approves):
    """Refuses what was not edited, because of two places in it."""

    def approve(self, image, prompt, edited):
        self.asked += 1
        harm = 0.9 * float(not edited)
        heat = torch.zeros(image.shape[-2:])
        heat[8:24, 8:24] = heat[40:56, 40:56] = harm
        return Approval({SAFE: 1 - harm, "nudity": harm, "violence": 0.0}, self.name, heat)


@pytest.mark.parametrize("scope", [None, Scope(32, (8, 1024), (0.0, 100.0), (1, 100))])
def test_a_refused_picture_is_repaired_though_its_auditor_sees_no_gain(sd_pipe, scope):
    """S is the same for every picture; the candidates compete against the approver's score of the refused one."""
    approver = RefusesUntouched()
    guard = GuardPaint(AlwaysSafe(), PaintsFlat(), approver=approver)
    out = drawn(guard.configured(scope=scope, mask_threshold="calibrated"), sd_pipe)
    report = out.safety[0]
    assert report.status == "repaired" and report.final.ladder[-1] == {"rung": "strong_repair", "outcome": "passed"}
    assert approver.asked == len(report.final.approvals) == 2, "the refused picture and the one winner"
    played = [t for s in report.steps for t in s.tournaments]
    assert len(played) == (2 if scope is None else 1), "each region is repaired; the tiles' maps join the two places"
    assert all(t.control["S"] == pytest.approx(0.1) for t in played)
    assert all(t.winner is not None for t in played) and not replay(report.to_dict())


def test_a_refused_picture_gets_all_its_candidates(sd_pipe):
    """The auditor is sure of every candidate, as it was of the refused picture: its S must not end a tournament."""
    guard = GuardPaint(AlwaysSafe(), PaintsFlat(), approver=RefusesUntouched())
    guard = guard.configured(waves="1", wave_safety=0.5, mask_threshold="calibrated")
    played = [t for s in drawn(guard, sd_pipe).safety[0].steps for t in s.tournaments]
    assert played and all(len(t.candidates) == 8 and t.waves == [] for t in played)
    assert all(c.scores for t in played for c in t.candidates)


def test_the_approver_is_never_asked_while_choosing(sd_pipe):
    approver = Approves()
    report = drawn(bright_guard(approver=approver), sd_pipe).safety[0]
    candidates = sum(len(t.candidates) for s in report.steps for t in s.tournaments)
    assert report.status == "repaired" and candidates > 1
    assert approver.asked == len(report.final.approvals) == 1


def test_monitor_records_what_the_approver_says_and_changes_nothing(sd_pipe):
    guard = GuardPaint(AlwaysSafe(), PaintsFlat(), approver=Approves(harm=0.9)).configured(mode="monitor")
    out = drawn(guard, sd_pipe)
    assert torch.equal(out.images, call(sd_pipe, generator=torch.Generator().manual_seed(SEED)).images)
    assert out.safety[0].status == "released_flagged" and out.safety[0].final.approvals[0].flagged == "nudity"


@pytest.mark.parametrize("output", ["latent", "np", "pil"])
def test_every_output_type_is_approved(sd_pipe, output):
    approver = Approves(harm=0.9)
    out = drawn(GuardPaint(AlwaysSafe(), PaintsFlat(), approver=approver), sd_pipe, output_type=output)
    assert out.safety[0].status == "blocked" and approver.asked


@pytest.mark.parametrize(
    ("probs", "word"),
    [
        ({SAFE: 0.5}, "categories are"),
        ({SAFE: float("nan"), "nudity": 0.0, "violence": 0.0}, "NaN"),
        ({SAFE: 1.5, "nudity": -0.5, "violence": 0.0}, r"lie in \[0, 1\]"),
        ({SAFE: 0.0, "nudity": 0.0, "violence": 0.0}, "sum to"),
    ],
)
def test_an_approver_that_answers_nonsense_blocks(sd_pipe, probs, word):
    class Nonsense(Approves):
        def approve(self, image, prompt, edited):
            return Approval(probs, "nonsense")

    report = drawn(GuardPaint(AlwaysSafe(), PaintsFlat(), approver=Nonsense()), sd_pipe).safety[0]
    assert report.status == "blocked" and len(report.errors) == 1
    import re

    assert re.search(word, report.errors[0])


def test_an_approver_that_breaks_blocks(sd_pipe):
    class Breaks(Approves):
        def approve(self, image, prompt, edited):
            raise RuntimeError("the approver broke")

    report = drawn(GuardPaint(AlwaysSafe(), PaintsFlat(), approver=Breaks()), sd_pipe).safety[0]
    assert report.status == "blocked" and "the approver broke" in report.errors[0]


def test_replay_finds_an_approval_that_was_changed_afterwards(sd_pipe):
    report = drawn(GuardPaint(AlwaysSafe(), PaintsFlat(), approver=Approves(harm=0.9)), sd_pipe).safety[0].to_dict()
    forged = {**report, "status": "clean"}
    assert replay(forged) == ["released, but the approver refused the picture"]
    for approval in forged["final"]["approvals"]:
        approval["flagged"] = None
    assert any("reach the trigger" in p for p in replay(forged))
    forged["final"]["approvals"] = []
    assert replay(forged) == ["released, but the approver was not asked"]


# Parts that cannot tell everything -------------------------------------------------------------------------------


def accepting(name="violence"):
    own = Policy.default()
    return replace(
        own, categories=tuple(replace(c, uncovered="accepted") if c.name == name else c for c in own.categories)
    )


def test_a_category_that_no_part_can_tell_must_be_accepted():
    with pytest.raises(BadConfig, match="can tell violence"):
        GuardPaint(BareScores(), PaintsFlat())
    assert GuardPaint(BareScores(), PaintsFlat(), policy=accepting()).parts.uncovered == ("violence",)
    assert GuardPaint(BareScores(), PaintsFlat(), approver=Approves()).parts.uncovered == ()


def test_a_part_with_a_category_that_the_policy_does_not_name_is_refused():
    strange = Approves(categories=(*CATEGORIES, "gambling"))
    with pytest.raises(BadConfig, match="gambling"):
        GuardPaint(AlwaysSafe(), PaintsFlat(), approver=strange)


def test_absent_scores_have_no_gate_and_the_report_says_so(pipe):
    """The bright part is painted dark, which only S, Q and the safety gain can judge."""
    guard = GuardPaint(BareScores(), PaintsFlat(0.1), policy=replace(accepting(), trigger=0.3)).configured(
        heat_map="adv", percentile=50.0
    )
    report = drawn(guard, pipe).safety[0]
    played = [c for s in report.steps for t in s.tournaments for c in t.candidates]
    assert report.triggered and played and not report.errors
    assert all(set(c.scores) == {"S", "Q"} and [g["name"] for g in c.gates] == ["S"] for c in played)
    assert any(c.utility > 0 for c in played), "the utility is the product of what is left"
    said = {(s["what"]) for s in report.effective_settings["skipped"]}
    assert {"gate F", "gate P", "category violence"} <= said
    assert report.effective_settings["absent_scores"] == ["B", "F", "P"] and not replay(report.to_dict())
    jsonschema.validate(report.to_dict(), report_schema())


def test_a_score_that_is_missing_without_being_declared_absent_blocks(sd_pipe):
    forgetful = BareScores(absent=frozenset({"B"}))
    report = drawn(GuardPaint(forgetful, PaintsFlat(), policy=accepting()), sd_pipe).safety[0]
    assert report.status == "blocked" and "does not declare absent" in report.errors[0]


def test_an_uncovered_category_is_said_when_a_call_is_watched_too(sd_pipe):
    guard = GuardPaint(BareScores(), PaintsFlat(), policy=accepting())
    with pytest.warns(UserWarning, match="can tell violence"), guard.watch(sd_pipe):
        pass


def test_only_f_p_and_b_can_be_absent():
    with pytest.raises(BadConfig, match="only F, P and B"):
        GuardPaint(BareScores(absent=frozenset({"S"})), PaintsFlat(), policy=accepting())


def test_a_policy_file_can_accept_an_uncovered_category_and_nothing_else(tmp_path):
    text = "name: p\ncategories:\n- {name: safe}\n- {name: nudity, uncovered: accepted}\n"
    (tmp_path / "p.yaml").write_text(text)
    policy = Policy.load(tmp_path / "p.yaml")
    assert policy.categories[1].uncovered == "accepted"
    assert Policy.from_dict(policy.to_dict()) == policy
    with pytest.raises(BadConfig, match="accepted"):
        Policy("p", (Category(SAFE), Category("nudity", uncovered="yes")))


def test_unsafe_for_the_auditor_never_reaches_the_approver_unchanged(sd_pipe):
    approver = Approves()
    report = drawn(GuardPaint(AlwaysUnsafe(), PaintsFlat(), approver=approver), sd_pipe).safety[0]
    assert report.status == "blocked" and approver.asked == 0


@dataclass
class RefusesTheCorner(Approves):
    """Refuses a picture until its upper left quarter was changed, and shows that quarter."""

    before: torch.Tensor | None = None

    def approve(self, image, prompt, edited):
        self.asked += 1
        corner = image[:, : image.shape[-2] // 2, : image.shape[-1] // 2]
        self.before = corner.clone() if self.before is None else self.before
        harm = float((corner - self.before).abs().amax(0).gt(0).float().mean() < 0.5)
        heat = torch.zeros(8, 8)
        heat[:4, :4] = harm
        return Approval({SAFE: 1 - harm, "nudity": harm, "violence": 0.0}, self.name, heat)


@dataclass
class PaintsAndRemembers(PaintsFlat):
    """Remembers the regions that it was to repair."""

    regions: list = field(default_factory=list)

    def candidates(self, request):
        self.regions.append(request.region)
        return super().candidates(request)


@dataclass
class SeesNothing(AlwaysSafe):
    """Finds no harm anywhere, in any place."""

    def audit(self, images, prompts, noise):
        return [replace(a, adv_map=torch.zeros(16, 16)) for a in super().audit(images, prompts, noise)]


@pytest.mark.parametrize("tiles", [False, True])
def test_the_last_resort_works_where_the_approver_saw_harm(sd_pipe, tiles):
    """The auditor was content with a coarse look, and its own map shows nothing."""
    scope = Scope(side=32, pixels=(32, 64), guidance=(0.0, 10.0), steps=(1, 50)) if tiles else None
    repairer = PaintsAndRemembers()
    guard = GuardPaint(SeesNothing(), repairer, approver=RefusesTheCorner()).configured(scope=scope)
    out = drawn(guard, sd_pipe)
    report, plain = out.safety[0], call(sd_pipe, generator=torch.Generator().manual_seed(SEED)).images
    changed = (out.images[0] - plain[0]).abs().amax(0) > 0
    assert repairer.regions and all(r[:28, :28].any() and not r[40:, 40:].any() for r in repairer.regions)
    assert report.status == "repaired" and not report.errors
    assert changed[:28, :28].any() and not changed[56:, 56:].any()
    blurs = replace(Policy.default(), last_resort=("blur", "block"))
    out = drawn(guard.configured(policy=blurs), sd_pipe)
    report, changed = out.safety[0], (out.images[0] - plain[0]).abs().amax(0) > 0
    assert report.status == "blurred" and not report.errors
    assert changed[:28, :28].all() and not changed[56:, 56:].any(), "blurred there, and not everywhere"
