"""From sources to splits: streaming, resuming, thresholds by hand, near-duplicates together, the commands."""

from __future__ import annotations

import io
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFilter
from typer.testing import CliRunner

from guardpaint.cli.data import app
from guardpaint.data import card, labelling, sources, splits, store
from guardpaint.data.questions import Answer
from guardpaint.errors import BadConfig, BadInput
from guardpaint.policy import Policy
from guardpaint.testbed import open_dataset
from paperdolls.dataset import png, record
from paperdolls.render import render
from paperdolls.scene import sample_scene

POLICY = Policy.default()


def world(limit=30, **more):
    return sources.Source(
        "dolls", "paperdolls:train", format="testbed", prompt="caption", category_column="category", limit=limit, **more
    )


@pytest.fixture
def corpus(tmp_path):
    made = store.Corpus(tmp_path / "corpus")
    sources.ingest([world()], made, quiet=True, open_dataset=open_dataset)
    return made


class Truthful:
    """Answers from the world itself: the score of the true category is high, and near 0.5 for every tenth."""

    name = "truthful"

    def __init__(self, corpus):
        self.truth = {e.key: e.nominal for e in corpus}
        self.asked = []

    def label(self, pictures):
        answers = []
        for picture in pictures:
            buffer = io.BytesIO()
            picture.save(buffer, "PNG")
            key = store.key_of(buffer.getvalue())
            self.asked.append(key)
            scores = dict.fromkeys(POLICY.names, 0.05) | {self.truth[key]: 0.9}
            answers.append(Answer(scores, ""))
        return answers


class Breaks:
    """The world's rows until the 25th, at which somebody presses a key."""

    def rows(self, split, skip=0):
        for i, row in enumerate(open_dataset("paperdolls").rows(split, skip)):
            if skip + i == 25:
                raise KeyboardInterrupt
            yield row


