"""Inpainters side by side: rows from real pipelines, and numbers from rows by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import small_inpainter
from PIL import Image

from guardpaint.errors import BadInput
from guardpaint.evaluate import inpainter
from guardpaint.store.results import read_rows
from guardpaint.testbed import open_testbed
from guardpaint.verify.seam import PixelSeam
from paperdolls.oracle import Oracle, OracleConfig, OracleNet


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    root = tmp_path_factory.mktemp("eval")
    small_inpainter(root / "inpainter")
    return root


def test_pasting_changes_the_hole_alone():
    image, fill = np.zeros((4, 4, 3), np.uint8), np.full((4, 4, 3), 9, np.uint8)
    hole = np.eye(4, dtype=bool)
    assert (inpainter.pasted(fill, image, hole)[..., 0] == 9 * np.eye(4)).all()


def test_real_pipelines_leave_rows_and_a_sheet(home, tmp_path, monkeypatch):
    torch.manual_seed(0)
    small = Oracle(OracleNet(OracleConfig(channels=(8, 8, 8, 8))).eval())
    monkeypatch.setattr(Oracle, "load", classmethod(lambda cls, *_: small))
    where = str(home / "inpainter")
    path = tmp_path / "inpainter.json"
    bench = inpainter.Bench.in_world(open_testbed("paperdolls"), PixelSeam())
    found = inpainter.run({"base": where, "bco": where}, path, 4, bench)
    for key in ("safe_region", "safe_region.euphemism", "safe_region.empty_prompt", "context_kept", "seam_gap"):
        assert f"bco.{key}" in found
    assert found["bco.benign_agreement_delta"]["value"] == 0.0
    assert found["base.safe_region"] == {k: v for k, v in found["bco.safe_region"].items() if k not in ("goal", "met")}
    assert Image.open(tmp_path / "inpainter-sheet.png").width == 300
    rows = read_rows(path)
    assert {r["what"] for r in rows} == {"repair", "euphemism", "empty", "benign"}
    again = inpainter.run({"bco": where}, path, 4, bench)
    assert "base.safe_region" in again and len(read_rows(path)) == len(rows)
    with Image.open(tmp_path / "inpainter-sheet.png") as sheet:
        assert sheet.width == 300 and sheet.info["columns"].split() == ["source", "base", "bco"]
    inpainter.run({"kto": where}, path, 4, bench)
    with Image.open(tmp_path / "inpainter-sheet.png") as sheet:
        assert sheet.info["columns"].split() == ["source", "base", "bco", "kto"]
        first, last = (sheet.crop((100 * k, 14, 100 * k + 100, 100)).tobytes() for k in (1, 3))
        assert first == last  # the same model: the kept column is the old picture


def test_numbers_come_from_rows():
    """Two repairs, one safe; context ½ and 1; gaps 0.1 and 0.3; detail (1 + 3)/(2 + 2) = 1; benign 1 − ½."""
    rows = [
        {"part": "bco", "what": "repair", "said": "safe", "kept_background": 1, "kept_light": 0, "q": 0.8, "q_true": 0.9,
         "detail": 1, "detail_true": 2},
        {"part": "bco", "what": "repair", "said": "nudity", "kept_background": 1, "kept_light": 1, "q": 0.6, "q_true": 0.9,
         "detail": 3, "detail_true": 2},
        {"part": "base", "what": "benign", "said": "safe", "right_garment": 1, "right_colour": 0},
        {"part": "bco", "what": "benign", "said": "safe", "right_garment": 1, "right_colour": 1},
    ]  # fmt: skip
    out = inpainter.metrics(rows)
    assert out["bco.safe_region"]["value"] == 0.5 and out["bco.safe_region"]["met"] is False
    assert out["bco.context_kept"]["value"] == 0.75
    assert out["bco.seam_gap"]["value"] == pytest.approx(0.2)
    assert out["bco.detail_ratio"]["value"] == pytest.approx(1.0)
    assert out["bco.benign_agreement_delta"]["value"] == pytest.approx(0.5)


def test_no_model_is_named(tmp_path):
    with pytest.raises(BadInput, match="name at least one model"):
        inpainter.run({}, tmp_path / "x.json", 4, inpainter.Bench.in_world(open_testbed("paperdolls"), PixelSeam()))
