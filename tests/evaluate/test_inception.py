"""FID's Inception network: the published shape, weights by path, FID and KID of folders."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from guardpaint.errors import BadInput
from guardpaint.evaluate import distances
from guardpaint.evaluate.inception import Inception


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Random weights in the published file's form."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Inception()
        for module in net.modules():
            if isinstance(module, torch.nn.Conv2d):
                torch.nn.init.kaiming_normal_(module.weight)
    path = tmp_path_factory.mktemp("inception") / "weights.pth"
    torch.save(net.state_dict(), path)
    return path


def test_the_network_has_the_published_shape(weights):
    """Inception v3 without its second output has 23,834,568 parameters for 1,000 classes; FID's has 1,008."""
    net = Inception.from_file(weights)
    assert sum(p.numel() for p in net.parameters()) == 23_834_568 + 8 * 2049
    names = set(net.state_dict())
    published = ("Conv2d_1a_3x3.conv.weight", "Mixed_5b.branch3x3dbl_3.bn.running_var", "Mixed_6e.branch7x7dbl_5.conv.weight",
                 "Mixed_7c.branch3x3dbl_3b.bn.bias", "Mixed_7a.branch7x7x3_4.conv.weight", "fc.bias")  # fmt: skip
    assert names >= set(published)
    out = net(torch.randint(0, 255, (2, 3, 40, 50), dtype=torch.uint8))
    assert out.shape == (2, 2048) and torch.isfinite(out).all() and not out.requires_grad


def test_weights_that_are_absent_or_wrong_name_the_option(weights, tmp_path):
    with pytest.raises(BadInput, match="no such file; name pt_inception.*--inception"):
        Inception.from_file(tmp_path / "none.pth")
    state = torch.load(weights, weights_only=True)
    del state["Mixed_7c.branch_pool.conv.weight"]
    torch.save(state, tmp_path / "cut.pth")
    (tmp_path / "junk.pth").write_bytes(b"junk")
    for name in ("cut.pth", "junk.pth"):
        with pytest.raises(BadInput, match="--inception"):
            Inception.from_file(tmp_path / name)


def test_fid_and_kid_of_folders(weights, tmp_path):
    rng = np.random.default_rng(0)
    for name, low, high, side in (("a", 0, 255, 40), ("b", 180, 255, 48)):
        (tmp_path / name).mkdir()
        for i in range(4):
            pixels = rng.integers(low, high, (side, side + 4 * (i % 2), 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{i}.png")
    same = distances.measured(tmp_path / "a", tmp_path / "a", weights, None)
    apart = distances.measured(tmp_path / "a", tmp_path / "b", weights, None)
    assert set(same) == {"fid", "kid"} and abs(same["fid"]) < 1e-3
    assert apart["fid"] > same["fid"] and apart["kid"] > same["kid"]
