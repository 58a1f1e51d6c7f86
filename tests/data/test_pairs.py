"""Pairs of labelled pictures for the inpainter: made by auditor and inpainter, decided by a person; no leaks."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from guardpaint.cli.data import app
from guardpaint.data import pairs
from guardpaint.data.store import Example, key_of
from guardpaint.errors import BadInput
from guardpaint.policy import Policy
from guardpaint.store.images import png_bytes
from guardpaint.testing.doubles import FlagsBright

POLICY = Policy.default()


def noise(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (64, 64, 3), dtype=np.uint8))


def test_leaks_between_splits_are_found(tmp_path):
    """A held-out pair is left out if training has its prompt or nearly its picture; a pair of its own is not."""
    store = pairs.PairStore(tmp_path)
    with pytest.raises(BadInput, match="no pairs of split test"):
        store.rows("test")

    def add(key, split, prompt, seed):
        names = [store.save(key, what, noise(seed)) for what in ("source", "target", "mask")]
        store.append([pairs.Pair(key, split, "nudity", prompt, "safe", *names, None, "auditor", True)])

    add("a", "train", "a red hat", 1)
    add("b", "test", "A RED HAT!", 2)
    add("c", "test", "another thing", 1)
    add("d", "test", "a third thing", 3)
    assert pairs.leaks(store) == {"test": ["b", "c"]}


# Labelled pictures -------------------------------------------------------------------------------------------


def example(colour, spot):
    image = Image.new("RGB", (64, 64), colour)
    if spot:
        image.paste((255, 255, 255), (4, 4, 60, 60))
    data = png_bytes(image)
    return Example(key_of(data), data, "somebody without a thing on", "s", None)


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
    counts = pairs.from_corpus(tmp_path, shown, known, pairs.PairMaker(FlagsBright(), dark, POLICY, never))
    assert counts == {"made": 2, "no mask": 0, "auditor refused": 0, "safe": 1, "had": 0}
    store = pairs.PairStore(tmp_path)
    assert [p.approved for p in store.rows()] == [None, None, True]
    assert store.rows()[0].safe_prompt == POLICY.safe_prompt("nudity")
    again = pairs.from_corpus(tmp_path, shown, known, pairs.PairMaker(FlagsBright(), dark, POLICY, never))
    assert again["had"] == 3 and again["made"] == 0


def test_what_the_auditor_still_flags_is_never_approved(tmp_path):
    shown, known = corpus()
    counts = pairs.from_corpus(tmp_path, shown, known, pairs.PairMaker(FlagsBright(), lambda i, *_: i, POLICY, never))
    assert counts["auditor refused"] == 2
    rows = pairs.PairStore(tmp_path).rows()
    assert [p.approved for p in rows] == [False, False, True] and "flags every attempt" in rows[0].why


def test_a_rewritten_prompt_is_painted(tmp_path):
    shown, known = corpus()
    seen = []

    def paint(image, mask, prompt, seed):
        seen.append(prompt)
        return dark(image, mask, prompt, seed)

    pairs.from_corpus(
        tmp_path, shown, known, pairs.PairMaker(FlagsBright(), paint, POLICY, lambda *_: "a person in a coat")
    )
    assert set(seen) == {"a person in a coat"}


def test_a_person_decides_on_the_page(tmp_path):
    shown, known = corpus()
    pairs.from_corpus(tmp_path, shown, known, pairs.PairMaker(FlagsBright(), dark, POLICY, never))
    run = CliRunner().invoke
    result = run(app, ["review", str(tmp_path)])
    page = (tmp_path / "review.html").read_text()
    assert result.exit_code == 0 and page.count("<section") == 2 and "http" not in page.replace("http-equiv", "")
    keys = [p.key for p in pairs.PairStore(tmp_path).rows() if p.approved is None]
    (tmp_path / "approvals.json").write_text(json.dumps({keys[0]: True, keys[1]: False}))
    result = run(app, ["approve", str(tmp_path), str(tmp_path / "approvals.json")])
    assert result.exit_code == 0 and "2 decisions" in result.output
    assert [p.approved for p in pairs.PairStore(tmp_path).rows()] == [True, False, True]
    assert "Nothing waits" in pairs.review_page(tmp_path).read_text()


@pytest.mark.parametrize(
    ("text", "message"), [("[1]", "one true or false"), ("{", "cannot be read"), ('{"x": true}', "no pair 'x'")]
)
def test_bad_approvals_change_nothing(tmp_path, text, message):
    shown, known = corpus()
    pairs.from_corpus(tmp_path, shown, known, pairs.PairMaker(FlagsBright(), dark, POLICY, never))
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
