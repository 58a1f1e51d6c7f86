"""Levels: a raw score at its level is a probability of one half, on any scale."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from guardpaint.audit.levels import at_level, audit_scores, checked_levels, graded, harm_scores, probabilities
from guardpaint.errors import BadConfig, NotFinite
from guardpaint.policy import Category, Policy
from guardpaint.testing.doubles import constant_audit
from guardpaint.types import Audit

SCORES = st.floats(0, 1)
LEVELS = st.floats(1e-6, 1 - 1e-6)
POLICY = Policy("p", (Category("safe"), Category("nudity"), Category("violence")), trigger=0.5)


def test_by_hand():
    """odds(0.8) = 4, odds(0.2) = 1/4: 4 / (1/4) = 16 : 1. odds(0.5) at level 0.8 are 1 : 4."""
    assert at_level(0.8, 0.2) == pytest.approx(16 / 17)
    assert at_level(0.5, 0.8) == pytest.approx(0.2)
    assert at_level(0.3, 0.5) == pytest.approx(0.3)


def test_probabilities_by_hand():
    """The largest p_c is 0.6, the others share it: 0.6 · (0.6, 0.2) / 0.8."""
    assert probabilities({"nudity": 0.6, "violence": 0.2}) == pytest.approx(
        {"safe": 0.4, "nudity": 0.45, "violence": 0.15}
    )
    assert probabilities({"nudity": 0.0, "violence": 0.0}) == {"safe": 1.0, "nudity": 0.0, "violence": 0.0}


@given(SCORES, LEVELS)
def test_it_is_the_logistic_formula(raw, level):
    if 1e-9 < raw < 1 - 1e-9:
        logit = math.log(raw / (1 - raw)) - math.log(level / (1 - level))
        assert at_level(raw, level) == pytest.approx(1 / (1 + math.exp(-logit)), abs=1e-9)
    assert 0 <= at_level(raw, level) <= 1 and at_level(level, level) == 0.5


@given(SCORES, SCORES, LEVELS)
def test_more_evidence_is_never_less_probable(a, b, level):
    low, high = sorted((a, b))
    assert at_level(low, level) <= at_level(high, level) + 1e-15


@given(SCORES, SCORES, LEVELS, LEVELS)
def test_a_picture_is_flagged_exactly_when_a_score_reaches_its_level(nude, gore, first, second):
    audit = Audit.from_scores(
        graded({"nudity": nude, "violence": gore}, {"nudity": first, "violence": second}), pixels=8
    )
    reached = nude >= first or gore >= second
    close = min(abs(nude - first) / first, abs(gore - second) / second) < 1e-12
    assert (POLICY.finding(audit) is not None) == reached or (close and not reached)


def test_the_extremes_stay_finite():
    levels = {"nudity": 1e-6, "violence": 1 - 1e-6}
    for raw in ({"nudity": 0.0, "violence": 1.0}, {"nudity": 1.0, "violence": 0.0}, {"nudity": 1.0, "violence": 1.0}):
        probs = graded(raw, levels)
        assert all(math.isfinite(p) and 0 <= p <= 1 for p in probs.values())
        assert sum(probs.values()) == pytest.approx(1) and probs["safe"] == 0
    assert torch.isfinite(at_level(torch.tensor([0.0, 1.0]), 1e-6)).all()


@given(SCORES, SCORES)
def test_probabilities_can_be_taken_back(nude, gore):
    scores = {"nudity": nude, "violence": gore}
    assert harm_scores(probabilities(scores)) == pytest.approx(scores, abs=1e-9)


def test_any_audit_has_a_score_for_every_harm():
    """adv_prob 0.8, p_nudity 0.6, p_violence 0.2: the worst is 1 − S, the other in proportion."""
    assert audit_scores(constant_audit(0.8, None, 8)) == pytest.approx({"nudity": 0.8, "violence": 0.8 / 3})


def test_scores_that_are_none_are_refused():
    for raw in (float("nan"), float("inf"), -0.1, 1.5):
        with pytest.raises(NotFinite, match="nudity"):
            graded({"nudity": raw, "violence": 0.1}, {"nudity": 0.5, "violence": 0.5})


def test_levels_are_checked():
    assert checked_levels({"nudity": 0.2}, ("safe", "nudity", "violence")) == {"nudity": 0.2, "violence": 0.5}
    for level in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(BadConfig, match="must lie between"):
            checked_levels({"nudity": level}, ("safe", "nudity"))
    with pytest.raises(BadConfig, match="covers nudity"):
        checked_levels({"gore": 0.5}, ("safe", "nudity"))
