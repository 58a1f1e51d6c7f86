"""Judges: a labeler decides by its worst harm; an answer that cannot be read is never a safe one."""

from __future__ import annotations

import pytest
from PIL import Image

from guardpaint.data import judges
from guardpaint.data.questions import Answer
from guardpaint.errors import BadConfig
from guardpaint.policy import Policy

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
