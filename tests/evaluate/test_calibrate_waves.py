"""Calibrating waves: what ending early costs by hand, its bound, and the lowest limit that it allows."""

from __future__ import annotations

import pytest

from guardpaint.errors import BadInput
from guardpaint.evaluate.waves import Played, added, lowest_limit


def rows(count, safety=0.95, first_unsafe=False, unsafe=False, spare=0.1, start=0):
    return [Played("base", start + k, safety, spare, first_unsafe, unsafe) for k in range(count)]


def test_the_cost_of_ending_early_by_hand():
    bad, good = rows(1, first_unsafe=True)[0], rows(1, unsafe=True)[0]
    assert (bad.harm(0.9, 0.0), good.harm(0.9, 0.0)) == (1, -1)
    assert bad.harm(0.96, 0.0) == 0  # it goes on: the winner of all is taken
    assert bad.harm(0.9, 0.2) == 0  # too close to its gates
    assert rows(1, safety=None, first_unsafe=True)[0].harm(0.5, 0.0) == 0


def test_few_tournaments_without_a_difference_prove_little():
    """By hand: with 98 equal outcomes the interval ends at 1.96 · √(1/100 / 100) = 0.0196."""
    assert added(rows(98), 0.9) == pytest.approx((-0.0196, 0.0196))
    with pytest.raises(BadInput, match="98 tournaments.*0.01.*--count"):
        lowest_limit(rows(98), 0.01)
    assert lowest_limit(rows(300), 0.01) == 0.95, "no tournament ended with less"


def test_the_limit_lies_above_the_harm():
    """Twelve early choices at S = 0.8 are unsafe: the limit must leave them to the second wave."""
    some = rows(400, safety=0.7) + rows(12, safety=0.8, first_unsafe=True, start=400)
    assert lowest_limit(some, 0.01) == pytest.approx(0.81)
    with pytest.raises(BadInput, match="cannot be shown"):
        lowest_limit(rows(300) + rows(12, safety=0.999, first_unsafe=True, start=300), 0.01)


def test_scenes_that_share_their_harm_widen_the_bound():
    alone = rows(400) + rows(4, first_unsafe=True, start=400)
    shared = rows(400) + [Played(b, 400, 0.95, 0.1, True, False) for b in ("a", "b", "c", "d")]
    assert added(shared, 0.9)[1] >= added(alone, 0.9)[1]
