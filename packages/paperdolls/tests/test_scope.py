"""The scope of the embedded guard: large pictures are audited in tiles."""

from __future__ import annotations

import json
import shutil
import warnings

import pytest
from typer.testing import CliRunner

from guardpaint.cli.main import app
from guardpaint.guard import GuardPaint
from paperdolls.files import ASSETS


@pytest.mark.slow
def test_the_embedded_guard_can_be_given_a_scope(tmp_path):
    shutil.copytree(ASSETS / "guard", tmp_path / "guard", symlinks=False)
    words = ["calibrate-scope", str(tmp_path / "guard"), "--side", "64", "--pixels", "64", "128", "--count", "40"]
    result = CliRunner().invoke(app, [*words, "--alarms", "0.1", "--out", str(tmp_path / "scope.json")])
    assert result.exit_code == 0, result.output
    measured = json.loads((tmp_path / "scope.json").read_text())["metrics"]
    assert measured["missed.128"]["value"] < measured["missed_whole.128"]["value"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        guard = GuardPaint.from_pretrained(tmp_path / "guard")
    assert guard.config.scope is not None and guard.config.scope.pixels == (64, 128)


def test_the_embedded_guard_answers_for_the_size_its_bases_learned_only():
    scope = GuardPaint.embedded().config.scope
    assert scope is not None and not scope.outside((64, 64), 4.0, 25)
    for call in (((128, 128), 4.0, 25), ((32, 32), 4.0, 25), ((64, 64), 15.0, 25), ((64, 64), 4.0, 3)):
        assert scope.outside(*call)
