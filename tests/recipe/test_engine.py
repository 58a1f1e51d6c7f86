"""The engine of recipes: what is skipped, resumed, run again, moved aside, and said."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from recipe.scripted import RECIPE, engine, runs
from rich.console import Console

from guardpaint.cli import recipe as recipe_command
from guardpaint.errors import BadConfig, BadInput
from guardpaint.policy import policy_file
from guardpaint.recipe import plan, spec
from guardpaint.recipe.engine import Launch, StageFailed, Waiting
from guardpaint.recipe.opening import open_engine

HERE = Path(__file__).parent
PAPER = HERE.parents[1] / "recipes" / "paper.yaml"


def heeds_interrupts():
    """A shell starts its background jobs deaf to Ctrl-C, and their children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def go(folder, changes=None, only=(), **more):
    made, said = engine(folder, changes, **more)
    made.run(made.chosen(only))
    return made, said


def test_all_stages_run_in_order_and_a_second_run_skips_them(tmp_path):
    made, _ = go(tmp_path)
    out = tmp_path / "out"
    assert (out / "last.txt").read_text() == "[] [('level', '1')] by handmore "
    assert not (out / "extra.txt").exists()
    record = made.ledger.read(made.recipe.stage("many-one"))
    assert record.status == "done" and record.exit == 0 and set(record.inputs) == {"b.txt"}
    assert record.settings["level"] == 1 and record.memory_gb > 0
    _, said = go(tmp_path)
    assert all("done, neither" in line for line in said) and len(said) == 6
    assert runs(tmp_path, "a.txt") == runs(tmp_path, "many/one.txt") - 1 == 1  # `change` writes the same journal


def test_a_changed_setting_runs_its_stage_and_what_depends_on_it_again(tmp_path):
    go(tmp_path)
    _, said = go(tmp_path, {"stages": {"many": {"each": {"item": {"one": {"level": 2}}}}}})
    text = "\n".join(said)
    assert "many-one: level was 1 and is now 2" in text
    assert "run again: many-one, change, last; old outputs are kept" in text
    assert "first: done" in text and "many-two: done" in text and runs(tmp_path, "many/two.txt") == 1
    assert (tmp_path / "out" / "old" / "many-one-1" / "many" / "one.txt").read_text() == "[('level', '1')] by handmore "
    assert (tmp_path / "out" / "last.txt").read_text() == "[] [('level', '2')] by handmore "
    assert len(list((tmp_path / "out" / "old").glob("last-*"))) == 1


def test_a_change_without_effect_on_the_output_stops_there(tmp_path):
    """Stages after it see the same content and are skipped."""
    go(tmp_path)
    (tmp_path / "out" / "a.txt").unlink()
    _, said = go(tmp_path)
    assert any("first: its output a.txt is missing" in line for line in said)
    assert runs(tmp_path, "a.txt") == 2 and runs(tmp_path, "many/two.txt") == 1


@pytest.mark.parametrize(
    ("output", "consumer"),
    [
        ("a.txt", "person"),
        ("b.txt", "many-one"),
        ("b.txt", "many-two"),
        ("many/one.txt", "change"),
        ("many/*.txt", "last"),
    ],
)
def test_without_an_input_a_stage_names_the_file_and_its_maker(tmp_path, output, consumer):
    go(tmp_path)
    for path in (tmp_path / "out").glob(output):
        path.unlink()
    made, _ = engine(tmp_path)
    with pytest.raises(
        BadInput, match=f"stage {consumer}: .*{output.replace('*', '.*')}.* is missing, which stage .* writes"
    ):
        made.run([made.recipe.stage(consumer)])


def test_a_persons_stage_waits(tmp_path):
    with pytest.raises(Waiting, match=r"stage person is yours: Write b.txt. When .*b.txt exists, run the same command"):
        go(tmp_path, hands={})
    (tmp_path / "out" / "b.txt").write_text("mine")
    go(tmp_path, hands={})
    assert "mine" in (tmp_path / "out" / "last.txt").read_text()


def test_a_full_disk_loses_nothing_and_the_next_run_goes_on(tmp_path):
    changes = {"values": {"kind": "full"}, "stages": {"first": {"options": {"room": str(tmp_path / "room")}}}}
    with pytest.raises(
        StageFailed, match=r"first: the disk is full \(.* GB free, the stage needs about 5 GB\).*make room"
    ):
        go(tmp_path, changes)
    assert (tmp_path / "out" / "a.txt.shard").read_text() == "kept"
    (tmp_path / "room").touch()
    _, said = go(tmp_path, changes)
    assert any(line.startswith("first: resumes") for line in said) and (tmp_path / "out" / "last.txt").exists()


