"""Judges: a labeler decides by its worst harm; an answer that cannot be read is never a safe one."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
from PIL import Image

from guardpaint.data import judges
from guardpaint.data.questions import Answer
from guardpaint.errors import BadConfig, MissingPackage
from guardpaint.policy import Policy
from guardpaint.store import plugins

POLICY = Policy.default()
PICTURE = Image.new("RGB", (40, 40), "grey")


class Says:
    """A labeler with one answer."""

    name = "says"

    def __init__(self, scores):
        self.scores = scores

    def label(self, pictures):
        return [Answer(self.scores, "raw", "" if self.scores else "no JSON in it") for _ in pictures]


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ({"safe": 0.9, "nudity": 0.2, "violence": 0.1}, "safe"),
        ({"safe": 0.9, "nudity": 0.5, "violence": 0.6}, "violence"),
        ({"safe": 0.1, "nudity": 0.5, "violence": 0.4}, "nudity"),
    ],
)
def test_a_labeler_judges_by_its_worst_harm(scores, said):
    judge = judges.LabelerJudge(Says(scores), POLICY)
    assert judge.verdict(PICTURE, {"background": "beach"}) == (said, {}), "it judges no attributes"
    assert judges.shows_harm(judge, PICTURE) == (said != "safe")


@pytest.mark.parametrize("scores", [None, {"safe": 0.0, "nudity": float("nan"), "violence": 0.9}])
def test_an_unreadable_answer_is_no_verdict(scores):
    judge = judges.LabelerJudge(Says(scores), POLICY)
    with pytest.raises(judges.JudgeFailed):
        judge.verdict(PICTURE, {})
    assert not judges.shows_harm(judge, PICTURE), "an attacker saw nothing"


def test_judges_by_name():
    for spec in ("nobody", "vlm:", "riddle:x", "q16:"):
        with pytest.raises(BadConfig, match=spec):
            judges.open_judge(spec, POLICY)
    plain, strict = judges.LabelerJudge(Says({}), POLICY), judges.LabelerJudge(Says({}), POLICY, 0.3)
    assert plain.identity != strict.identity
    assert judges.LabelerJudge(Says({}), POLICY, spec="endpoint:http://a/v1#m").identity != plain.identity


def stubborn(where, policy):
    """What an installed package registers: called with what follows the colon and the policy, it gives a judge."""
    assert where in ("", "anything")
    return judges.LabelerJudge(Says({n: float(n == policy.names[1]) for n in policy.names}), policy)


def mute(where, policy):
    return object()


def test_an_installed_judge_is_reached_by_its_name(monkeypatch):
    points = {
        "stubborn": EntryPoint("stubborn", f"{__name__}:stubborn", plugins.JUDGES),
        "nothing": EntryPoint("nothing", f"{__name__}:mute", plugins.JUDGES),
        "broken": EntryPoint("broken", "builtins:isinstance", plugins.JUDGES),
        "ruin": EntryPoint("ruin", "no_such_package:Judge", plugins.JUDGES),
    }
    original = plugins.registered
    monkeypatch.setattr(plugins, "registered", lambda group: points if group == plugins.JUDGES else original(group))
    for spec in ("stubborn", "stubborn:anything"):
        assert judges.open_judge(spec, POLICY).verdict(PICTURE, {})[0] == "nudity"
    for name, why in (
        ("nothing", "gives no judge"),
        ("broken", "cannot be made"),
        ("ruin", "no_such_package"),
        ("nobody", "stubborn"),
    ):
        with pytest.raises((BadConfig, MissingPackage), match=why):
            judges.open_judge(name, POLICY)
