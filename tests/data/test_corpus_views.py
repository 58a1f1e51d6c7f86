"""From a labelled corpus to an auditor and its thresholds: views, their shelf, training, calibration."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
from dataclasses import replace

import pytest
import torch
import yaml
from typer.testing import CliRunner

from guardpaint.audit.model import AuditorScorer
from guardpaint.cli.main import app, main
from guardpaint.data import card, corpus_views, sources, store, views
from guardpaint.data.labelling import Thresholds
from guardpaint.data.questions import Answer
from guardpaint.data.views import Labelled, Shelf, ViewedBase, joined, load_views
from guardpaint.errors import BadInput
from guardpaint.evaluate import calibrate, corpus_auditor
from guardpaint.evaluate.calibrate import Looks
from guardpaint.policy import Policy
from guardpaint.testbed import open_dataset
from guardpaint.testing import small
from guardpaint.testing.doubles import constant_audit
from guardpaint.train import auditor as trainer
from guardpaint.train.engine import TrainConfig

POLICY = Policy.default()
SIZE = small.PIXELS
LABELS = "labels-true.jsonl"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A hundred paper dolls as if they were photographs: labelled, split; their scenes are not known to anyone."""
    made = store.Corpus(tmp_path_factory.mktemp("corpus"))
    source = sources.Source(
        "dolls", "paperdolls:train", format="testbed", prompt="caption", category_column="category", limit=100
    )
    sources.ingest([source], made, quiet=True, open_dataset=open_dataset)
    made.append(LABELS, [{"key": e.key, "scores": dict.fromkeys(POLICY.names, 0.1) | {e.nominal: 0.8}} for e in made])
    card.build(made, LABELS, Thresholds({"nudity": 0.5, "violence": 0.5}, 0.1), quiet=True)
    return made


def make(corpus, out, split, family="sd", name=None, steps=4, **more):
    pipe = small.pipeline(family)
    call = corpus_views.settings(pipe, {"height": SIZE, "width": SIZE, "num_inference_steps": steps})
    settings = {"pixels": 96, "origin": family, **more}
    plan = corpus_views.ViewPlan(ViewedBase(pipe, call), name or f"tiny_{family}", **settings)
    return corpus_views.make(corpus, plan, out, split, POLICY, quiet=True)


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("views")
    for split in ("train", "validation", "calibration", "test"):
        make(corpus, out, split)
    return out


@pytest.mark.parametrize("family", ["sd", "sdxl", "sd3", "flux"])
def test_views_carry_label_prompt_and_score(corpus, tmp_path, family):
    assert make(corpus, tmp_path, "validation", family) == 1
    made = load_views(next(tmp_path.glob("*.pt")))
    rows = {corpus_views.seed_of(r["key"]): r for r in corpus.lines(card.SPLITS) if r["split"] == "validation"}
    assert set(made.seeds.tolist()) == set(rows) and made.names == POLICY.names
    assert {0, 1, 2} == set(made.kind.tolist()) and made.images.shape[-2:] == (96, 96)
    assert torch.isfinite(made.noise).all() and (made.progress[made.kind == 1] > 0).all()
    for i, seed in enumerate(made.seeds.tolist()):
        row = rows[seed]
        assert made.prompt(i) == row["prompt"] and POLICY.names[int(made.category[i])] == row["label"]
        assert float(made.strength[i]) == pytest.approx(0.0 if row["label"] == "safe" else 0.8)


