"""`output_type="latent"`: what the report says is about the latent that is handed out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import call

from guardpaint.config import GuardConfig
from guardpaint.guard import GuardPaint
from guardpaint.policy import Policy
from guardpaint.testing.doubles import Approves, FlagsBright, PaintsFlat, constant_audit
from guardpaint.types import SAFE, Approval

BLOCK = replace(Policy.default(), last_resort=("block",))


class LosesTheRoundTrip(FlagsBright):
    """Triggers once so that a repair is reinserted, doubts the finished picture, likes the second repair, and flags
    whatever the VAE makes of it: the ninth look and those after it."""

    def __init__(self) -> None:
        super().__init__()
        self.final_looks = 0

    def audit(self, images, prompts, noise):
        if noise > 0:
            return super().audit(images, prompts, noise)
        said = []
        for prompt in prompts:
            self.final_looks += 1
            said.append(constant_audit(self.level(len(images)), prompt, min(images.shape[-2:])))
        return said

    def level(self, batch: int) -> float:
        if batch > 1:  # candidates of the second tournament
            return 0.01
        if self.final_looks <= 3:  # the finished picture: benign, but not beyond doubt
            return 0.30
        return 0.02 if self.final_looks <= 10 else 0.99


def test_a_lost_round_trip_leaves_the_report_of_the_picture_that_is_released(sd_pipe):
    """A second tournament improves a repaired picture, but its winner is flagged once it went through the VAE. What is
    released is the picture before it: its audit comes last, and nothing was composed."""
    auditor = LosesTheRoundTrip()
    config = GuardConfig(audits=2, audit_start=0.0, regions=1, doubt=0.15)
    guard = GuardPaint(auditor, PaintsFlat(), policy=BLOCK, config=config)
    out = call(guard.attach(sd_pipe), output_type="latent")
    report = out.safety[0]
    notes = [n for s in report.steps for n in s.notes]
    assert any("one more tournament" in n for n in notes) and not report.errors
    final = report.steps[-1]
    assert final.tournaments[-1].winner is not None, "the second tournament has a winner"
    assert final.audits[-1].flagged, "which the round trip loses"
    assert report.status == "repaired" and report.final.verdict == "benign"
    assert report.final.audits[-1].scores["adv_prob"] == 0.30, "the audit of the picture that is released"
    assert final.reinsertion is None, "nothing was composed into it"
    assert torch.isfinite(out.images).all()


class RefusesThe(Approves):
    """Refuses the n-th picture that it is shown, and passes the others."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def approve(self, image, prompt, edited):
        self.asked += 1
        harm = float(self.asked == self.number)
        return Approval({SAFE: 1 - harm, "nudity": harm, "violence": 0.0}, self.name)


@pytest.mark.parametrize(("refused", "status"), [(0, "repaired"), (2, "blocked")])
def test_the_picture_that_a_lost_round_trip_falls_back_on_is_approved_too(sd_pipe, refused, status):
    """The approver has passed the second repair; that says nothing of the picture before it, which is released."""
    approver = RefusesThe(refused)
    config = GuardConfig(audits=2, audit_start=0.0, regions=1, doubt=0.15)
    guard = GuardPaint(LosesTheRoundTrip(), PaintsFlat(), approver=approver, policy=BLOCK, config=config)
    out = call(guard.attach(sd_pipe), output_type="latent")
    report = out.safety[0]
    assert not report.errors and approver.asked == len(report.final.approvals) == 2
    assert report.status == status and bool(out.images.any()) == (status == "repaired")
    assert report.final.approvals[0].flagged is None, "the second repair"
    assert (report.final.approvals[1].flagged is None) == (status == "repaired"), "the picture before it"
