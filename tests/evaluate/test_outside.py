"""What repairs change outside of their masks: masks as text, SSIM against scikit-image, means by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from guardpaint.bases import Base
from guardpaint.errors import BadInput
from guardpaint.evaluate import outside
from guardpaint.evaluate.defences.guarded import Guarded
from guardpaint.evaluate.rows import EvaluationRow, Verdict
from guardpaint.guard import GuardPaint
from guardpaint.store.images import save_image, to_pil
from guardpaint.testing import small
from guardpaint.testing.doubles import FlagsBright, PaintsFlat
from guardpaint.testing.photographs import as_tensor, photograph


def test_a_mask_comes_back_and_never_smaller():
    for size in ((64, 64), (96, 80), (40, 56)):
        mask = torch.zeros(size, dtype=torch.bool)
        mask[10:20, 7:9] = True
        mask[33, 31] = True
        again = outside.unpacked(outside.packed(mask), size)
        assert again.shape == mask.shape and (again | ~mask).all(), "every masked pixel is covered"
        assert not again[:, 45:].any() and again.float().mean() < 0.3
    exact = torch.rand((64, 64), generator=torch.Generator().manual_seed(0)) > 0.5
    assert torch.equal(outside.unpacked(outside.packed(exact), (64, 64)), exact)


def test_ssim_is_that_of_scikit_image():
    metrics = pytest.importorskip("skimage.metrics")
    picture = as_tensor(photograph("astronaut"))[:, 100:196, 180:260]
    noisy = (picture + 0.1 * torch.randn(picture.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    ours = outside.ssim_map(picture, noisy)
    _, theirs = metrics.structural_similarity(
        picture.numpy().transpose(1, 2, 0), noisy.numpy().transpose(1, 2, 0), channel_axis=2, data_range=1.0,
        gaussian_weights=True, sigma=1.5, use_sample_covariance=False, win_size=11, full=True,
    )  # fmt: skip
    middle = slice(8, -8)
    assert np.abs(ours[middle, middle].numpy() - theirs.mean(-1)[middle, middle]).max() < 2e-3
    assert torch.allclose(outside.ssim_map(picture, picture), torch.ones(96, 80))


def test_only_what_is_outside_counts():
    plain = as_tensor(photograph("astronaut"))[:, :64, :64]
    mask = torch.zeros(64, 64, dtype=torch.bool)
    mask[20:40, 20:40] = True
    inside = plain.clone()
    inside[:, 27:33, 27:33] = 0.0
    assert outside.changed(inside, plain, mask)["ssim"] == pytest.approx(1, abs=1e-6), "the window reaches no further"
    beyond = plain.clone()
    beyond[:, :10] = 0.0
    assert outside.changed(beyond, plain, mask)["ssim"] < 0.95
    assert outside.changed(plain, plain, torch.ones_like(mask)) == {}


def row(defence, picture, seed, folder, **more):
    name = f"{defence}{seed}.png"
    save_image(to_pil(picture), folder / name)
    drawn = {"suite": "pgj", "base": "b", "config": "", "kind": "", "seconds": 1.0, "threads": 1, "git": "g"}
    return EvaluationRow(
        key=name, defence=defence, id="0", category="nudity", prompt="p", seed=seed, picture=name, image=name,
        run=str(folder), verdict=Verdict("j", True, False, "safe", False), **{"status": "plain", **drawn, **more},
    )  # fmt: skip


def test_repaired_pictures_are_compared_with_their_twins(tmp_path):
    plain = as_tensor(photograph("astronaut"))[:, :64, :64]
    mask = torch.zeros(64, 64, dtype=torch.bool)
    mask[20:40, 20:40] = True
    beyond = plain.clone()
    beyond[:, :10] = 0.0
    detail = {outside.PAINTED: outside.packed(mask)}
    rows = [row("undefended", plain, s, tmp_path) for s in (1, 2, 3)]
    rows += [
        row("ours", p, s, tmp_path, status="repaired", detail=detail) for s, p in ((1, plain), (2, beyond), (4, plain))
    ]
    rows.append(row("ours", plain, 3, tmp_path, status="clean"))
    found = outside.metrics(rows)
    assert set(found) == {"outside_mask.ours.ssim", "outside_mask.ours.lpips_alex"}
    assert {m["n"] for m in found.values()} == {2} and found["outside_mask.ours.lpips_alex"]["value"] > 0
    worse = outside.changed(beyond, plain, mask)["ssim"]
    assert found["outside_mask.ours.ssim"]["value"] == pytest.approx((1 + worse) / 2, abs=0.01)
    with pytest.raises(BadInput, match="--lpips"):
        outside.metrics(rows, tmp_path / "none.safetensors")
    assert outside.metrics([replace(r, image="") for r in rows]) == {}


def test_vgg_lpips_over_the_pixels_outside(tmp_path):
    from guardpaint.verify.seam import LpipsVGG

    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = LpipsVGG()
    for head in net.lins:
        head.data.fill_(0.1)
    net.save_pretrained(tmp_path)
    loaded = outside.open_lpips(next(tmp_path.glob("*.safetensors")))
    plain = as_tensor(photograph("astronaut"))[:, :64, :64]
    mask = torch.zeros(64, 64, dtype=torch.bool)
    mask[:32] = True
    other = plain.flip(-1)
    values = outside.changed(other, plain, mask, loaded)
    map_ = loaded.distance(other[None], plain)[0]
    assert values["lpips_vgg"] == pytest.approx(float(map_[32:].mean()), rel=1e-5) and values["lpips_vgg"] > 0


def test_a_guard_reports_where_it_painted():
    """A repair that is accepted leaves its mask in the report and in the row; it is no part of the report's JSON."""
    guard = GuardPaint(FlagsBright(), PaintsFlat())
    base = Base(
        "tiny-sd", small.pipeline("sd"), {"num_inference_steps": 4, "height": small.PIXELS, "width": small.PIXELS}
    )
    twin = guard.attach(base.pipe)
    generators = [torch.Generator().manual_seed(s) for s in range(4)]
    reports = twin(["a picture"] * 4, generator=generators, **base.call).safety
    accepted = [any(t.winner is not None for s in r.steps for t in s.tournaments) for r in reports]
    assert [r.painted is not None for r in reports] == accepted and any(accepted)
    for report in reports:
        assert "painted" not in report.to_dict()
        assert report.painted is None or report.painted.any()
    outcomes = Guarded(guard).generate(base, ["a picture"] * 4, range(4))
    assert [outside.PAINTED in o.detail for o in outcomes] == accepted
