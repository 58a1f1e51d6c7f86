"""Pairs for the inpainter: from the world exactly, from labelled pictures by auditor and person; no leaks."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from guardpaint.cli.main import app
from guardpaint.data import pairs
from guardpaint.data.store import Example, key_of
from guardpaint.testing.doubles import FlagsBright
from guardpaint.errors import BadInput
from guardpaint.policy import Policy
from paperdolls.render import render
from paperdolls.scene import sample_scene

POLICY = Policy.default()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("pairs")
    run = CliRunner().invoke
    for split, count in (("train", 12), ("validation", 6)):
        result = run(app, ["data", "pairs", str(root), "--split", split, "--count", str(count), "--safe", "4"])
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
    assert pairs.from_world(world.root, "train", 12, 4, None) == 0
    assert len(world.rows()) == before


def test_the_auditors_mask_is_used_where_there_is_one(tmp_path):
    """An auditor that flags bright pixels: its regions, not the truth, become the mask."""
    pairs.from_world(tmp_path, "train", 6, 0, FlagsBright())
    store = pairs.PairStore(tmp_path)
    found = [p for p in store.rows() if p.mask_from == "auditor"]
    assert found
    for p in found:
        mask = array(store, p.mask)[..., 0] > 127
        changed = (array(store, p.source) != array(store, p.target)).any(-1)
        assert not (changed & ~mask).any()


def test_unknown_splits_and_empty_folders_are_named(tmp_path):
    with pytest.raises(BadInput, match="split 'all': choose train, validation, test"):
        list(pairs.world_scenes("all", 2, 0))
    with pytest.raises(BadInput, match="no pairs of split test"):
        pairs.PairStore(tmp_path).rows("test")


def test_leaks_between_splits_are_found(world, tmp_path):
    """A validation pair whose prompt is a training pair's is found; the clean set has none it should not have."""
    from dataclasses import replace

    assert set(pairs.leaks(world)) <= {"validation"}
    store = pairs.PairStore(tmp_path)
    pairs.from_world(tmp_path, "train", 2, 0, None)
    pairs.from_world(tmp_path, "validation", 2, 0, None)
    copy = replace(store.rows("validation")[0], prompt=store.rows("train")[0].prompt.upper())
    store.append([copy])
    assert copy.key in pairs.leaks(store)["validation"]


# Labelled pictures -------------------------------------------------------------------------------------------


def example(colour, spot):
    image = Image.new("RGB", (64, 64), colour)
    if spot:
        image.paste((255, 255, 255), (4, 4, 60, 60))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return Example(key_of(buffer.getvalue()), buffer.getvalue(), "somebody without a thing on", "s", None)


def corpus():
    shown = [example((20, 20, 30), True), example((30, 20, 20), True), example((10, 30, 20), False)]
    known = {
        e.key: {"split": "train", "label": c, "prompt": e.prompt}
        for e, c in zip(shown, ("nudity", "nudity", "safe"), strict=True)
    }
    return shown, known


def dark(image, mask, prompt, seed):
    return Image.new("RGB", image.size, (20, 20, 20))


def never(image, prompt, harm):
    return None


def test_labelled_pictures_wait_for_a_person(tmp_path):
    shown, known = corpus()
    counts = pairs.from_corpus(tmp_path, shown, known, FlagsBright(), dark, POLICY, never)
    assert counts == {"made": 2, "no mask": 0, "auditor refused": 0, "safe": 1, "had": 0}
    store = pairs.PairStore(tmp_path)
    assert [p.approved for p in store.rows()] == [None, None, True]
    assert store.rows()[0].safe_prompt == POLICY.safe_prompt("nudity")
    again = pairs.from_corpus(tmp_path, shown, known, FlagsBright(), dark, POLICY, never)
    assert again["had"] == 3 and again["made"] == 0


def test_what_the_auditor_still_flags_is_never_approved(tmp_path):
    shown, known = corpus()
    counts = pairs.from_corpus(tmp_path, shown, known, FlagsBright(), lambda i, *_: i, POLICY, never)
    assert counts["auditor refused"] == 2
    rows = pairs.PairStore(tmp_path).rows()
    assert [p.approved for p in rows] == [False, False, True] and "flags every attempt" in rows[0].why


def test_a_rewritten_prompt_is_painted(tmp_path):
    shown, known = corpus()
    seen = []

    def paint(image, mask, prompt, seed):
        seen.append(prompt)
        return dark(image, mask, prompt, seed)

    pairs.from_corpus(tmp_path, shown, known, FlagsBright(), paint, POLICY, lambda *_: "a person in a coat")
    assert set(seen) == {"a person in a coat"}


def test_a_person_decides_on_the_page(tmp_path):
    shown, known = corpus()
    pairs.from_corpus(tmp_path, shown, known, FlagsBright(), dark, POLICY, never)
    run = CliRunner().invoke
    result = run(app, ["data", "review", str(tmp_path)])
    page = (tmp_path / "review.html").read_text()
    assert result.exit_code == 0 and page.count("<section") == 2 and "http" not in page.replace("http-equiv", "")
    keys = [p.key for p in pairs.PairStore(tmp_path).rows() if p.approved is None]
    (tmp_path / "approvals.json").write_text(json.dumps({keys[0]: True, keys[1]: False}))
    result = run(app, ["data", "approve", str(tmp_path), str(tmp_path / "approvals.json")])
    assert result.exit_code == 0 and "2 decisions" in result.output
    assert [p.approved for p in pairs.PairStore(tmp_path).rows()] == [True, False, True]
    assert "Nothing waits" in pairs.review_page(tmp_path).read_text()


@pytest.mark.parametrize(
    ("text", "message"), [("[1]", "one true or false"), ("{", "cannot be read"), ('{"x": true}', "no pair 'x'")]
)
def test_bad_approvals_change_nothing(tmp_path, text, message):
    shown, known = corpus()
    pairs.from_corpus(tmp_path, shown, known, FlagsBright(), dark, POLICY, never)
    before = (tmp_path / "pairs.jsonl").read_text()
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(BadInput, match=message):
        pairs.approve(tmp_path, tmp_path / "a.json")
    assert (tmp_path / "pairs.jsonl").read_text() == before


def test_an_inpainting_pipeline_paints_inside_the_mask_alone():
    from guardpaint.testing import small

    pipe = small.guard().parts.repairer.pipe
    image = Image.new("RGB", (64, 64), (40, 80, 120))
    mask = np.zeros((64, 64), bool)
    mask[10:40, 10:40] = True
    made = np.array(pairs.painter(pipe, steps=2)(image, mask, "a coat", 0))
    assert (made[~mask] == np.array(image)[~mask]).all() and (made[mask] != np.array(image)[mask]).any()
