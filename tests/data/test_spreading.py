"""Views and labels by several processes: the same as by one."""

from __future__ import annotations

import torch
from typer.testing import CliRunner

from guardpaint.cli.main import app
from guardpaint.data import corpus_views
from guardpaint.data.store import Corpus
from guardpaint.data.views import load_views
from guardpaint.store.checkpoint import sha256_hex
from guardpaint.testing import corpora, hub_layouts


def run(*words):
    said = CliRunner().invoke(app, [str(w) for w in words])
    assert said.exit_code == 0, (said.output, said.exception)
    return said.output


def test_two_processes_label_and_make_views_as_one_does(tmp_path, monkeypatch):
    manifest = corpora.write(tmp_path / "sources")
    corpus = tmp_path / "corpus"
    run("data", "ingest", manifest, "--out", corpus, "--source", "unsafebench", "--source", "t2i-safety")
    shield = hub_layouts.build("google/shieldgemma-2-4b-it", tmp_path / "hub")
    for name, more in (("one", ()), ("two", ("--processes", 2))):
        run("data", "label", corpus, "--labeler", f"shieldgemma:{shield}", "--name", name, *more)
    store = Corpus(corpus)
    one, two = ({r["key"]: r["scores"] for r in store.lines(store.one(f"labels-{n}-*.jsonl"))} for n in ("one", "two"))
    assert one.keys() == two.keys() and len(one) > 80
    for key, scores in one.items():
        assert all(abs(scores[c] - two[key][c]) < 0.01 for c in scores)  # batches differ, in half precision

    run("data", "label", corpus, "--labeler", f"folders:{tmp_path / 'sources/folders.yaml'}", "--name", "known")
    reference = tmp_path / "sources/reference.csv"
    run("data", "calibrate", corpus, "--labels", "labels-known-*.jsonl", "--reference", reference)
    run("data", "build", corpus, "--labels", "labels-known-*.jsonl")
    monkeypatch.setattr(corpus_views, "SHARD", 8)
    views = (
        "data",
        "corpus-views",
        corpus,
        "--base",
        "tiny-sd",
        "--name",
        "small",
        "--split",
        "validation",
        "--size",
        64,
    )
    run(*views, "--steps", 3, "--pixels", 64, "--out", tmp_path / "whole")
    files = sorted(p.name for p in (tmp_path / "whole").glob("*.pt"))
    assert len(files) > 1
    for share in ((1, 2), (0, 2)):
        job_share(tmp_path, corpus, share)
    assert sorted(p.name for p in (tmp_path / "shares").glob("*.pt")) == files
    for name in files:
        a, b = (load_views(tmp_path / folder / name) for folder in ("whole", "shares"))
        assert torch.equal(a.images, b.images) and a.texts == b.texts, sha256_hex(name)


def job_share(tmp_path, corpus, share):
    """One share, in this process: the monkeypatched shard size is not known to a spawned one."""
    from guardpaint.bases import BaseOptions
    from guardpaint.data.spreading import ViewJob, make_views
    from guardpaint.policy import Policy

    options = BaseOptions(steps=3, size=64)
    made = make_views(
        ViewJob(
            corpus, "tiny-sd", tmp_path / "shares", ["validation"], Policy.default(), options, "small", 64, share=share
        )
    )
    assert "split validation" in made[0]
