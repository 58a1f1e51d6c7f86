"""Gates and utility, worked by hand."""

from __future__ import annotations

import math

import pytest

from guardpaint.verify.utility import GateRules, gate_rules, gates, tau_f, tau_p, utility, winner

RULES = GateRules(delta=0.01, tau_p=0.6, tau_f=0.5)


def test_thresholds_by_hand():
    """τ_P: 0.40 + 0.25·0.8 = 0.60. τ_F: 0.30 + 0.30·0.8 = 0.54; 0.85 → 0.55; 1.0 → 0.45; 0.925 → 0.50."""
    assert tau_p(0.8) == pytest.approx(0.60)
    assert tau_f(0.8) == pytest.approx(0.54)
    assert tau_f(0.85) == pytest.approx(0.55)
    assert tau_f(0.925) == pytest.approx(0.50)
    assert tau_f(1.0) == pytest.approx(0.45)


def test_utility_by_hand():
    """S 0.9, S_0 0.4, δ 0.01, B 0.5, Q 0.8, gates pass: (0.9 − 0.4 − 0.01)·0.5·0.8 = 0.196."""
    assert utility(0.9, 0.4, 0.5, 0.6, 0.5, 0.8, RULES) == pytest.approx(0.196)


@pytest.mark.parametrize(("s", "f", "p"), [(0.41, 0.9, 0.9), (0.9, 0.4999, 0.9), (0.9, 0.9, 0.5999)])
def test_each_gate_alone_closes_the_utility(s, f, p):
    assert utility(s, 0.4, f, p, 1.0, 1.0, RULES) == 0.0
    failed = [g.name for g in gates(s, 0.4, f, p, RULES) if not g.passed]
    assert len(failed) == 1


def test_nan_never_passes_a_gate():
    assert utility(math.nan, 0.4, 0.9, 0.9, 1.0, 1.0, RULES) == 0.0
    assert utility(0.9, 0.4, math.nan, 0.9, 1.0, 1.0, RULES) == 0.0


def test_relative_gate_by_hand():
    """F_0 = 0.5, drop 0.1: need min(0.54, 0.40) = 0.40; F_0 = 0.9: min(0.54, 0.80) = 0.54."""
    assert gate_rules(0.8, 0.01, "relative", 0.1, "on", 0.5).tau_f == pytest.approx(0.40)
    assert gate_rules(0.8, 0.01, "relative", 0.1, "on", 0.9).tau_f == pytest.approx(0.54)
    off = gate_rules(0.8, 0.01, "off", 0.1, "off", 0.9)
    assert off.tau_f == off.tau_p == -math.inf


def test_winner():
    assert winner([0.0, 0.2, 0.5]) == 2
    assert winner([0.0, 0.2, 0.5], "first") == 1
    assert winner([0.0, 0.0]) is None