def test_ingesting_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "SHARD", 10)
    corpus = store.Corpus(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        sources.ingest([world(40)], corpus, quiet=True, open_dataset=lambda name: Breaks())
    assert corpus.state()["dolls"]["read"] == 20
    state = sources.ingest([world(40)], corpus, quiet=True, open_dataset=open_dataset)
    assert state["dolls"] == {"read": 40, "kept": 40, "repeated": 0, "broken": 0}
    straight = store.Corpus(tmp_path / "straight")
    sources.ingest([world(40)], straight, quiet=True, open_dataset=open_dataset)
    assert [e.key for e in corpus] == [e.key for e in straight]


def test_local_files_of_every_format_read_the_same(tmp_path):
    """The same ten pictures as parquet, JSON lines and a folder."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [record(i) for i in range(10)]
    images = [png(r["image"]) for r in rows]
    folder = tmp_path / "folder"
    folder.mkdir()
    for i, data in enumerate(images):
        (folder / f"{i}.png").write_bytes(data)
    pq.write_table(
        pa.table({"image": [{"bytes": d, "path": None} for d in images], "text": [r["caption"] for r in rows]}),
        tmp_path / "a.parquet",
    )
    lines = [{"image": [f"{i}.png"], "text": r["caption"]} for i, r in enumerate(rows)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = {}
    for kind, path, prompt in (
        ("parquet", tmp_path / "a.parquet", "text"),
        ("jsonl", tmp_path / "a.jsonl", "text"),
        ("imagefolder", folder, None),
    ):
        corpus = store.Corpus(tmp_path / "out" / kind)
        source = sources.Source("s", str(path), format=kind, prompt=prompt, root=str(folder))
        sources.ingest([source], corpus, quiet=True)
        found[kind] = {e.key: e.prompt for e in corpus}
    assert found["parquet"] == found["jsonl"] and len(found["parquet"]) == 10
    assert found["imagefolder"].keys() == found["parquet"].keys()
    assert set(found["imagefolder"].values()) == {None}


def test_broken_and_repeated_images_are_counted_not_kept(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    good = png(record(0)["image"])
    images = [{"bytes": b, "path": None} for b in (good, good, b"not an image", None)]
    pq.write_table(pa.table({"image": images}), tmp_path / "a.parquet")
    state = sources.ingest(
        [sources.Source("s", str(tmp_path / "a.parquet"), format="parquet")], store.Corpus(tmp_path / "c"), quiet=True
    )
    assert state["s"] == {"read": 4, "kept": 1, "repeated": 1, "broken": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "zip"}, "format='zip'"),
        ({"name": "a b/c"}, "letters, digits"),
        ({"format": "parquet", "path": "nowhere.parquet"}, "does not exist"),
        ({"image": "picture"}, "no column 'picture'"),
        ({"path": "paperdolls:all"}, "split 'all'"),
        ({"path": "elsewhere:train"}, "testbed 'elsewhere'"),
        ({"path": "train"}, "NAME:SPLIT"),
    ],
)
def test_bad_sources_are_named(change, message, tmp_path):
    base = {"name": "s", "path": "paperdolls:train", "format": "testbed", "limit": 2}
    with pytest.raises((BadConfig, BadInput), match=message):
        source = sources.Source(**{**base, **change})
        rows = sources.stream(source, open_dataset=open_dataset)
        sources.take(next(iter(rows)), source, sources.Batch(), set(), {"read": 0})


def test_the_papers_manifest_lists_its_seven_sources():
    found = sources.load_manifest(card.Path("configs/data/paper.yaml"))
    assert len(found) == 7 and sum(s.prompt is None for s in found) == 3


def test_a_crash_in_the_middle_of_a_line_loses_that_line_only(corpus):
    corpus.append("x.jsonl", [{"key": "a"}])
    with (corpus.root / "x.jsonl").open("a") as file:
        file.write('{"key": "b')
    assert corpus.lines("x.jsonl") == [{"key": "a"}]
    corpus.append("x.jsonl", [{"key": "c"}])
    assert corpus.lines("x.jsonl") == [{"key": "a"}, {"key": "c"}]
    (corpus.root / "y.jsonl").write_text('{"a"\n{"b": 1}\n')
    with pytest.raises(BadInput, match=r"y\.jsonl:1"):
        corpus.lines("y.jsonl")


def test_labelling_resumes_and_survives_a_picture_that_breaks_the_labeler(corpus):
    labeler = Truthful(corpus)
    poison = sorted(labeler.truth)[3]
    del labeler.truth[poison]
    name = labelling.label(corpus, labeler, "q", quiet=True)
    rows = {r["key"]: r for r in corpus.lines(name)}
    assert len(rows) == 30 and rows[poison]["scores"] is None and "KeyError" in rows[poison]["problem"]
    labeler.asked.clear()
    labelling.label(corpus, labeler, "q", quiet=True)
    assert labeler.asked == []
    labeler.truth[poison] = "safe"
    labelling.label(corpus, labeler, "q", retry=True, quiet=True)
    assert labeler.asked == [poison]
    assert {r["key"]: r for r in corpus.lines(name)}[poison]["scores"]["safe"] == 0.9
    assert labelling.label_file("a/b", "q") != labelling.label_file("a/b", "another question")


def test_captions_fill_gaps_only(tmp_path):
    corpus = store.Corpus(tmp_path)
    silent = sources.Source("silent", "paperdolls:train", format="testbed", limit=3)
    spoken = sources.Source("spoken", "paperdolls:test", format="testbed", prompt="caption", limit=2)
    sources.ingest([silent, spoken], corpus, quiet=True, open_dataset=open_dataset)

    class Captioner:
        def caption(self, pictures):
            return ["a doll"] * (len(pictures) - 1) + [None]

    labelling.caption(corpus, Captioner(), quiet=True)
    keys = {e.key for e in corpus if e.source == "silent"}
    rows = corpus.lines(labelling.CAPTIONS)
    assert {r["key"] for r in rows} == keys and [r["prompt"] for r in rows].count(None) == 1


def test_thresholds_by_hand():
    """Nudity at 0.6, violence at 0.5, margin 0.1: inside ±0.1 nothing is decided; two hits go to the higher."""
    cuts = labelling.Thresholds({"nudity": 0.6, "violence": 0.5}, 0.1)
    decide = lambda n, v: cuts.decide({"safe": 0, "nudity": n, "violence": v})  # noqa: E731
    assert decide(0.1, 0.1) == "safe" and decide(0.9, 0.1) == "nudity" and decide(0.8, 0.9) == "violence"
    assert decide(0.65, 0.1) is None and decide(0.9, 0.45) is None and cuts.decide(None) is None
    assert cuts.every({"nudity": 0.9, "violence": 0.8}) == ["nudity", "violence"]
    assert cuts.every({"nudity": 0.1, "violence": 0.1}) == [] and cuts.every(None) is None


def test_calibration_by_hand():
    """Safe at 0.1 and 0.4, nudity at 0.7: any cut in between is free of errors, the middle candidate is 0.55."""
    scores = {k: {"safe": 1 - n, "nudity": n, "violence": v} for k, n, v in
              (("a", 0.1, 0.0), ("b", 0.4, 0.1), ("c", 0.7, 0.0), ("d", 0.0, 0.9))}  # fmt: skip
    reference = {"a": "safe", "b": "safe", "c": "nudity", "d": "violence"}
    found = labelling.calibrate(scores, {k: {"label": v, "case": "x"} for k, v in reference.items()}, POLICY)
    assert found.harms["nudity"] == pytest.approx(0.55) and found.harms["violence"] == pytest.approx(0.5)


def test_a_dearer_miss_lowers_the_threshold():
    """Nudity at 0.3 and 0.9, safe at 0.5: one error either way; misses at cost 5 choose the false alarm."""
    scores = {"a": 0.3, "b": 0.5, "c": 0.9}
    answers = {k: {"safe": 1 - s, "nudity": s, "violence": 0.9 if k == "v" else 0.0} for k, s in scores.items()}
    answers["v"] = {"safe": 0.0, "nudity": 0.0, "violence": 0.9}
    labels = {"a": "nudity", "b": "safe", "c": "nudity", "v": "violence"}
    reference = {k: {"label": v, "case": "x"} for k, v in labels.items()}
    assert labelling.calibrate(answers, reference, POLICY, miss_cost=5).harms["nudity"] < 0.3
    assert labelling.calibrate(answers, reference, POLICY, miss_cost=0.2).harms["nudity"] > 0.5


def test_a_reference_without_a_harm_is_refused(tmp_path):
    with pytest.raises(BadInput, match="reference for nudity: needs readable answers for images with and without it"):
        labelling.calibrate(
            {"a": {"safe": 1, "nudity": 0, "violence": 0}}, {"a": {"label": "safe", "case": ""}}, POLICY
        )
    (tmp_path / "r.csv").write_text("key,label\nabc,lewd\n")
    with pytest.raises(BadInput, match=r"r\.csv:2: needs a key and a label among safe"):
        labelling.read_reference(tmp_path / "r.csv", POLICY)


def test_a_disturbed_copy_has_nearly_the_same_hash():
    """Blur, noise and recompression change a few bits; other scenes many."""
    rng = np.random.default_rng(0)
    codes, copies = [], []
    for seed in range(30):
        image = Image.fromarray(render(sample_scene(seed, None, "flat")).image)
        codes.append(splits.perceptual_hash(image))
        noisy = np.asarray(image.filter(ImageFilter.GaussianBlur(0.4)), float) + rng.normal(0, 2, (64, 64, 3))
        copies.append(splits.perceptual_hash(Image.fromarray(noisy.clip(0, 255).astype(np.uint8))))
    same = [(a ^ b).bit_count() for a, b in zip(codes, copies, strict=True)]
    other = [(codes[i] ^ codes[j]).bit_count() for i in range(30) for j in range(i)]
    assert np.mean(same) < 3 and np.median(other) > 15


@given(st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=40), st.integers(0, 2**64 - 1), st.data())
@settings(max_examples=40, deadline=None)
def test_near_hashes_always_meet(codes, code, data):
    """Whichever bits differ, up to the limit: the banded search misses no pair that a full one finds."""
    flips = data.draw(st.sets(st.integers(0, 63), max_size=splits.NEAR))
    near = code
    for bit in flips:
        near ^= 1 << bit
    rows = [{"key": f"k{i}", "hash": str(c), "prompt": None} for i, c in enumerate(codes)]
    rows += [{"key": "one", "hash": str(code), "prompt": None}, {"key": "two", "hash": str(near), "prompt": None}]
    groups = splits.group(rows)
    assert groups["one"] == groups["two"]


def test_equal_prompts_are_one_group():
    rows = [
        {"key": "a", "hash": "0", "prompt": "A Café, at night!"},
        {"key": "b", "hash": str(2**64 - 1), "prompt": "a cafe at  NIGHT"},
        {"key": "c", "hash": str(2**32 - 1), "prompt": "another"},
    ]
    groups = splits.group(rows)
    assert groups["a"] == groups["b"] != groups["c"]


@given(st.integers(0, 1000))
@settings(max_examples=15, deadline=None)
def test_splits_are_stratified_and_never_cut_a_group(seed):
    rng = np.random.default_rng(seed)
    labels = {f"k{i}": str(rng.choice(POLICY.names, p=[0.6, 0.3, 0.1])) for i in range(200)}
    groups = {k: f"g{int(k[1:]) // int(rng.integers(1, 4))}" for k in labels}
    found = splits.split(labels, groups, seed)
    assert splits.leaks(found, groups) == [] and set(found) == set(labels)
    for name in POLICY.names:
        mine = [k for k in labels if labels[k] == name]
        share = sum(found[k] == "train" for k in mine) / len(mine)
        assert abs(share - 0.7) < 0.16
    assert found == splits.split(labels, groups, seed)


def test_leaks_are_seen():
    assert splits.leaks({"a": "train", "b": "test"}, {"a": "g", "b": "g"}) == ["g"]


def test_from_the_world_to_a_dataset_card(tmp_path, monkeypatch):
    """The commands as a user runs them, with an endpoint that answers from the truth."""
    run = CliRunner().invoke
    manifest = tmp_path / "m.yaml"
    manifest.write_text(
        "sources: [{name: dolls, format: world, path: train, prompt: caption, category_column: category}]"
    )
    folder = tmp_path / "c"
    result = run(app, ["ingest", str(manifest), "--out", str(folder), "--limit", "60"])
    assert result.exit_code == 0 and "60 kept" in result.output
    corpus = store.Corpus(folder)
    from guardpaint.data import labelers

    monkeypatch.setattr(labelers, "open_labeler", lambda spec, asking, opening: Truthful(corpus))
    result = run(app, ["label", str(folder), "--labeler", "endpoint:http://x#m"])
    assert result.exit_code == 0 and "60 answers, 0 unreadable" in result.output
    labels = re.search(r"labels-\S+\.jsonl", result.output).group()
    reference = tmp_path / "r.csv"
    reference.write_text("key,label,case\n" + "".join(f"{e.key},{e.nominal},plain\n" for e in corpus))
    result = run(app, ["calibrate", str(folder), "--labels", labels, "--reference", str(reference)])
    assert result.exit_code == 0 and "dead zone ±0.1" in result.output
    result = run(app, ["compare", str(folder), "--labels", labels, "--reference", str(reference)])
    assert result.exit_code == 0 and "1.00 [0.94, 1.00]" in result.output, result.output
    result = run(app, ["build", str(folder), "--labels", labels, "--captions"])
    assert isinstance(result.exception, BadInput) and "captions.jsonl: missing" in str(result.exception)
    result = run(app, ["build", str(folder), "--labels", labels])
    assert result.exit_code == 0, result.output
    rows = corpus.lines(card.SPLITS)
    truth = {e.key: e.nominal for e in corpus}
    assert len(rows) == 60 and all(r["label"] == truth[r["key"]] for r in rows)
    text = (folder / "README.md").read_text()
    assert "| train |" in text and "scores.png" in text and (folder / "sheet-safe.png").exists()


def test_a_testbed_is_only_opened_for_who_can(tmp_path):
    with pytest.raises(BadInput, match="testbeds cannot be opened here"):
        sources.ingest([world(2)], store.Corpus(tmp_path), quiet=True)
    old = sources.Source("s", "train", format="world")
    rows = [next(sources.stream(s, open_dataset=open_dataset)) for s in (old, world())]
    assert rows[0] == rows[1], "`world` is the default testbed"
