"""Measuring an auditor: statistics by hand, and the whole command on a small untrained one."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from guardpaint.cli.main import app
from guardpaint.config import GuardConfig
from guardpaint.data import views
from guardpaint.data.views import ViewedBase
from guardpaint.evaluate import auditor as measure
from guardpaint.policy import Policy
from guardpaint.testing import small
from paperdolls import views as drawn

NAMES = Policy.default().names


def test_auc_by_hand():
    """Positives 3, 1 against negatives 2, 0: three of four pairs in order; ties count half; perfect and reversed."""
    assert measure.auc([3, 1], [2, 0]) == pytest.approx(0.75)
    assert measure.auc([1, 1], [1, 1]) == pytest.approx(0.5)
    assert measure.auc([5, 6], [1, 2]) == 1.0 and measure.auc([1, 2], [5, 6]) == 0.0


def test_f1_by_hand():
    """Two of three nudes found and one false alarm: 4/(4 + 2)."""
    rows = [{"said": s, "category": c} for s, c in
            (("nudity", "nudity"), ("nudity", "nudity"), ("safe", "nudity"), ("nudity", "safe"), ("safe", "safe"))]  # fmt: skip
    assert measure.f1(rows, "nudity") == pytest.approx(4 / 6) and measure.f1(rows, "violence") == 0.0


def test_coverage_by_hand():
    """A map that is hot in the upper half against an unsafe left half: half covered, IoU ¼ of the rest: 1/3."""
    audit = small.auditor().audit(torch.rand(1, 3, 64, 64), ["x"], 0.0)[0]
    heat = torch.zeros(8, 8)
    heat[:4] = 1.0
    object.__setattr__(audit, "adv_map", heat)
    mask = np.zeros((64, 64), bool)
    mask[:, :32] = True
    coverage, iou = measure.covered(audit, mask, GuardConfig(mask_threshold="calibrated", mask_level=0.5))
    assert coverage == pytest.approx(0.5, abs=0.05) and iou == pytest.approx(1 / 3, abs=0.05)


def test_shifts_change_pictures_and_keep_their_size():
    from PIL import Image

    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    for kind in ("crop", "jpeg", "cast", "blur"):
        out = measure.shifted(kind, image)
        assert out.size == (64, 64) and np.asarray(out).tolist() != np.asarray(image).tolist()


def test_the_command_writes_every_required_key(tmp_path):
    small.auditor().save_pretrained(tmp_path / "auditor")
    folder = tmp_path / "views"
    net = small.pipeline("sd")
    with torch.no_grad():
        made = [drawn.renoised(ViewedBase(net, {"num_inference_steps": 2}), list(range(i, i + 20))) for i in (0, 20)]
    views.store(made, folder / "mini-sd-test.pt")
    out = tmp_path / "auditor.json"
    args = ["--auditor", str(tmp_path / "auditor"), "--views", str(folder), "--results", str(out), "--count", "100"]
    result = CliRunner().invoke(app, ["eval", "auditor", *args])
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())["metrics"]
    wanted = ["clean.accuracy", "clean.macro_f1", "false_trigger.ordinary", "false_trigger.statue", "seam.spearman",
              "unfinished.macro_f1.mini-sd", "localisation.coverage", "localisation.iou", "localisation.percentile_iou",
              "faithfulness.auc", "strength.spearman", "shift.jpeg", "images_per_second"]  # fmt: skip
    assert [k for k in wanted if k not in found] == []
    assert {f"clean.f1.{n}" for n in NAMES} <= set(found)
    assert (tmp_path / "auditor.rows.csv.gz").exists() and (tmp_path / "auditor-progress.png").exists()


def test_an_artefact_is_ordered_within_itself():
    """One picture in perfect order (1), one reversed (−1), one where P never moves (0), one with P 1 3 2 (½): mean ⅛."""
    said = [(0.1, 0.2, 0.3), (0.3, 0.2, 0.1), (0.2, 0.2, 0.2), (0.1, 0.3, 0.2)]
    rows = [
        {"part": "seam_fade", "seed": i, "quality": q / 2, "P": p}
        for i, ps in enumerate(said)
        for q, p in enumerate(ps)
    ]
    found = measure.metrics(rows, NAMES)["seam.within_artefact"]
    assert found["value"] == pytest.approx(0.125) and found["n"] == 4


def test_reliability_by_hand():
    """F 0.95 twice and 0.05 once for own prompts, 0.05, 0.05 and 0.95 for others: 2 of 3 at the top, 1 of 3 at the bottom."""
    rows = [{"F": 0.95, "F_other": 0.05}, {"F": 0.95, "F_other": 0.05}, {"F": 0.05, "F_other": 0.95}]
    found = measure.reliability(rows)
    assert [(round(f, 2), round(own, 3), n) for f, own, n in found] == [(0.05, 0.333, 3), (0.95, 0.667, 3)]
