"""Levels on pictures of one's own: the arithmetic, the bounds, and that harm is never risked without being measured."""

from __future__ import annotations

import math

import numpy as np
import pytest
from PIL import Image

from guardpaint.errors import BadInput
from guardpaint.evaluate.picture_calibration import (
    Goals,
    alarm_level,
    choose,
    grouped,
    labelled,
    miss_level,
    raw_scores,
)


def shown(raw, level):
    """p of a raw score at a level, as a graded part computes it."""
    return 1 / (1 + math.exp(-(math.log(raw / (1 - raw)) - math.log(level / (1 - level)))))


def test_raw_scores_are_found_again():
    """Raw 0.3 and 0.7 at levels 0.5 and 0.8: p = 0.3 and 0.368; p_safe = 0.632, the harms share 0.368 as 0.3 : 0.368."""
    levels = {"nudity": 0.5, "violence": 0.8}
    p = {"nudity": shown(0.3, 0.5), "violence": shown(0.7, 0.8)}
    worst, total = max(p.values()), sum(p.values())
    probs = {"safe": 1 - worst, **{c: worst * v / total for c, v in p.items()}}
    assert p["nudity"] == pytest.approx(0.3) and worst == pytest.approx(0.3684, abs=1e-4)
    found = raw_scores(probs, levels)
    assert found["nudity"] == pytest.approx(0.3, abs=1e-6) and found["violence"] == pytest.approx(0.7, abs=1e-6)


def test_the_two_bounds_by_hand():
    assert 0.3 < alarm_level([0.1, 0.2, 0.3, 0.9], 0.4) < 0.3001
    assert miss_level([0.1, 0.6, 0.8, 0.9], 0.4, "nudity") == 0.6
    with pytest.raises(BadInput, match="needs at least 19"):
        alarm_level([0.1] * 18, 0.05)
    with pytest.raises(BadInput, match="3 nudity pictures"):
        miss_level([0.9] * 3, 0.1, "nudity")


def test_the_promise_about_false_alarms_holds_on_new_pictures():
    """Over 4,000 draws of 30 scores, a further score is flagged at most a tenth of the time, and not much less often."""
    draw = np.random.default_rng(0)
    alarms = [draw.beta(1, 9) >= alarm_level(draw.beta(1, 9, 30).tolist(), 0.1) for _ in range(4000)]
    assert 0.07 < np.mean(alarms) < 0.115


@pytest.mark.parametrize(
    ("harmful", "published", "rise", "level", "word"),
    [
        ((), 0.8, False, 0.3, "at or below the publisher's"),
        ((), 0.2, False, 0.2, "would need a higher one"),
        ((), 0.2, True, 0.3, "misses are not measured"),
        ((0.1, 0.6, 0.8, 0.9), 0.2, False, 0.3, "and the one on misses"),
        ((0.1, 0.25, 0.8, 0.9), 0.9, False, 0.25, "cannot be met"),
    ],
)
def test_without_harm_a_level_never_rises_above_the_publishers_by_itself(harmful, published, rise, level, word):
    goals = Goals(alarms=0.4, misses=0.4, may_rise=rise)
    found, why = choose((0.1, 0.2, 0.3, 0.9), harmful, published, goals, "nudity")
    assert found == pytest.approx(level, abs=1e-6) and word in why


def test_pictures_are_grouped_by_their_subfolder(tmp_path):
    for name in ("one/a.png", "one/b.png", "two.JPG", "notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(path, "PNG")
    assert {k: len(v) for k, v in grouped(tmp_path).items()} == {"one": 2, "two.JPG": 1}
    with pytest.raises(BadInput, match="no folder"):
        grouped(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="holds no pictures"):
        grouped(tmp_path / "empty")
    with pytest.raises(BadInput, match="one for each category: nudity"):
        labelled(tmp_path, ("safe", "nudity"))