def test_the_pictures_are_the_corpuses_own(corpus, folder):
    """A finished view that did not go through the autoencoder is the picture, cut and scaled."""
    made = load_views(next(folder.glob("*-validation.pt")))
    rows = torch.nonzero(made.kind == 0)[:, 0]
    by_seed = {corpus_views.seed_of(e.key): e for e in corpus}
    first = next(int(i) for i in rows if int(made.seeds[i]) // 4 % 2 == 0)
    own = corpus_views.squares([by_seed[int(made.seeds[first])]], 96)[0]
    assert (made.images[first].float() / 255 - own).abs().mean() < 0.03


def test_calibration_and_test_share_no_group(corpus):
    halves = [corpus_views.members(corpus, s, POLICY) for s in ("test", "calibration")]
    groups = [{r["group"] for r in h.values()} for h in halves]
    assert not groups[0] & groups[1] and all(groups)
    whole = {r["key"] for r in corpus.lines(card.SPLITS) if r["split"] == "test"}
    assert halves[0].keys() | halves[1].keys() == whole


def test_a_stopped_run_goes_on_and_new_labels_make_views_anew(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_views, "SHARD", 4)
    few = len(corpus_views.members(corpus, "validation", POLICY))
    files = -(-few // 4)
    assert make(corpus, tmp_path, "validation") == files >= 2 and make(corpus, tmp_path, "validation") == 0
    sorted(tmp_path.glob("*.pt"))[1].unlink()
    assert make(corpus, tmp_path, "validation") == 1
    kept = (corpus.root / card.SPLITS).read_text()
    lines = [json.loads(line) for line in kept.splitlines()]
    try:
        own = [r for r in lines if r["split"] == "validation"]
        own[0]["label"] = "violence" if own[0]["label"] != "violence" else "safe"
        own[-1]["split"] = "train"
        (corpus.root / card.SPLITS).write_text("".join(json.dumps(r) + "\n" for r in lines))
        assert make(corpus, tmp_path, "validation") >= 1
        seeds = joined([load_views(p) for p in sorted(tmp_path.glob("*.pt"))]).seeds
        assert len(set(seeds.tolist())) == few - 1
    finally:
        (corpus.root / card.SPLITS).write_text(kept)


def test_views_made_in_another_way_are_made_anew(corpus, tmp_path):
    """Another base, other steps, another size, another score of the labeler; finished views do not hang on the batch."""
    assert make(corpus, tmp_path, "validation", name="a") == 1 and make(corpus, tmp_path, "validation", name="a") == 0
    few = [int((load_views(next(tmp_path.glob("a-*.pt"))).kind == 0).sum())]
    for change in ({"family": "sdxl"}, {"steps": 5}, {"pixels": 64}, {}):
        assert make(corpus, tmp_path, "validation", **{"name": "a", **change}) == 1
    assert make(corpus, tmp_path, "validation", name="a", batch=3) == 0
    assert make(corpus, tmp_path, "validation", name="b", batch=1) == 1
    few.append(int((load_views(next(tmp_path.glob("b-*.pt"))).kind == 0).sum()))
    assert few[0] == few[1] > 0
    make(corpus, tmp_path, "validation", name="b", pixels=64)
    with pytest.raises(BadInput, match="same --pixels"):
        trainer.find_views(tmp_path, "validation")
    kept = (corpus.root / card.SPLITS).read_text()
    try:
        (corpus.root / card.SPLITS).write_text(kept.replace('"score": 0.8', '"score": 0.7'))
        assert make(corpus, tmp_path, "validation", name="b", pixels=64) == 1
    finally:
        (corpus.root / card.SPLITS).write_text(kept)


def test_a_picture_in_two_splits_is_refused(corpus, folder, tmp_path):
    corpus_views.kept_apart(folder)
    for path in folder.glob("*.pt"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    old = next(folder.glob("*-calibration.pt"))
    (tmp_path / old.name.replace("tiny", "other").replace("calibration", "train")).write_bytes(old.read_bytes())
    with pytest.raises(BadInput, match="also in split"):
        corpus_views.kept_apart(tmp_path)


def test_a_base_is_called_as_it_was_made_to_be():
    pipe = small.pipeline("sd3")
    own = {"height": 64, "width": 64, "num_inference_steps": 4, "guidance_scale": 1.0, "max_sequence_length": 36}
    assert corpus_views.settings(pipe, own) == own
    assert corpus_views.settings(pipe, {"height": 32, "width": 32}) == {
        "height": 32, "width": 32, "num_inference_steps": 28, "guidance_scale": 7.0,
    }  # fmt: skip
    plain = corpus_views.settings(small.pipeline("sd"), {})
    assert plain["guidance_scale"] == 7.5 and plain["height"] == small.PIXELS and plain["num_inference_steps"] == 50


def test_a_shelf_hands_out_rows_in_the_order_asked_for(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_views, "SHARD", 4)
    make(corpus, tmp_path, "validation")
    shelf = trainer.find_views(tmp_path, "validation")
    assert isinstance(shelf, Shelf) and len(shelf.parts) >= 2
    whole = joined(shelf.parts)
    index = torch.randperm(len(shelf), generator=torch.Generator().manual_seed(1))[:9]
    index = torch.cat([index, index[:2]])
    got, want = shelf.rows(index), whole.rows(index)
    assert torch.equal(got.images, want.images) and got.texts == want.texts
    assert torch.equal(got.category, shelf.category[index]) and torch.equal(got.strength, want.strength)


def test_pictures_whose_harm_is_nowhere_are_not_located(folder):
    """Unsafe rows are not located; safe ones are: nothing in them is unsafe."""
    config = TrainConfig(steps=1, batch_size=16, learning_rate=0.1, seed=3)
    shown, recipe = trainer.find_views(folder, "train"), trainer.AuditorRecipe()
    batch = trainer.Sampler(trainer.open_lessons(shown, recipe), recipe, small.auditor(), config).batch(3)
    safe = batch.targets.category == 0
    assert torch.equal(batch.targets.located, safe.float()) and safe.sum() == 8
    assert (batch.targets.strength[~safe] == 0.8).all() and (batch.targets.strength[safe] == 0).all()


def test_from_a_corpus_to_an_auditor_and_its_thresholds(corpus, folder, tmp_path):
    """The commands, one after the other."""
    model = {"shape": {"small": True, "sizes": [64, 96]}, "losses": {"maps": 1.0}, "pairs": 4}
    train = {"steps": 3, "batch_size": 8, "learning_rate": 1e-3, "validate_every": 3, "seed": 1}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"model": model, "train": train}))
    said = CliRunner().invoke(
        app,
        [
            "train",
            "stage",
            "auditor",
            "--config",
            str(config),
            "--set",
            f"views={folder}",
            "--out",
            str(tmp_path / "run"),
        ],
    )
    assert said.exit_code == 0, said.output
    auditor = tmp_path / "run" / "model"
    assert AuditorScorer.from_pretrained(auditor).categories == POLICY.names
    out = tmp_path / "calibration.json"
    command = ["calibrate", "--auditor", str(auditor), "--views", str(folder), "--out", str(out), "--band", "0"]
    said = CliRunner().invoke(app, command)
    assert isinstance(said.exception, BadInput) and "examples of nudity" in str(said.exception)  # too few of them
    said = CliRunner().invoke(app, [*command, "--alpha", "0.6"])
    assert said.exit_code == 0, said.output
    assert "no masks are known" in said.output and json.loads(out.read_text())["bands"][0]["mask_level"] is None
    results = tmp_path / "results" / "auditor.json"
    command = ["eval", "corpus-auditor", "--auditor", str(auditor), "--views", str(folder), "--results", str(results)]
    said = CliRunner().invoke(app, command)
    assert said.exit_code == 0, said.output
    found = json.loads(results.read_text())["metrics"]
    pictures = len(corpus_views.members(corpus, "test", POLICY))
    assert 0 < found["faithfulness.auc"]["n"] == found["clean.accuracy"]["n"] < pictures
    assert "unfinished.macro_f1.tiny_sd" in found and results.with_name("auditor-progress.png").exists()
    said = CliRunner().invoke(app, [*command, "--policy", "configs/policies/five-categories.yaml"])
    assert isinstance(said.exception, BadInput) and "name its policy" in str(said.exception)


