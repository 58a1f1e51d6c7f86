"""How the scope of a guard is calibrated."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from guardpaint.cli.main import app
from guardpaint.config import Scope
from guardpaint.errors import BadInput
from guardpaint.evaluate.scope import LargePicture, Looked, large_pictures, look, lowest_offset
from guardpaint.guard import GuardPaint
from guardpaint.testbed import KnownPicture, Prompt
from guardpaint.testing.doubles import FlagsBright, PaintsFlat

SCOPE = Scope(side=32, pixels=(32, 128), guidance=(1.0, 10.0), steps=(1, 50))


def known(light: int, category: str) -> KnownPicture:
    image = np.full((16, 16, 3), light, np.uint8)
    return KnownPicture(Prompt(category, category, 0, category), image, np.full((16, 16), category != "safe"))


@pytest.mark.parametrize("size", [48, 64, 96, 128])
def test_a_mosaic_holds_the_whole_picture(size):
    """The bright picture keeps its area of 32 × 32 pixels among dark ones, wherever it lies."""
    pictures = large_pictures([known(0, "safe"), known(255, "nudity")] * 8, 32, size)
    for p in pictures:
        assert p.image.shape == (3, size, size)
        bright = float(p.image.mean()) * size * size
        assert bright == pytest.approx(
            {"safe": 0.0, "nudity": size**2 if p.layout == "enlarged" else 32**2}[p.category]
        )


def test_mosaics_need_harmless_pictures():
    with pytest.raises(BadInput, match="harmless"):
        large_pictures([known(255, "nudity")], 32, 64)


def test_the_largest_offset_of_a_picture():
    """A tile of a picture with a patch of 0.9 has odds of 9: it is flagged (0.4, odds 2/3) up to ln 13.5 = 2.6."""
    guard = GuardPaint(FlagsBright(), PaintsFlat()).configured(scope=SCOPE)
    image = torch.zeros(3, 64, 64)
    image[:, :32, :32] = 0.9
    seen = look(guard, LargePicture(image, "nudity", "mosaic"))
    assert not seen.whole and seen.tiles == 2.5
    assert seen.flagged(2.5) and not seen.flagged(2.75)


def test_the_lowest_offset_by_hand():
    """Of twenty harmless pictures tiles flag four up to 1.0 and two up to 3.0; two are flagged as a whole anyway."""
    safe = LargePicture(torch.zeros(3, 8, 8), "safe", "mosaic")
    tiles = [1.0, 1.0, 1.0, 1.0, 3.0, 3.0, *[None] * 12]
    looks = [Looked(safe, False, t) for t in tiles] + [Looked(safe, True, 9.0)] * 2
    assert lowest_offset(looks, 0.3) == 0.0
    assert lowest_offset(looks, 0.1) == 1.25
    assert lowest_offset(looks, 0.05) == 3.25
    with pytest.raises(BadInput, match="at least 100"):
        lowest_offset(looks, 0.01)
    with pytest.raises(BadInput, match="even when they are lowered"):
        lowest_offset([Looked(safe, False, 10.0)] * 20, 0.05)


def test_the_command_needs_a_sensible_range(tmp_path):
    result = CliRunner().invoke(app, ["calibrate-scope", str(tmp_path), "--pixels", "192", "64"])
    assert result.exit_code != 0 and "pixels=(192, 64)" in str(result.exception)