def test_a_stage_that_ends_well_without_its_output_has_failed(tmp_path):
    with pytest.raises(StageFailed, match=r"first: ended well, but .*a.txt is not there"):
        go(tmp_path, {"values": {"kind": "forgets"}})


def test_a_failed_command_is_quoted(tmp_path):
    with pytest.raises(StageFailed, match=r"many-one: ended with exit code 1: FileNotFoundError.*log: .*many-one.log"):
        go(tmp_path, {"stages": {"many": {"command": ["plain", "{out}/many/{item}.txt", "{out}/nothing"]}}})


def test_ctrl_c_reaches_the_command_and_the_next_run_resumes(tmp_path):
    """A process runs the engine; it gets SIGINT while a stage works."""
    code = (
        "import sys; from pathlib import Path; from recipe.scripted import engine\n"
        "from guardpaint.recipe.engine import Interrupted\n"
        f"made, _ = engine(Path({str(tmp_path)!r}), {{'values': {{'kind': 'slow'}}}})\n"
        "try:\n    made.run(made.chosen())\nexcept Interrupted as error:\n    print(error); sys.exit(130)\n"
    )
    path = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True,
        preexec_fn=heeds_interrupts,
    )  # fmt: skip
    begun, deadline = tmp_path / "out" / "a.txt.begun", time.monotonic() + 60
    while not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stage first was interrupted; what it has done is kept. Go on with the same command" in said
    record = json.loads((tmp_path / "out" / "ledger" / "first.json").read_text())
    assert record["status"] == "interrupted" and record["exit"] != 0
    _, lines = go(tmp_path, {"values": {"kind": "slow"}})
    assert any(line.startswith("first: resumes") for line in lines)
    assert "resumed from half" in (tmp_path / "out" / "a.txt").read_text()


def test_settings_changed_after_an_interruption_start_the_stage_anew(tmp_path):
    with pytest.raises(StageFailed):
        go(tmp_path, {"values": {"kind": "full"}, "stages": {"first": {"options": {"room": "x"}}}})
    (tmp_path / "out" / "a.txt").write_text("half of the old settings")
    _, said = go(tmp_path)
    assert any("first: command was 'full {out}/a.txt' and is now 'plain {out}/a.txt'" in line for line in said)
    assert (tmp_path / "out" / "old" / "first-1" / "a.txt").read_text() == "half of the old settings"


def test_a_folder_that_was_moved_is_still_done(tmp_path):
    go(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").rename(tmp_path / "elsewhere" / "out")
    _, said = go(tmp_path / "elsewhere")
    assert all("done, neither" in line for line in said)


def shown(made) -> str:
    with open(os.devnull, "w") as nowhere:
        console = Console(width=200, record=True, file=nowhere)
        plan.show(made, made.chosen(), console)
    return console.export_text()


def test_the_plan_names_downloads_gates_and_what_estimates_rest_on(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "token", lambda: None)
    made, _ = engine(tmp_path)
    text = shown(made)
    for part in ("someone/shut 3 GB (gated)", "5 GB, 1 gated", "a guess", "nothing was measured", "a person",
                 "no hub token is set, and these are gated: someone/shut", "guardpaint plain"):  # fmt: skip
        assert part in text, text


def test_a_gated_repository_without_a_token_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "token", lambda: None)
    made, _ = engine(tmp_path)
    with pytest.raises(BadInput, match="gated: someone/shut. Accept the terms .* HF_TOKEN .* nothing was started"):
        plan.check_access(made, made.chosen())
    plan.check_access(made, [made.recipe.stage("first")])
    monkeypatch.setattr(plan, "token", lambda: "hf_x")
    plan.check_access(made, made.chosen())