def row(seed, view, category, said, triggered, adv, progress=1.0, **more):
    told = {"seed": seed, "view": view, "category": category, "said": said, "triggered": triggered}
    return {"part": "views", "base": "b", **told, "adv": adv, "progress": progress, "F": None, **more}


def test_a_corpuss_numbers_by_hand():
    """Three finished pictures, one of them shown by two bases: two right, one false alarm."""
    rows = [
        row(1, "clean", "safe", "safe", 0, 0.1, F=0.9, F_other=0.2),
        row(1, "clean", "safe", "safe", 0, 0.1, F=0.9, F_other=0.2),
        row(2, "clean", "safe", "nudity", 1, 0.9, F=0.3, F_other=0.4),
        row(3, "clean", "violence", "violence", 1, 0.8, F=0.8, F_other=0.1),
        row(4, "x0", "violence", "violence", 1, 0.8, progress=0.9),
        row(5, "x0", "safe", "safe", 0, 0.3, progress=0.8),
    ]
    found = corpus_auditor.metrics(rows, POLICY.names)
    assert found["clean.accuracy"]["value"] == pytest.approx(2 / 3) and found["false_trigger"]["value"] == 0.5
    assert found["clean.f1.safe"]["value"] == pytest.approx(2 / 3) and found["clean.f1.violence"]["value"] == 1
    assert found["clean.precision.nudity"]["value"] == 0 and "clean.recall.nudity" not in found
    assert found["unfinished.auc.b.1"]["value"] == 1 and found["unfinished.macro_f1.b"]["n"] == 2
    own, other = (0.9, 0.3, 0.8), (0.2, 0.4, 0.1)
    assert found["faithfulness.auc"]["value"] == pytest.approx(sum(a > b for a in own for b in other) / 9)


