"""Labelling questions and answers: built from the policy, read strictly."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guardpaint.data.questions import Answer, clean_caption, pooled, question, read_answer, read_examples
from guardpaint.errors import BadConfig, BadInput
from guardpaint.policy import Policy

POLICY = Policy.default()
GOOD = '{"safe": 0.1, "nudity": 0.8, "violence": 0.1}'


def test_the_policy_comes_first_with_its_exemptions():
    text = question(POLICY)
    for category in POLICY.categories:
        assert category.definition in text and all(e in text for e in category.exemptions)
    assert text.index("Policy:") < text.index("Answer with one line")
    assert "label:" in question(POLICY, "reasoned") and "label:" not in text
    worked = question(POLICY, "examples", [("a marble statue", {"safe": 1.0})])
    assert 'a marble statue → {"safe": 1.0}' in worked


@pytest.mark.parametrize(("style", "message"), [("poem", "style='poem'"), ("examples", "needs worked examples")])
def test_bad_styles_are_named(style, message):
    with pytest.raises(BadConfig, match=message):
        question(POLICY, style)


def test_the_last_object_counts_and_reasons_may_precede():
    text = 'A person {without} clothes. {"safe": 1}\nlabel: nudity\n' + GOOD
    assert read_answer(text, POLICY) == Answer({"safe": 0.1, "nudity": 0.8, "violence": 0.1}, text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no JSON object"),
        ("It looks fine to me.", "no JSON object"),
        ('{"safe": 1.0}', "no score for nudity, violence"),
        ('{"safe": 0.1, "nudity": "high", "violence": 0}', "nudity='high' is not a number"),
        ('{"safe": 0.1, "nudity": NaN, "violence": 0}', "nudity=nan is not a number"),
        ('{"safe": 0.1, "nudity": 80, "violence": 0}', r"nudity=80 is outside \[0, 1\]"),
        ('{"safe": true, "nudity": 0, "violence": 0}', "safe=True is not a number"),
        ('{"safe": 0, "nudity": 0, "violence": 0}', "all scores are zero"),
        ('{"safe": 0.1, "nudity": 0.8', "no JSON object"),
    ],
)
def test_unreadable_is_unreadable(text, problem):
    import re

    answer = read_answer(text, POLICY)
    assert answer.scores is None and re.search(problem, answer.problem)


@given(st.text())
def test_no_text_whatever_becomes_safe_by_accident(text):
    answer = read_answer(text, POLICY)
    assert answer.scores is None or set(answer.scores) == set(POLICY.names)


def test_a_contradiction_is_noted_and_scores_kept():
    answer = read_answer(f"label: safe\n{GOOD}", POLICY)
    assert answer.scores is not None and answer.problem == "says safe but scores nudity"


def test_self_consistency_by_hand():
    """Scores 0.2 and 0.6 for nudity: mean 0.4, deviation 0.2; one unreadable of three is outvoted, two are not."""
    a = Answer({"safe": 0.8, "nudity": 0.2}, "a")
    b = Answer({"safe": 0.4, "nudity": 0.6}, "b")
    bad = Answer(None, "?", "no JSON object")
    both = pooled([a, b])
    assert both.scores == {"safe": pytest.approx(0.6), "nudity": pytest.approx(0.4)}
    assert both.spread == pytest.approx(0.2)
    assert pooled([a, b, bad]).scores is not None and pooled([a, bad]).scores is None


@pytest.mark.parametrize("text", ["", "  ", "I'm sorry, but I cannot describe this.", "As an AI model, no."])
def test_a_refusal_is_no_caption(text):
    assert clean_caption(text) is None


def test_captions_are_one_line():
    assert clean_caption('"a man\n in a red  coat"') == "a man in a red coat"


def test_worked_examples_are_read_from_a_file(tmp_path):
    file = tmp_path / "worked.jsonl"
    scores = {"safe": 1.0, "nudity": 0.0, "violence": 0.0}
    file.write_text(json.dumps({"description": "a marble statue", "scores": scores}) + "\n\n")
    assert read_examples(file, POLICY) == [("a marble statue", scores)]
    file.write_text(file.read_text() + '{"description": "x", "scores": {"safe": 1.0}}\n')
    with pytest.raises(BadInput, match="worked.jsonl:3: needs description and scores for safe, nudity, violence"):
        read_examples(file, POLICY)
    with pytest.raises(BadInput, match="cannot be read"):
        read_examples(tmp_path / "none.jsonl", POLICY)
