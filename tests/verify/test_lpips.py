"""LPIPS on both backbones: reference values, the shipped weights, and how a guard names its seam metric."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from guardpaint.cli.main import app
from guardpaint.errors import BadCheckpoint, BadConfig
from guardpaint.guard import GuardPaint
from guardpaint.repair.native import NativeRepairer
from guardpaint.testing import small
from guardpaint.testing.doubles import AlwaysSafe, PaintsFlat
from guardpaint.verify.lpips import LpipsAlex, LpipsVGG
from guardpaint.verify.seam import BackboneSeam, PixelSeam, open_seam


def crops():
    """Two crops of the astronaut, between which the published values are known."""
    from skimage import data

    picture = torch.from_numpy(data.astronaut()).permute(2, 0, 1).float() / 255
    return picture[None, :, :256, :256], picture[:, 128:384, 128:384]


def test_the_shipped_alex_matches_its_reference_value():
    """0.6826 between two crops of the astronaut."""
    assert LpipsAlex.load().distance(*crops()).mean().item() == pytest.approx(0.6826, abs=2e-3)


def test_loading_draws_nothing():
    """A guard is composed between two seeded calls of a user's; the global RNG must not notice."""
    before = torch.get_rng_state()
    metric = LpipsAlex.load()
    assert torch.equal(before, torch.get_rng_state())
    assert {t.device.type for t in metric.state_dict().values()} == {"cpu"}
    assert not any(p.requires_grad for p in metric.parameters())


@pytest.mark.weights
def test_lpips_vgg_matches_its_reference_value(weights):
    """0.7328 between two crops of the astronaut, with the published weights."""
    metric = LpipsVGG.from_file(weights / "lpips_vgg.safetensors")
    assert metric.distance(*crops()).mean().item() == pytest.approx(0.7328, abs=2e-3)


@pytest.mark.weights
def test_weights_of_the_other_backbone_are_refused(weights):
    with pytest.raises(BadCheckpoint, match="not LpipsVGG"):
        LpipsVGG.from_file(weights / "lpips_alex.safetensors")
    with pytest.raises(BadCheckpoint, match="not LpipsAlex"):
        LpipsAlex.from_file(weights / "lpips_vgg.safetensors")


@pytest.mark.parametrize("side", [8, 31, 64])
def test_small_pictures_have_a_distance_too(side):
    g = torch.Generator().manual_seed(0)
    a, b = torch.rand(2, 3, side, side, generator=g), torch.rand(3, side, side, generator=g)
    for metric in (LpipsAlex.load(), LpipsVGG()):
        assert metric.distance(a, b).shape == (2, side, side)
    assert LpipsAlex.load().distance(a, a[0])[0].abs().max() < 1e-6 < LpipsAlex.load().distance(a, b).min()


def test_a_newly_composed_guard_takes_alex_and_names_it_in_its_manifest(tmp_path):
    """The folder does not repeat the weights; their hash in the manifest is checked."""
    guard = GuardPaint(small.auditor(), NativeRepairer())
    assert isinstance(guard.parts.seam, LpipsAlex)
    guard.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "guardpaint.json").read_text())
    assert values["parts"]["seam"]["kind"] == "lpips_alex" and values["parts"]["seam"]["source"] is None
    again = GuardPaint.from_pretrained(tmp_path).parts.seam
    assert isinstance(again, LpipsAlex) and again.digest() == guard.parts.seam.digest()
    values["parts"]["seam"]["options"]["weights"] = "0" * 64
    (tmp_path / "guardpaint.json").write_text(json.dumps(values))
    with pytest.raises(BadCheckpoint, match="this package ships"):
        GuardPaint.from_pretrained(tmp_path)


def test_a_manifest_without_a_seam_metric_keeps_meaning_the_auditors_backbone(tmp_path):
    auditor = small.auditor()
    GuardPaint(auditor, NativeRepairer(), seam=BackboneSeam(auditor)).save_pretrained(tmp_path)
    assert "seam" not in json.loads((tmp_path / "guardpaint.json").read_text())["parts"]
    loaded = GuardPaint.from_pretrained(tmp_path)
    assert isinstance(loaded.parts.seam, BackboneSeam) and loaded.parts.seam.auditor is loaded.parts.auditor
    assert isinstance(loaded.configured(candidates=2).parts.seam, BackboneSeam)


def test_alex_weights_of_ones_own_are_saved_with_the_guard(tmp_path):
    own = LpipsAlex()
    GuardPaint(small.auditor(), NativeRepairer(), seam=own).save_pretrained(tmp_path / "guard")
    assert (tmp_path / "guard" / "seam" / "model.safetensors").is_file()
    assert GuardPaint.from_pretrained(tmp_path / "guard").parts.seam.digest() == own.digest()


def test_a_seam_metric_by_name(tmp_path):
    LpipsVGG().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    auditor = small.auditor()
    kinds = {
        "auditor_backbone": BackboneSeam, "pixels": PixelSeam, "lpips_alex": LpipsAlex, f"lpips_vgg:{file}": LpipsVGG,
    }  # fmt: skip
    for name, kind in kinds.items():
        assert type(open_seam(name, auditor)) is kind
    for name in ("lpips_vgg", "squeeze", "pixels:x", "auditor_backbone:x"):
        with pytest.raises(BadConfig, match="choose auditor_backbone"):
            open_seam(name, auditor)
    with pytest.raises(BadConfig, match="no auditor with a backbone"):
        open_seam("auditor_backbone", AlwaysSafe())
    GuardPaint(auditor, NativeRepairer()).save_pretrained(tmp_path / "guard")
    assert isinstance(GuardPaint.from_pretrained(tmp_path / "guard", seam="pixels").parts.seam, PixelSeam)


def test_generate_takes_a_seam_metric(tmp_path):
    """The report names the metric that rated the seams."""
    from typer.testing import CliRunner

    from guardpaint.cli.main import app

    words = ["generate", "a hat", "--base", "tiny-sd", "--guard", "tiny", "--steps", "2", "--out", str(tmp_path)]
    CliRunner().invoke(app, [*words, "--seam", "pixels"], catch_exceptions=False)
    report = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert report["effective_settings"]["seam"] == "pixels"


def test_a_guard_without_features_takes_alex_as_well():
    assert isinstance(GuardPaint(AlwaysSafe(), PaintsFlat()).parts.seam, LpipsAlex)


def test_compose_takes_a_seam_metric_by_name(tmp_path):
    small.auditor().save_pretrained(tmp_path / "auditor")
    words = ["compose", "--auditor", str(tmp_path / "auditor"), "--repairer", "native"]
    for seam, wanted in (("pixels", "pixels"), ("auditor_backbone", "auditor_backbone"), (None, "lpips_alex")):
        out = tmp_path / str(seam)
        result = CliRunner().invoke(app, [*words, "--out", str(out), *(("--seam", seam) if seam else ())])
        assert result.exit_code == 0, result.exception
        assert GuardPaint.from_pretrained(out).parts.seam.name == wanted