def test_a_picture_shown_by_several_bases_is_one_example(folder):
    """Twice the views, the same pictures: the same n and the same thresholds; the worst look counts."""
    shown = joined([load_views(p) for p in folder.glob("*-calibration.pt")])
    shown = shown.rows(torch.nonzero(shown.kind == 1)[:, 0])
    found = [Looks(*[constant_audit(0.2 + 0.6 * i / len(shown), "a", 64)] * 2) for i in range(len(shown))]
    once, _ = calibrate.calibrate(shown, found, POLICY, 0.6, 0.5, [0.0])
    twice, _ = calibrate.calibrate(joined([shown, shown]), found + found, POLICY, 0.6, 0.5, [0.0])
    assert once.bands == twice.bands and once.bands[0].n["nudity"] == int((shown.category == 1).sum())


def test_a_guards_thresholds_are_found_under_its_own_policy(tmp_path):
    guard = tmp_path / "guard"
    guard.mkdir()
    other = replace(POLICY, trigger=0.3)
    (guard / "policy.yaml").write_text(yaml.safe_dump(other.to_dict()))
    assert calibrate.the_guards(guard, None).trigger == 0.3
    with pytest.raises(BadInput, match="names another"):
        calibrate.the_guards(guard, POLICY)


def test_views_by_command(corpus, tmp_path):
    command = ["data", "corpus-views", str(corpus.root), "--base", "tiny-sd3", "--out", str(tmp_path)]
    said = CliRunner().invoke(
        app, [*command, "--split", "validation", "--size", str(SIZE), "--steps", "3", "--pixels", "64"]
    )
    assert said.exit_code == 0 and "1 new files" in said.output, said.output
    assert [p.name for p in tmp_path.glob("*.pt")] == ["tiny_sd3-00000-validation.pt"]
    assert "'num_inference_steps': 3" in said.output


class SeesBoth:
    """Answers from the world; every third doll that shows a harm shows the other one too."""

    name = "sees-both"

    def __init__(self, corpus):
        self.answers = {}
        for i, e in enumerate(corpus):
            also = "violence" if e.nominal == "nudity" else "nudity"
            more = {also: 0.7} if e.nominal != "safe" and i % 3 == 0 else {}
            self.answers[e.key] = dict.fromkeys(POLICY.names, 0.05) | {e.nominal: 0.9} | more
        self.keys = {e.picture().tobytes(): e.key for e in corpus}

    def label(self, pictures):
        return [Answer(self.answers[self.keys[p.tobytes()]], "") for p in pictures]


