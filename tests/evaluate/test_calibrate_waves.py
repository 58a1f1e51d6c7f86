"""Calibrating waves: what ending early costs by hand, its bound, and the lowest limit that it allows."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from guardpaint.cli.main import app
from guardpaint.errors import BadInput
from guardpaint.evaluate import waves
from guardpaint.evaluate.waves import Played, added, lowest_limit
from guardpaint.guard import GuardPaint
from guardpaint.store.results import read_rows
from guardpaint.testing import small


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


@pytest.fixture
def folder(tmp_path):
    """A guard's folder, with a results file beside it."""
    small.guard().save_pretrained(tmp_path / "guard")
    return tmp_path / "guard"


def calibrated(folder, monkeypatch, some, *more):
    """The command's result; the tournaments are `some`, and no testbed is asked."""
    monkeypatch.setattr(waves, "played", lambda *a: iter(some))
    monkeypatch.setattr(waves, "open_testbed", lambda name: SimpleNamespace(bases=lambda: ["base"]))
    words = ["calibrate-waves", str(folder), "--out", str(folder.parent / "waves.json"), *more]
    return CliRunner().invoke(app, words)


def test_the_command_writes_waves_into_the_guard(folder, monkeypatch):
    result = calibrated(folder, monkeypatch, rows(300), "--first", "2")
    assert result.exit_code == 0, result.output
    config = GuardPaint.from_pretrained(folder).config
    assert (config.waves, config.wave_safety) == ("2", 0.95)
    assert json.loads((folder.parent / "waves.json").read_text())["metrics"]["limit"]["value"] == 0.95


def test_without_a_limit_the_rows_are_kept_and_waves_stay_off(folder, monkeypatch):
    result = calibrated(folder, monkeypatch, rows(40))
    assert result.exit_code == 1 and "--count" in str(result.exception or result.output)
    found = json.loads((folder.parent / "waves.json").read_text())["metrics"]
    assert found["limit"]["value"] is None and found["harm_added"]["n"] == 40 and not found["harm_added"]["met"]
    assert len(read_rows(folder.parent / "waves.json")) == 40
    assert GuardPaint.from_pretrained(folder).config.waves == "off"


def test_a_first_wave_of_all_candidates_is_none(folder, monkeypatch):
    result = calibrated(folder, monkeypatch, rows(300), "--first", "5")
    assert result.exit_code == 1 and "--first 5" in str(result.exception or result.output)
