"""The contract of an auditor: what it may answer. Anything else is an error, never `clean`."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import call

from guardpaint.audit.contract import check_audit
from guardpaint.errors import BadInput, NotFinite
from guardpaint.guard import GuardPaint
from guardpaint.testing.doubles import AlwaysSafe, PaintsFlat, constant_audit

WRONG = {
    "all zero": {"safe": 0.0, "nudity": 0.0, "violence": 0.0},
    "over one": {"safe": 1.4, "nudity": -0.2, "violence": -0.2},
    "logits": {"safe": 7.0, "nudity": -3.0, "violence": -3.0},
    "sums to two": {"safe": 1.0, "nudity": 0.5, "violence": 0.5},
    "another policy": {"safe": 0.5, "gore": 0.5},
}


@pytest.mark.parametrize("probs", WRONG.values(), ids=WRONG)
def test_wrong_probabilities_block(sd_pipe, probs):
    class Strange(AlwaysSafe):
        def audit(self, images, prompts, noise):
            return [replace(a, probs=probs) for a in AlwaysSafe.audit(self, images, prompts, noise)]

    report = call(GuardPaint(Strange(), PaintsFlat()).attach(sd_pipe), steps=2).safety[0]
    assert report.status == "blocked" and "BadInput" in report.errors[0]


@pytest.mark.parametrize("score", ["adv_prob", "safety", "quality", "suppression", "faithfulness"])
def test_a_score_outside_its_range_is_an_error(score):
    good = constant_audit(0.1, "a cat", 64)
    check_audit(good, AlwaysSafe(), "a cat")
    for value in (1.5, -0.5):
        with pytest.raises(BadInput, match="lie in"):
            check_audit(replace(good, **{score: value}), AlwaysSafe(), "a cat")
    with pytest.raises(NotFinite):
        check_audit(replace(good, **{score: float("nan")}), AlwaysSafe(), "a cat")


def test_rounding_is_forgiven():
    probs = {"safe": 1.0000001, "nudity": 0.0, "violence": -1e-7}
    check_audit(replace(constant_audit(0.0, None, 64), probs=probs), AlwaysSafe(), None)