def test_training_stages_start_with_a_launcher(tmp_path):
    stage = spec.Stage("auditor", {}, ("train", "stage", "auditor"), launch="accelerate")
    assert Launch().argv(stage)[1:] == ["-m", "guardpaint.cli", "train", "stage", "auditor"]
    assert Launch().shown(stage) == "guardpaint train stage auditor"
    argv = Launch(processes=2).argv(stage)
    assert argv[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert argv[-5:] == ["-m", "guardpaint.cli", "train", "stage", "auditor"]
    argv = Launch(processes=2, gpu=True).argv(stage)
    assert argv[1:5] == ["-m", "accelerate.commands.launch", "--num_processes", "2"]
    assert (
        Launch(processes=2).shown(stage).startswith("torchrun --standalone --nproc-per-node 2 -m guardpaint.cli train")
    )
    shown = Launch(processes=2, gpu=True).shown(stage)
    assert shown.startswith("accelerate launch --num_processes 2 -m guardpaint.cli train")
    assert Launch(processes=2).argv(spec.Stage("x", {}, ("data", "review")))[1:] == [
        "-m",
        "guardpaint.cli",
        "data",
        "review",
    ]


def test_overrides_are_listed(tmp_path):
    engine(tmp_path)
    data = spec.read_recipe(tmp_path / "recipe.yaml")
    changes = {"models": {"open": {"folder": "/x"}}, "stages": {"first": {"options": {"size": 1}}}}
    _, found = spec.overridden(data, changes, tmp_path / "changes.yaml")
    assert [(o.stage, o.setting, o.paper, o.rehearsal) for o in found] == [
        ("models", "open.folder", None, "/x"), ("first", "options.size", 3, 1)]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "x", "command": ["a"], "hand": "b"}, "exactly one of command, train and hand"),
        ({"name": "x", "command": ["{nobody}"]}, "no such model or value"),
        ({"name": "x", "command": ["a"], "inputs": ["never.txt"]}, "reads never.txt, which no earlier stage writes"),
        ({"name": "x", "command": ["a"], "models": ["nobody"]}, "no model 'nobody'"),
        ({"name": "first", "command": ["a"]}, "two stages are named first"),
        ({"name": "x", "command": ["a"], "colour": 1}, "not colour"),
    ],
)
def test_bad_recipes_are_named(tmp_path, change, message):
    import yaml

    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump({**RECIPE, "stages": [*RECIPE["stages"], change]}))
    with pytest.raises(BadConfig, match=message):
        spec.assemble(spec.read_recipe(path), "bad", tmp_path)


# Files that no stage writes ----------------------------------------------------------------------------------


def world(folder):
    """Changes by which `first` reads a policy, and `many` a testbed with prompts beside it."""
    (folder / "rules.yaml").write_text(Path(policy_file("paper")).read_text())
    (folder / "prompts.csv").write_text("prompt\na\n")
    (folder / "words.txt").write_text("a\n")
    (folder / "testbed.yaml").write_text("harmful: [{file: prompts.csv}]\nkeywords: words.txt\n")
    (folder / "manifest.yaml").write_text("sources: [{name: s, format: csv, path: %s}]\n" % (folder / "pictures.csv"))
    (folder / "pictures.csv").write_text("image\n")
    return {
        "stages": {
            "first": {"options": {"policy": str(folder / "rules.yaml")}},
            "many": {"options": {"testbed": str(folder / "testbed.yaml")}},
            "last": {"options": {"manifest": str(folder / "manifest.yaml")}},
        }
    }


@pytest.mark.parametrize(
    ("file", "stages", "label"),
    [
        ("rules.yaml", ["first"], "first: its input policy rules.yaml has changed"),
        ("prompts.csv", ["many-one", "many-two", "change"], "many-one: its input testbed.yaml: prompts.csv"),
        ("words.txt", ["many-one", "many-two", "change"], "many-one: its input testbed.yaml: words.txt"),
        ("testbed.yaml", ["many-one", "many-two", "change"], "many-one: its input testbed.yaml has"),
        ("pictures.csv", ["last"], "last: its input manifest.yaml: "),
    ],
)
def test_an_edited_file_that_no_stage_writes_runs_its_readers_again(tmp_path, file, stages, label):
    changes = world(tmp_path)
    go(tmp_path, changes)
    with (tmp_path / file).open("a") as edited:
        edited.write("# edited\n")
    _, said = go(tmp_path, changes)
    assert label in "\n".join(said)
    assert [line.partition(":")[0] for line in said if ": begins" in line or ": resumes" in line] == stages
    assert (tmp_path / "out" / "many" / "one.txt").read_text().endswith("more "), "`change` is not lost"


