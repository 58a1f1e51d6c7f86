"""Pairs of scenes for the inpainter: they differ inside their mask alone, and the mask covers the truth."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from typer.testing import CliRunner

from guardpaint.cli.data import app
from guardpaint.config import GuardConfig
from guardpaint.data import pairs
from guardpaint.errors import BadInput
from guardpaint.policy import Policy
from guardpaint.testing.doubles import FlagsBright
from paperdolls import pairs as scene_pairs
from paperdolls.render import render
from paperdolls.scene import sample_scene

POLICY = Policy.default()
CALIBRATED = GuardConfig(mask_threshold="calibrated")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("pairs")
    run = CliRunner().invoke
    for split, count in (("train", 12), ("validation", 6)):
        sizes = ["--split", split, "--count", str(count), "--safe", "4"]
        result = run(app, ["pairs", str(root), "--masks", "truth", *sizes])
        assert result.exit_code == 0 and f"{count + 4} new pairs" in result.output
    return pairs.PairStore(root)


def array(store, name):
    return np.array(store.picture(name).convert("RGB"))


def test_a_pair_differs_inside_its_mask_alone(world):
    rows = world.rows("train")
    assert [sum(p.category == c for p in rows) for c in POLICY.names] == [4, 6, 6]
    for p in rows:
        source, target = array(world, p.source), array(world, p.target)
        mask = array(world, p.mask)[..., 0] > 127
        changed = (source != target).any(-1)
        assert not (changed & ~mask).any()
        assert changed.any() == (p.category != "safe")
        assert mask.any() and p.approved and p.mask_from == "truth"


def test_the_mask_covers_the_truth(world):
    for p in world.rows():
        truth, mask = (array(world, n)[..., 0] > 127 for n in (p.truth, p.mask))
        assert not (truth & ~mask).any()
        if p.category != "safe":
            seed = int(p.key.removeprefix("world-"))
            assert (truth == render(sample_scene(seed)).mask).all()


def test_a_second_run_makes_nothing_new(world):
    before = len(world.rows())
    assert scene_pairs.make_pairs(world.root, "train", 12, 4, None) == 0
    assert len(world.rows()) == before


def test_the_auditors_mask_is_used_where_there_is_one(tmp_path):
    """An auditor that flags bright pixels: its regions alone, not the truth, are the mask.

    A pair is used if that mask covers half of the unsafe area.
    """
    scene_pairs.make_pairs(tmp_path, "train", 12, 2, FlagsBright())
    store = pairs.PairStore(tmp_path)
    found = [p for p in store.rows() if p.mask_from == "auditor"]
    assert found and {p.approved for p in found} == {True, False}
    for p in found:
        mask, truth = (array(store, n)[..., 0] > 127 for n in (p.mask, p.truth))
        audited = pairs.audited_mask(FlagsBright(), store.picture(p.source), p.prompt, CALIBRATED, POLICY)
        assert (mask == audited).all()
        changed = (array(store, p.source) != array(store, p.target)).any(-1)
        assert not (changed & ~mask).any()
        assert p.approved == ((mask & truth).sum() >= 0.5 * truth.sum()) == (not p.why)
    assert all(p.approved for p in store.rows() if p.category == "safe")


def test_masks_are_the_embedded_auditors_unless_the_truth_is_asked_for(tmp_path):
    result = CliRunner().invoke(app, ["pairs", str(tmp_path), "--count", "12", "--safe", "0"])
    assert result.exit_code == 0, result.output
    used = [p for p in pairs.PairStore(tmp_path).rows() if p.approved]
    assert len(used) >= 6 and {p.mask_from for p in used} == {"auditor"}
    for options, message in (
        (["--masks", "mine"], "choose auditor or truth"),
        (["--masks", "truth", "--auditor", "x"], "takes no"),
    ):
        error = CliRunner().invoke(app, ["pairs", str(tmp_path), *options]).exception
        assert isinstance(error, BadInput) and message in str(error)


def test_splits_use_scenes_of_disjoint_ranges(monkeypatch):
    """Every split has a range of its own, and asking for more scenes than it has is an error, not a leak."""
    firsts = sorted(scene_pairs.PAIR_SEEDS.values())
    assert all(b - a >= scene_pairs.SPAN for a, b in pairwise(firsts))
    monkeypatch.setattr(scene_pairs, "SPAN", 10)
    with pytest.raises(BadInput, match="too few scenes"):
        list(scene_pairs.balanced_scenes("train", 100, 0))


def test_unknown_splits_are_named():
    with pytest.raises(BadInput, match="split 'all': choose train, validation, test"):
        list(scene_pairs.balanced_scenes("all", 2, 0))


def test_leaks_between_splits_are_found(world, tmp_path):
    """A validation pair with a training pair's prompt is found; what else is found is in the held-out split."""
    assert set(pairs.leaks(world)) <= {"validation"}
    store = pairs.PairStore(tmp_path)
    scene_pairs.make_pairs(tmp_path, "train", 2, 0, None)
    scene_pairs.make_pairs(tmp_path, "validation", 2, 0, None)
    copy = replace(store.rows("validation")[0], prompt=store.rows("train")[0].prompt.upper())
    store.append([copy])
    assert copy.key in pairs.leaks(store)["validation"]
