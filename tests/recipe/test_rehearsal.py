"""The paper's recipe on small random models: what a rehearsal prepares, and (slow) that every stage of it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from guardpaint.guard import GuardPaint
from guardpaint.recipe import rehearsal, spec
from guardpaint.recipe.opening import open_engine
from guardpaint.store.checkpoint import read_json
from guardpaint.testing import hub_layouts

ROOT = Path(__file__).parents[2]
PAPER = ROOT / "recipes" / "paper.yaml"
FAMILIES = {"sd15": "sd", "sdxl": "sdxl", "sd35m": "sd3", "flux": "flux"}
TIMED = 1800


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """The engine of a rehearsal, before any stage, and its overrides."""
    return rehearsal.prepare(PAPER, tmp_path_factory.mktemp("prepared"), say=lambda text: None)


def test_the_paper_names_only_repositories_that_have_stand_ins(tmp_path):
    data = spec.read_recipe(PAPER)
    models = [facts["id"] for facts in data["models"].values() if not facts.get("dataset")]
    assert set(models) <= set(hub_layouts.LAYOUTS)
    gated = {i for i in models if hub_layouts.LAYOUTS[i].gated}
    assert gated == {
        facts["id"] for facts in data["models"].values() if facts.get("gated") and not facts.get("dataset")
    }


def test_every_command_of_the_paper_is_one_that_exists(tmp_path):
    """Typer parses each command line; a misspelt option or command is a usage error."""
    from typer.main import get_command

    from guardpaint.cli.main import app

    engine = open_engine(PAPER, tmp_path)
    root = get_command(app)
    for stage in engine.recipe.stages:
        group, words = root, list(stage.words)
        while words and hasattr(group, "commands"):
            group = group.commands[words.pop(0)]
        if stage.words:
            group.make_context(stage.name, words, resilient_parsing=False)


def test_the_plan_of_the_paper_rests_every_estimate_on_something(tmp_path):
    for stage in open_engine(PAPER, tmp_path).recipe.stages:
        if stage.words:
            assert stage.estimate.hours is not None and stage.estimate.memory_gb is not None, stage.name
            assert len(stage.estimate.rests_on) > 10 and "nothing was measured" not in stage.estimate.rests_on, (
                stage.name
            )


def test_every_override_is_listed(prepared):
    """What differs between the command lines and configs of both is in the list, and nothing else is."""
    engine, found = prepared
    paper = open_engine(PAPER, engine.recipe.out)
    listed = {o.stage for o in found}
    values = {o.setting for o in found if o.stage in ("models", "values")}
    for old, new in zip(paper.recipe.stages, engine.recipe.stages, strict=True):
        assert old.name == new.name
        for key in {*old.settings, *new.settings}:
            if old.settings.get(key) != new.settings.get(key):
                base = old.name.rsplit("-", 1)[0]
                assert {old.name, base} & listed or values, f"{old.name}: {key}"
    budget = {(o.stage, o.setting): (o.paper, o.rehearsal) for o in found}
    assert budget["auditor", "train.config.train.steps"][0] == 60000
    assert budget["bco", "train.config.model.rank"][0] == 128
    assert ("models", "sdxl.folder") in budget and ("values", "corpora") in budget
    assert budget["testbed", "bases.sd15.path"][0] == "hub:stable-diffusion-v1-5/stable-diffusion-v1-5"
    assert budget["reference", "hand"] == ("a person", "the stand-in of a person")


def test_no_command_of_a_rehearsal_names_the_hub(prepared):
    engine, _ = prepared
    for stage in engine.recipe.stages:
        assert "hub:" not in stage.command, stage.command
        assert "hub:" not in json.dumps(stage.config)


def test_paperdolls_is_hidden_from_every_command(prepared):
    engine, _ = prepared
    code = (
        "import importlib.metadata as m\n"
        "print(len(m.entry_points(group='guardpaint.testbeds')))\n"
        "try:\n    import paperdolls\nexcept ModuleNotFoundError as error:\n    print(error)\n"
    )
    environment = {**os.environ, **engine.launch.environment}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.stdout.splitlines() == ["0", "paperdolls is hidden by GUARDPAINT_WITHOUT"], result.stderr


# The rehearsal itself ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """The folder of a whole rehearsal by command. GUARDPAINT_REHEARSAL names one to go on with."""
    out = Path(os.environ.get("GUARDPAINT_REHEARSAL") or tmp_path_factory.mktemp("rehearsal"))
    command = [sys.executable, "-m", "guardpaint.cli", "recipe", "rehearse", str(PAPER), "--out", str(out)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-3000:]
    return out


@pytest.mark.slow
@pytest.mark.timeout(TIMED)
def test_every_stage_runs(rehearsed):
    found = read_json(rehearsed / "rehearsal.json")
    assert {row["status"] for row in found["stages"]} == {"done"}
    assert found["not_rehearsed"] == ["push"]
    assert sum(row["seconds"] for row in found["stages"]) < 20 * 60
    assert (rehearsed / "results" / "evaluation.json").exists() and (rehearsed / "evaluation" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.timeout(TIMED)
@pytest.mark.parametrize("base", FAMILIES)
def test_the_guard_attaches_to_all_four_families(rehearsed, base):
    from guardpaint.testbed import open_testbed

    guard = GuardPaint.from_pretrained(rehearsed / "guard")
    stock = open_testbed(str(rehearsed / "testbed.yaml")).base(base)
    assert stock.family == FAMILIES[base]
    out = guard.attach(stock.pipe)("a cat by a window", **stock.call)
    assert len(out.safety) == 1 and base in {
        k for k, v in FAMILIES.items() if v in read_json(rehearsed / "rehearsal.json")["families"]
    }


@pytest.mark.slow
@pytest.mark.timeout(TIMED)
def test_a_second_rehearsal_skips_everything(rehearsed):
    engine, _ = rehearsal.prepare(PAPER, rehearsed)
    said: list[str] = []
    engine.say = said.append
    engine.run(engine.chosen())
    assert all("done, neither" in line for line in said), said


@pytest.mark.slow
@pytest.mark.timeout(TIMED)
def test_without_any_one_output_its_consumer_is_refused(rehearsed):
    """bench/recipe.py shows the same for the commands without the engine."""
    engine, _ = rehearsal.prepare(PAPER, rehearsed)
    found = rehearsal.break_chain(engine)
    assert len(found) > 40 and all(b.detected for b in found), [b for b in found if not b.detected]