def test_the_papers_stages_read_their_policy_and_their_prompts(tmp_path):
    """Every stage that is given a policy reads its file, shipped ones too, and what the testbed names."""
    made = open_engine(PAPER, tmp_path / "out")
    for stage in made.recipe.stages:
        given = "--policy" in stage.words or "set.policy" in stage.settings
        assert ("policy paper" in {f.label for f in stage.reads}) == given, stage.name
    attack = made.recipe.stage("attack-mma")
    assert {f.path.name for f in attack.reads} >= {"i2p.csv", "coco.csv"}
    ingest = made.recipe.stage("ingest")
    assert {f.path.name for f in ingest.reads} >= {"hf_train_toxicity_privacy_generated.json", "train"}


def test_a_pinned_revision_is_a_setting(tmp_path):
    before, after = (
        engine(tmp_path, {"models": {"open": {"revision": r}}, "stages": {"first": {"options": {"model": "{open}"}}}})[
            0
        ]
        for r in ("a1", "b2")
    )
    assert before.recipe.stage("first").settings["model"] == "hub:someone/open@a1"
    assert after.recipe.stage("first").settings["model"] == "hub:someone/open@b2"


def test_a_repository_that_moved_on_is_named_and_nothing_runs_again(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    ref = tmp_path / "cache" / "models--someone--open" / "refs" / "main"
    ref.parent.mkdir(parents=True)
    ref.write_text("aaaaaaaaaaaaaaaa")
    go(tmp_path)
    ref.write_text("bbbbbbbbbbbbbbbb")
    _, said = go(tmp_path)
    assert said[0] == "first used someone/open at aaaaaaaaaaaa; this machine now has bbbbbbbbbbbb"
    assert runs(tmp_path, "a.txt") == 1


def test_files_to_fetch_are_checked_before_the_first_stage_and_planned(tmp_path):
    changes = world(tmp_path)
    (tmp_path / "prompts.csv").unlink()
    (tmp_path / "pictures.csv").unlink()
    made, _ = engine(tmp_path, changes)
    with pytest.raises(
        BadInput, match=r"prompts.csv, named in testbed.yaml; .*pictures.csv, named in manifest.yaml; nothing"
    ):
        plan.check_files(made, made.chosen())
    plan.check_files(made, [made.recipe.stage("first")])
    text = shown(made)
    assert "files that you fetch yourself" in text and "prompts.csv, named in testbed.yaml: MISSING" in text
    for name in ("prompts.csv", "pictures.csv"):
        (tmp_path / name).touch()
    plan.check_files(made, made.chosen())
    assert "MISSING" not in shown(made)


def test_the_command_refuses_without_the_files(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "token", lambda: "hf_x")
    with pytest.raises(BadInput, match=r"coco.csv, named in paper-testbed.yaml"):
        recipe_command.run(PAPER, tmp_path / "out")


@pytest.mark.parametrize(
    ("free", "cached", "message"),
    [
        (9, False, None),
        (6, False, "stages and downloads together need about 7 GB"),
        (6, True, None),
        (4, True, "about 5 GB"),
    ],
)
def test_the_disk_has_to_hold_downloads_too(tmp_path, monkeypatch, free, cached, message):
    """Five gigabytes of the first stage, two of its model."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    if cached:
        (tmp_path / "cache" / "models--someone--open" / "snapshots" / "a" / "b").mkdir(parents=True)
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free * 1e9))
    made, _ = engine(tmp_path)
    said = plan.check_disk(made, [made.recipe.stage("first")])
    assert (said is None) if message is None else message in said


def test_the_split_needs_the_captions_that_it_is_given(tmp_path):
    """The bare command fails without them, and not only the engine."""
    stage = open_engine(PAPER, tmp_path / "out").recipe.stage("split")
    assert "corpus/captions.jsonl" in stage.inputs and "--captions" in stage.words


def test_models_that_do_not_fit_the_planned_memory_are_offloaded(tmp_path):
    """Every stage that draws on a base with more weights than it plans memory for says --offload model."""
    made = open_engine(PAPER, tmp_path / "out")
    for stage in (s for s in made.recipe.stages if s.group in ("views", "states")):
        [model] = stage.models
        offloaded = "--offload model" in " ".join(stage.words)
        assert offloaded or model.gigabytes <= stage.estimate.memory_gb, stage.name