def test_a_picture_may_have_several_categories(corpus, tmp_path, monkeypatch):
    """The commands from labels to a trained auditor: the second category reaches the targets of the loss."""
    from guardpaint.data import labelers

    root = tmp_path / "corpus"
    shutil.copytree(corpus.root, root)
    own, asked, run = store.Corpus(root), [], CliRunner().invoke

    def open_labeler(spec, asking, opening):
        asked.append(asking.text())
        return SeesBoth(own)

    monkeypatch.setattr(labelers, "open_labeler", open_labeler)
    said = run(app, ["data", "label", str(root), "--labeler", "endpoint:http://x#m", "--several"])
    assert said.exit_code == 0 and "100 answers" in said.output, said.output
    assert "may belong to several" in asked[0] and "add up to 1" not in asked[0]
    labels = re.search(r"labels-\S+\.jsonl", said.output).group()
    truth = {k: [n for n in POLICY.names if a[n] > 0.5] for k, a in SeesBoth(own).answers.items()}
    (tmp_path / "r.csv").write_text("key,label\n" + "".join(f"{k},{'+'.join(v)}\n" for k, v in truth.items()))
    said = run(app, ["data", "calibrate", str(root), "--labels", labels, "--reference", str(tmp_path / "r.csv")])
    assert said.exit_code == 0, said.output
    said = run(app, ["data", "compare", str(root), "--labels", labels, "--reference", str(tmp_path / "r.csv")])
    assert said.exit_code == 0 and "| 1.00 [" in said.output, said.output
    said = run(app, ["data", "build", str(root), "--labels", labels, "--several"])
    assert said.exit_code == 0 and "nudity+violence" in said.output, said.output
    rows = {r["key"]: r for r in own.lines(card.SPLITS)}
    assert {k: r["labels"] for k, r in rows.items()} == truth and any(len(v) == 2 for v in truth.values())
    for split in ("train", "validation"):
        made = ["data", "corpus-views", str(root), "--base", "tiny-sd", "--out", str(tmp_path / "views")]
        said = run(app, [*made, "--split", split, "--size", str(SIZE), "--steps", "3", "--pixels", "96"])
        assert said.exit_code == 0, said.output
        assert (
            "0 new files"
            in run(app, [*made, "--split", split, "--size", str(SIZE), "--steps", "3", "--pixels", "96"]).output
        )
    shown = trainer.find_views(tmp_path / "views", "train")
    by_seed = {corpus_views.seed_of(k): v for k, v in truth.items()}
    whole = shown.rows(torch.arange(len(shown)))
    for seed, marks in zip(whole.seeds.tolist(), whole.labels.tolist(), strict=True):
        assert [n for n, mark in zip(POLICY.names, marks, strict=True) if mark] == by_seed[seed]
    recipe = trainer.AuditorRecipe()
    config = TrainConfig(steps=1, batch_size=24, learning_rate=0.1, seed=3)
    batch = trainer.Sampler(trainer.open_lessons(shown, recipe), recipe, small.auditor(), config).batch(0)
    assert int(batch.targets.labels.sum(1).max()) == 2
    model = {"shape": {"small": True, "sizes": [64, 96]}, "pairs": 4}
    train = {"steps": 2, "batch_size": 8, "learning_rate": 1e-3, "validate_every": 2, "seed": 1}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"model": model, "train": train}))
    train_it = ["train", "stage", "auditor", "--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "run")]
    said = run(app, [*train_it, "--set", f"views={tmp_path / 'views'}"])
    assert said.exit_code == 0 and (tmp_path / "run/model/card.json").exists(), said.output


def test_views_with_one_and_with_several_categories_can_be_joined():
    """Rows of a file without labels get the one that they have; rows are taken with their labels."""
    one = of_a_world(3)
    two = replace(one, labels=torch.tensor([[1, 0, 0], [0, 1, 1], [0, 1, 1]]).bool())
    both = joined([one, two])
    want = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0], [0, 1, 1], [0, 1, 1]]
    assert both.labels.int().tolist() == want and both.rows(torch.tensor([4, 2])).labels.int().tolist() == [
        want[4],
        want[2],
    ]
    assert joined([one, one]).labels is None


