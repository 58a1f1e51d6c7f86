"""Labels that a corpus brings along, pictures that cannot be read, and labelers that talk nonsense."""

from __future__ import annotations

import json
import re

import pytest
from PIL import Image
from typer.testing import CliRunner

from guardpaint.cli.main import app
from guardpaint.data import labelling, sources
from guardpaint.data.known_labels import open_known
from guardpaint.data.questions import read_answer
from guardpaint.data.store import Corpus
from guardpaint.errors import BadConfig, BadInput
from guardpaint.policy import Policy
from guardpaint.store.images import png_bytes

POLICY = Policy.default()


def png(shade: int) -> bytes:
    return png_bytes(Image.new("RGB", (24, 24), (shade, 255 - shade, shade // 2)))


@pytest.fixture
def labelled(tmp_path):
    """Six pictures in three folders, one of them inside another."""
    for i, folder in enumerate(("cats", "cats", "safe/cats", "dogs", "dogs", "safe/other")):
        place = tmp_path / "pictures" / folder / f"{i}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(png(i * 20))
    return tmp_path / "pictures"


def mapping(tmp_path, text):
    path = tmp_path / "map.yaml"
    path.write_text(text)
    return path


def ingested(tmp_path, **keys):
    corpus = Corpus(tmp_path / "corpus")
    sources.ingest([sources.Source("s", **keys)], corpus, quiet=True)
    return corpus


def run(*args, code=0, **environment):
    result = CliRunner().invoke(app, list(map(str, args)), env=environment)
    assert result.exit_code == code, result.output
    return result.output


def labels_file(output):
    return re.search(r"labels-\S+\.jsonl", output).group()


def test_the_innermost_folder_in_the_map_is_the_label(labelled, tmp_path):
    corpus = ingested(tmp_path, path=str(labelled), format="imagefolder")
    assert {e.columns()["file"] for e in corpus} >= {"cats/0.png", "safe/other/5.png"}
    rules = mapping(tmp_path, "cats: nudity\nsafe: safe\n")
    out = run("data", "label", corpus.root, "--labeler", f"folders:{rules}")
    assert "6 answers, 2 unreadable (33.3%: 2 × no folder of s on its path is in the map)" in out
    assert "never taken for safe" in out
    rows = {r["key"]: r["scores"] for r in corpus.lines(labels_file(out))}
    found = {e.columns()["file"]: rows[e.key] for e in corpus}
    nude, safe = {"safe": 0.0, "nudity": 1.0, "violence": 0.0}, {"safe": 1.0, "nudity": 0.0, "violence": 0.0}
    assert found == {
        "cats/0.png": nude, "cats/1.png": nude, "safe/cats/2.png": nude, "dogs/3.png": None, "dogs/4.png": None,
        "safe/other/5.png": safe,
    }  # fmt: skip


def test_another_map_is_another_labels_file(labelled, tmp_path):
    corpus = ingested(tmp_path, path=str(labelled), format="imagefolder")
    first, second = (
        labels_file(run("data", "label", corpus.root, "--labeler", f"folders:{mapping(tmp_path, text)}"))
        for text in ("cats: nudity\ndogs: safe\nsafe: safe\n", "cats: violence\ndogs: [nudity, violence]\nsafe: safe\n")
    )
    assert first != second and len(corpus.lines(first)) == len(corpus.lines(second)) == 6
    both = [r["scores"] for r in corpus.lines(second) if r["raw"] == "dogs"]
    assert both == [{"safe": 0.0, "nudity": 1.0, "violence": 1.0}] * 2


def test_labels_by_column_with_and_without_a_map(tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.png").write_bytes(png(i * 30))
    rows = [{"image": f"{i}.png", "label": ("safe", "nudity", "safe", "?")[i], "stars": i} for i in range(4)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    corpus = ingested(tmp_path, path=str(tmp_path / "a.jsonl"), format="jsonl", keep=["label", "stars"])
    out = run("data", "label", corpus.root, "--labeler", "column:label")
    assert "4 answers, 1 unreadable (25.0%: 1 × value '?' of column 'label' names no category)" in out
    rules = mapping(tmp_path, "0: safe\n1: safe\n2: violence\n3: nudity\n")
    out = run("data", "label", corpus.root, "--labeler", f"column:stars#{rules}")
    assert "4 answers, 0 unreadable" in out
    out = run("data", "label", corpus.root, "--labeler", "column:colour")
    assert "4 unreadable (100.0%" in out and "kept no column 'colour'; add it to `keep`" in out


def test_class_numbers_of_a_dataset_become_names(tmp_path):
    from datasets import ClassLabel, Dataset, Features
    from datasets import Image as ImageColumn

    features = Features({"image": ImageColumn(), "rating": ClassLabel(names=["safe", "violence"])})
    rows = {"image": [{"bytes": png(i), "path": None} for i in (1, 90)], "rating": [1, 0]}
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "a.parquet")
    corpus = ingested(tmp_path, path=str(tmp_path / "a.parquet"), format="parquet", keep=["rating"])
    assert [e.columns() for e in corpus] == [{"rating": "violence"}, {"rating": "safe"}]


@pytest.mark.parametrize(
    ("spec", "text", "message"),
    [
        ("folders:", None, "write folders:MAP.yaml"),
        ("column:", None, "write column:NAME"),
        ("folders:{}", "cats: lewd", "cats: 'lewd' is no category"),
        ("folders:{}", "cats: [safe, nudity]", "is no category, or list of harms"),
        ("folders:{}", "- cats", "write lines of the form"),
        ("folders:{}", "a: [", "not YAML"),
    ],
)
def test_bad_maps_are_named(spec, text, message, tmp_path):
    path = mapping(tmp_path, text) if text else ""
    with pytest.raises(BadConfig, match=message):
        open_known(spec.format(path), POLICY)


def test_a_missing_map_is_named_and_other_labelers_are_left_alone(tmp_path):
    with pytest.raises(BadInput, match=r"nowhere\.yaml: cannot be read"):
        open_known(f"folders:{tmp_path / 'nowhere.yaml'}", POLICY)
    assert open_known("vlm:folders", POLICY) is None
    help_text = " ".join(run("data", "label", "--help", COLUMNS="200", TERM="dumb").replace("│", "").split())
    assert "folders:MAP.yaml" in help_text and "column:NAME" in help_text


# Nonsense ---------------------------------------------------------------------------------------------------------


class Mumbles:
    """Answers properly, except for every twentieth picture, and stops after some pictures if it is told to."""

    name = "mumbles"
    good = '{"safe": 0.9, "nudity": 0.05, "violence": 0.05}'
    nonsense = ("as an honest picture, I", '{"safe": 1.7, "nudity": 0, "violence": 0}', '{"safe": "very"}')

    def __init__(self, stop=None, better=False):
        self.asked, self.stop, self.better = 0, stop, better

    def label(self, pictures):
        answers = []
        for picture in pictures:
            if self.asked == self.stop:
                raise KeyboardInterrupt
            self.asked += 1
            number = picture.getpixel((0, 0))[0]
            bad = number % 20 == 0 and not self.better
            answers.append(read_answer(self.nonsense[number // 20 % 3] if bad else self.good, POLICY))
        return answers


@pytest.fixture
def hundred(tmp_path):
    place = tmp_path / "pictures"
    place.mkdir()
    for i in range(100):
        (place / f"{i:03d}.png").write_bytes(png(i))
    return ingested(tmp_path, path=str(place), format="imagefolder")


def test_five_percent_of_nonsense_is_counted_kept_apart_and_asked_again(hundred):
    with pytest.raises(KeyboardInterrupt):
        labelling.label(hundred, Mumbles(stop=50), "q", batch=8, quiet=True)
    name = labelling.label_file("mumbles", "q")
    assert len(hundred.lines(name)) == 48, "whole batches are kept"
    second = Mumbles()
    labelling.label(hundred, second, "q", batch=8, quiet=True)
    assert second.asked == 52, "the next run goes on where the first stopped"
    rows = hundred.lines(name)
    text = labelling.summary(rows)
    assert text.startswith("100 answers, 5 unreadable (5.0%: ") and "ask again with --retry" in text
    assert "no JSON object" in text and "safe=… is outside […, …]" in text.replace("safe=….…", "safe=…")
    assert sum(r["scores"] is None for r in rows) == 5 and all(r["problem"] for r in rows if r["scores"] is None)
    cuts = labelling.Thresholds({"nudity": 0.5, "violence": 0.5})
    assert [cuts.decide(r["scores"]) for r in rows].count("safe") == 95, "unreadable is not safe"
    retried = Mumbles(better=True)
    labelling.label(hundred, retried, "q", retry=True, quiet=True)
    assert retried.asked == 5 and labelling.summary(hundred.lines(name)) == "100 answers, 0 unreadable"


def test_a_labeler_that_loses_an_answer_is_asked_one_by_one(hundred):
    class Loses(Mumbles):
        def label(self, pictures):
            return super().label(pictures)[: max(1, len(pictures) - 1)]

    name = labelling.label(hundred, Loses(), "q", batch=8, quiet=True)
    assert len({r["key"] for r in hundred.lines(name)}) == 100


def test_captions_that_failed_are_tried_again(hundred):
    class Falters:
        def __init__(self, bad):
            self.bad, self.asked = bad, 0

        def caption(self, pictures):
            if self.bad and any(p.getpixel((0, 0))[0] == 30 for p in pictures):
                raise RuntimeError("out of memory")
            self.asked += len(pictures)
            return ["a picture"] * len(pictures)

    labelling.caption(hundred, Falters(True), quiet=True)
    rows = hundred.lines(labelling.CAPTIONS)
    assert len(rows) == 100 and [r["problem"] for r in rows if r["prompt"] is None] == ["RuntimeError: out of memory"]
    again = Falters(False)
    labelling.caption(hundred, again, quiet=True)
    assert again.asked == 1
    assert all({r["key"]: r["prompt"] for r in hundred.lines(labelling.CAPTIONS)}.values())


# Broken images ----------------------------------------------------------------------------------------------------


def test_broken_images_are_listed_and_the_rest_is_read(labelled, tmp_path):
    (labelled / "cats/cut.png").write_bytes(png(200)[:60])
    (labelled / "cats/text.png").write_text("not a picture")
    (labelled / "dogs/empty.png").write_bytes(b"")
    manifest = tmp_path / "m.yaml"
    manifest.write_text(f"sources: [{{name: s, format: imagefolder, path: '{labelled}'}}]")
    for _ in range(2):
        out = run("data", "ingest", manifest, "--out", tmp_path / "corpus")
        assert "s: 9 read, 6 kept, 0 repeated, 3 broken" in out
        assert "3 images cannot be read and are left out (s row" in out and "broken.jsonl" in out
    broken = Corpus(tmp_path / "corpus").broken()
    assert {b["file"] for b in broken} == {"cats/cut.png", "cats/text.png", "dogs/empty.png"}
    assert all(b["problem"] for b in broken) and len(list(Corpus(tmp_path / "corpus"))) == 6


def test_missing_files_are_broken_images_too(tmp_path):
    (tmp_path / "1.png").write_bytes(png(1))
    rows = [{"image": f"{i}.png"} for i in (1, 2)] + [{"image": None}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    corpus = ingested(tmp_path, path=str(tmp_path / "a.jsonl"), format="jsonl")
    assert corpus.state()["s"]["kept"] == 1
    assert [b["problem"].split("/")[-1] for b in corpus.broken()] == ["2.png: no such image", "the row has no image"]
