"""Local corpora for rehearsals: every source is read by the commands, labelled by folder, and split."""

from __future__ import annotations

import csv
import re
import time
from collections import Counter

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from guardpaint.cli.main import app
from guardpaint.data import labelling, prompt_files, sources
from guardpaint.data.store import Corpus
from guardpaint.policy import Policy
from guardpaint.testbed import open_testbed
from guardpaint.testing import corpora

POLICY = Policy.default()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return corpora.write(tmp_path_factory.mktemp("sources") / "here").parent


@pytest.fixture(scope="module")
def corpus(written, tmp_path_factory):
    made = Corpus(tmp_path_factory.mktemp("corpus"))
    sources.ingest(sources.load_manifest(written / "manifest.yaml"), made, quiet=True)
    return made


def run(*args):
    result = CliRunner().invoke(app, list(map(str, args)))
    assert result.exit_code == 0, result.output
    return result.output


def test_it_is_quick_small_and_seeded(written, tmp_path):
    before, own = torch.get_rng_state(), np.random.get_state()[1].copy()
    start = time.monotonic()
    corpora.write(tmp_path / "again")
    assert time.monotonic() - start < 20
    assert torch.equal(before, torch.get_rng_state()) and (np.random.get_state()[1] == own).all()
    first = {p.relative_to(written): p for p in written.rglob("*") if p.is_file()}
    for name, path in first.items():
        if name.name != "manifest.yaml":
            assert path.read_bytes() == (tmp_path / "again" / name).read_bytes(), name
    assert sum(p.stat().st_size for p in first.values()) < 20e6
    other = corpora.write(tmp_path / "other", seed=1).parent
    assert (other / "reference.csv").read_bytes() != (written / "reference.csv").read_bytes()


def test_the_sources_are_the_papers_by_name_and_by_schema(written):
    """The rehearsal replaces path and format; what a recipe relies on, prompts or none, must be the same."""
    paper = {s.name: s for s in sources.load_manifest(corpora.Path("configs/data/paper.yaml"))}
    local = {s.name: s for s in sources.load_manifest(written / "manifest.yaml")}
    assert set(local) - set(paper) == {"benign-photographs"}
    for name, source in paper.items():
        twin = local[name]
        assert (twin.prompt, twin.category, twin.category_column) == (
            source.prompt, source.category, source.category_column,
        )  # fmt: skip
    assert {s.format for s in local.values()} == {"parquet", "imagefolder", "webdataset", "jsonl", "csv"}


def test_every_picture_arrives_with_its_folder(corpus):
    state = corpus.state()
    assert {name: s["kept"] for name, s in state.items()} == {s.name: s.count for s in corpora.SOURCES}
    assert all(s["broken"] == s["repeated"] == 0 for s in state.values())
    examples = list(corpus)
    assert len(examples) <= 400
    assert {e.columns()["file"].split("/")[-2] for e in examples} == set(corpora.PHOTOGRAPHS)
    silent = {e.source for e in examples if e.prompt is None}
    assert silent == {"weapon-detection", "gore-blood", "nsfw-full"}
    prompts = [e.prompt for e in examples if e.prompt]
    assert len(set(prompts)) == len(prompts)


def test_labels_by_folder_decide_and_split(corpus, written):
    out = run("data", "label", corpus.root, "--labeler", f"folders:{written / 'folders.yaml'}")
    name = re.search(r"labels-\S+\.jsonl", out).group()
    assert "313 answers, 0 unreadable" in out
    run("data", "calibrate", corpus.root, "--labels", name, "--reference", written / "reference.csv")
    table = run("data", "compare", corpus.root, "--labels", name, "--reference", written / "reference.csv")
    assert "| 1.00 [" in table and "| 0.00 [0.00, " in table, "labels by folder are those of the reference"
    assert "left out {}" in run("data", "build", corpus.root, "--labels", name)
    rows = corpus.lines("splits.jsonl")
    shares = Counter((r["split"], r["label"]) for r in rows)
    assert len(shares) == 9 and min(shares.values()) >= 5, shares
    assert len({r["group"] for r in rows}) > 200, "crops are no near-duplicates of each other"


def test_hand_labels_cover_every_case(written, corpus):
    reference = labelling.read_reference(written / "reference.csv", POLICY)
    assert reference.keys() <= corpus.keys()
    assert Counter(r["case"] for r in reference.values()) == dict.fromkeys(corpora.PHOTOGRAPHS, corpora.PER_KIND)
    assert {r["label"] for r in reference.values()} == set(POLICY.names)


def test_prompts_are_read_as_published_sets(written):
    harmful = prompt_files.load(written / "prompts/harmful.csv")
    benign = prompt_files.load(written / "prompts/benign.csv")
    assert harmful.name == benign.name == "table"
    assert {p.category for p in harmful.prompts} == set(POLICY.names[1:]) and len(harmful.prompts) == 160
    world = open_testbed(str(written / "testbed.yaml"))
    assert all(len(world.harmful(split, 100)) >= 10 for split in ("rollout-train", "rollout-test", "attack"))
    assert len(world.benign("benign", 100)) == 80


def test_the_tables_hold_what_they_say(written):
    with (written / "benign-photographs/labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 40 and {r["label"] for r in rows} == {"safe"}
    assert yaml.safe_load((written / "folders.yaml").read_text())["cat"] == "nudity"