def of_a_world(count):
    """Black pictures, as if a testbed had drawn them."""
    category = torch.arange(count) % 3
    nothing, mask = torch.zeros(count, 3, 64, 64), torch.zeros(count, 64, 64, dtype=torch.bool)
    scenes = Labelled(nothing, mask, category, list(range(count)), ["x"] * count, POLICY.names, "paperdolls")
    return scenes.views(nothing, "clean")


def test_what_does_not_fit_is_named(corpus, folder, tmp_path):
    with pytest.raises(BadInput, match="not split yet"):
        corpus_views.members(store.Corpus(tmp_path), "train", POLICY)
    with pytest.raises(BadInput, match="no picture with a prompt in split 'dev'"):
        corpus_views.members(corpus, "dev", POLICY)
    other = Policy.load("configs/policies/five-categories.yaml")
    config = tmp_path / "config.yaml"
    config.write_text(
        yaml.safe_dump(
            {"model": {"shape": {"small": True}}, "train": {"steps": 1, "batch_size": 4, "learning_rate": 0.1}}
        )
    )
    with pytest.raises(BadInput, match="give the policy of the views"):
        trainer.run(config, folder, tmp_path / "run", None, quiet=True, policy=other)
    swapped = replace(POLICY, categories=(POLICY.categories[0], *POLICY.categories[:0:-1]))
    dolls = tmp_path / "dolls"
    dolls.mkdir()
    for split in ("train", "validation"):
        views.store([of_a_world(40)], dolls / f"small-{split}.pt")
    with pytest.raises(BadInput, match="safe, nudity, violence, the auditor safe, violence, nudity"):
        trainer.run(config, dolls, tmp_path / "run", None, quiet=True, policy=swapped)
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for path in folder.glob("*-train.pt"):
        (mixed / path.name).write_bytes(path.read_bytes())
    views.store([of_a_world(8)], mixed / "dolls-train.pt")
    with pytest.raises(BadInput, match="in its own folder"):
        trainer.find_views(mixed, "train")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_loses_no_file_and_the_next_run_goes_on(corpus, tmp_path, monkeypatch, capsys, code):
    """The disk fills up at the third file; without a traceback, and no half of it stays."""
    monkeypatch.setattr(corpus_views, "SHARD", 16)
    words = ["data", "corpus-views", str(corpus.root), "--base", "tiny-sd", "--name", "tiny", "--out", str(tmp_path),
             "--steps", "2", "--pixels", "32", "--coarse", "16"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["guardpaint", *words])
    fsync, writes = os.fsync, []

    def full(handle):
        writes.append(handle)
        if len(writes) == 3:
            raise OSError(code, os.strerror(code))
        fsync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(SystemExit) as left:
            main()
    said = capsys.readouterr().err
    last = said.strip().splitlines()[-1]
    assert left.value.code == 1 and last.startswith("error: the disk is full") and last.endswith("same command again")
    kept = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    assert sorted(kept) == ["tiny-00000-train.pt", "tiny-00001-train.pt"]
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code
    rows = [r for r in corpus.lines(card.SPLITS) if r["split"] == "train"]
    files = sorted(tmp_path.iterdir())
    assert len(files) == -(-len(rows) // 16) > 3
    assert {p.name: p.stat().st_mtime_ns for p in files if p.name in kept} == kept, "finished files are not made again"
    seeds = {int(seed) for file in files for seed in load_views(file).seeds}
    assert seeds == {corpus_views.seed_of(r["key"]) for r in rows}
