"""What finishing runs dwell on: figures, and scenes that are hard to draw."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from guardpaint.errors import BadCheckpoint, BadConfig
from guardpaint.train.engine import TrainConfig
from paperdolls.masks import differs, figure_mask
from paperdolls.models import focus
from paperdolls.models.generator import batch_of
from paperdolls.models.latents import SceneLatents
from paperdolls.models.recipe import Batch, GeneratorConfig, Latents
from paperdolls.render import render
from paperdolls.scene import sample_scene


def test_weights_by_hand():
    """One of four cells a figure, extra 4: (5, 1, 1, 1) over their mean 2."""
    w = focus.weights(torch.tensor([[[[1.0, 0.0], [0.0, 0.0]]]]), 4.0)
    assert w.flatten().tolist() == [2.5, 0.5, 0.5, 0.5]


def test_the_weighted_error_by_hand():
    """Errors 1 and 3 with weights 1.5 and 0.5: (1.5 + 1.5)/2; without weights 2."""
    values = {k: torch.zeros(1, 1, 1, 2) for k in ("z", "eps")}
    plain = Batch(
        **values,
        level=torch.zeros(1),
        ids=torch.zeros(1, 1, dtype=torch.int64),
        other_ids=None,
        mask=None,
        masked=None,
        long=False,
        guidance=torch.zeros(1),
    )
    error = torch.tensor([[[[1.0, 3.0]]]])
    assert plain.mean_of(error).item() == 2.0
    assert replace(plain, weight=torch.tensor([[[[1.5, 0.5]]]])).mean_of(error).item() == 1.5


def test_figures_are_where_they_are_drawn(tmp_path):
    """Every pixel of a figure or thing lies in a marked cell; an empty picture has none; the cache says the same."""
    found = focus.look_at(500, 30, Latents(4, 16), tmp_path / "f.pt")
    for i in range(30):
        scene = sample_scene(500 + i)
        cells = found.figures[i, 0].bool()
        assert cells.repeat_interleave(4, 0).repeat_interleave(4, 1)[torch.from_numpy(figure_mask(scene))].all()
        assert scene.figures or not cells.any()
        assert bool(found.hard[i]) == focus.is_hard(scene)
    assert 0 < found.hard.float().mean() < 1
    again = focus.look_at(500, 30, Latents(4, 8), tmp_path / "f.pt")
    assert again.figures.shape == (30, 1, 8, 8) and torch.equal(again.hard, found.hard)
    (tmp_path / "f.pt").write_bytes(b"half")
    with pytest.raises(BadCheckpoint, match="delete it"):
        focus.look_at(500, 30, Latents(4, 16), tmp_path / "f.pt")


@pytest.mark.parametrize("kind", ["red_flowers", "sauce", "sword_on_wall"])
def test_things_count_like_figures(kind):
    """What tells a harmless red thing from a splash must be drawn as well as the figures."""
    for scene in (sample_scene(s, kind, "flat") for s in range(5)):
        plain = replace(scene, flowers=False, sauce=False, sword_on_wall=False)
        change = differs(render(scene).image, render(plain).image)
        assert change.any() and focus.touched(scene)[change].all()
    ordinary = sample_scene(3, "ordinary")
    assert (focus.touched(ordinary) == figure_mask(ordinary)).all()


def test_hard_scenes_come_up_more_often():
    """A tenth of the scenes is hard; with a share of one half, 0.5 + 0.5 · 0.1 of the batch is."""
    n = 100
    data = SceneLatents(
        torch.arange(n).float().view(n, 1, 1, 1), torch.zeros(n, 1, 2, dtype=torch.int64), torch.ones(n) > 0
    )
    hard = torch.arange(n) < 10
    look = focus.Focus(torch.ones(n, 1, 1, 1), hard)
    config = TrainConfig(steps=1, batch_size=4000, learning_rate=0.1, seed=3)
    empty = torch.zeros(2, dtype=torch.int64)
    often = batch_of(data, 0, config, GeneratorConfig(hard=0.5), empty, None, look)
    assert float((often.z < 10).float().mean()) == pytest.approx(0.55, abs=0.03)
    assert often.weight is not None and torch.equal(often.weight, torch.ones(4000, 1, 1, 1))
    assert batch_of(data, 0, config, GeneratorConfig(), empty).weight is None


@pytest.mark.parametrize("wrong", [{"focus": -1.0}, {"hard": 1.0}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(BadConfig, match=next(iter(wrong))):
        GeneratorConfig(**wrong)
