"""Configuration and content policy: defaults, ranges, and errors that name the value."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from guardpaint.config import GuardConfig, audited_steps
from guardpaint.errors import BadConfig
from guardpaint.guard import GuardPaint
from guardpaint.policy import Policy
from guardpaint.testing import small
from guardpaint.testing.doubles import AlwaysSafe, PaintsFlat, constant_audit

FIVE = Path(__file__).parents[1] / "configs" / "policies" / "five-categories.yaml"


def test_defaults_are_the_specs():
    c = GuardConfig()
    assert (c.candidates, c.audits, c.audit_start, c.delta) == (5, 2, 0.70, 0.01)
    assert (c.mode, c.on_error, c.view, c.resolution) == ("enforce", "block", "x0", "adaptive")
    p = Policy.default()
    assert p.trigger == 0.40 and p.names == ("safe", "nudity", "violence")
    assert p.last_resort == ("strong_repair", "blur", "block")
    assert [c.weight for c in p.categories] == [1.0, 5.0, 2.0]


@pytest.mark.parametrize(
    ("steps", "audits", "expected"),
    [(50, 2, {48, 49}), (4, 2, {2, 3}), (4, 8, {2, 3}), (10, 8, {6, 7, 8, 9}), (1, 2, {0}), (2, 2, {1})],
)
def test_audit_set(steps, audits, expected):
    """The last X steps, never before 70 % progress."""
    assert audited_steps(steps, GuardConfig(audits=audits)) == expected


@pytest.mark.parametrize(
    "bad",
    [
        {"mode": "maybe"},
        {"candidates": 0},
        {"hold": 1.5},
        {"delta": float("nan")},
        {"audits": True},
        {"reinsertion": "magic"},
    ],
)
def test_bad_settings_name_value_and_range(bad):
    (name,) = bad
    with pytest.raises(BadConfig, match=name):
        GuardConfig(**bad)


def test_unknown_settings_are_refused():
    with pytest.raises(BadConfig, match="candidats.*candidates"):
        GuardConfig.from_dict({"candidats": 3})


def test_trigger_rule():
    """Benign iff adv_prob < 0.40 and the class is safe; 0.40 itself triggers, and so does NaN."""
    policy = Policy.default()
    at = lambda p: constant_audit(p, "x", 64)  # noqa: E731
    assert policy.finding(at(0.39)) is None
    assert policy.finding(at(0.40)) is not None
    assert policy.finding(replace(at(0.1), adv_prob=float("nan"))) is not None
    harm = policy.finding(replace(at(0.1), probs={"safe": 0.3, "nudity": 0.2, "violence": 0.5}))
    assert harm is not None and harm.category == "violence"


def test_five_category_example():
    policy = Policy.load(FIVE)
    assert len(policy.names) == 5 and policy.last_resort == ("strong_repair", "block")
    probs = {"safe": 0.6, "nudity": 0.05, "violence": 0.05, "self_harm": 0.22, "hate_symbols": 0.08}
    found = policy.finding(replace(constant_audit(0.1, "x", 64), probs=probs))
    assert found is not None and found.category == "self_harm", "per-category threshold 0.20"
    auditor = small.auditor(categories=policy.names)
    assert list(auditor.audit(torch.rand(1, 3, 64, 64), ["x"], 0.0)[0].probs) == list(policy.names)
    GuardPaint(auditor, PaintsFlat(), policy=policy)
    with pytest.raises(BadConfig, match="can tell self_harm, hate_symbols"):
        GuardPaint(AlwaysSafe(), PaintsFlat(), policy=policy)


def test_policy_round_trip(tmp_path):
    policy = Policy.load(FIVE)
    path = tmp_path / "p.yaml"
    path.write_text(yaml.safe_dump(policy.to_dict()))
    assert Policy.load(path) == policy


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[1, 2]", "mapping"),
        ("categories: [{name: nudity}, {name: safe}]", "first must be"),
        ("categories: [{name: safe}]", "one harm"),
        ("categories: [{name: safe}, {name: a}, {name: a}]", "unique"),
        ("categories: [{name: safe}, {name: a, colour: red}]", "colour"),
        ("categories: [{name: safe}, {name: a}]\nlast_resort: [blur]", "last must be block"),
        ("categories: [{name: safe}, {name: a}]\ntrigger: 1.5", "trigger=1.5"),
        ("categories: [{name: safe}, {name: a}]\ntriger: 0.5", "triger"),
        ("a: [", "not valid YAML"),
    ],
)
def test_bad_policies_say_what_is_wrong(tmp_path, text, word):
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(BadConfig, match=word):
        Policy.load(path)
    with pytest.raises(BadConfig, match="no such policy"):
        Policy.load(tmp_path / "none.yaml")
