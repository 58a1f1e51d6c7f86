"""Stages of a model: in order, resumed, each from what came before; plans name what they lack."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch
import yaml
from helpers import small_inpainter
from pictures import small_pairs
from torch import nn
from typer.testing import CliRunner

from guardpaint.cli.main import app
from guardpaint.data.pairs import PairStore
from guardpaint.draft.loading import LORA, load_pipeline
from guardpaint.errors import BadConfig, BadInput
from guardpaint.policy import Policy
from guardpaint.store import plugins
from guardpaint.train import catalogue, stages
from guardpaint.train.engine import Run, finished, fit, load_config, write_card
from guardpaint.train.pair_latents import encode_pairs


@dataclass(frozen=True)
class Shape:
    goal: float = 1.0


def train_line(run: Run, inputs: catalogue.Inputs) -> None:
    """Fits one weight to a goal, from zero or from an earlier line."""
    shape, config = load_config(run.config_file, Shape)
    net, warm = nn.Linear(1, 1, bias=False), inputs.optional("warm")
    net.load_state_dict(torch.load(warm / "weights.pt") if warm else {"weight": torch.zeros(1, 1)})
    fitted = fit(
        net, lambda step: torch.ones(1, 1), lambda m, x: {"loss": ((m(x) - shape.goal) ** 2).mean()}, config, run
    )
    note = finished(run.out, config)
    if note is not None:
        (run.out / "model").mkdir()
        torch.save(fitted.state_dict(), run.out / "model" / "weights.pt")
        write_card(run.out, run.command("line", warm=warm), note, warm, views=[str(v) for v in inputs.paths("views")])


TRAIN = {"steps": 3, "batch_size": 1, "learning_rate": 0.1, "warmup": 1, "ema": 0.0, "schedule": "constant"}
LINE = {"trainer": "line", "model": {"goal": 1.0}, "train": TRAIN}
FILE = {
    "about": "A line.",
    "stages": [
        {"name": "first", **LINE},
        {"name": "other", **LINE, "inputs": {"warm": "first"}, "alternative": True},
        {"name": "second", **LINE, "inputs": {"warm": "first"}},
    ],
}


@pytest.fixture
def lines(tmp_path, monkeypatch):
    """A package with a trainer `line`, the models `plain` and `seeing`, and a shipped `plain`."""
    configs, shipped = tmp_path / "configs", tmp_path / "shipped" / "plain"
    configs.mkdir()
    shipped.mkdir(parents=True)
    torch.save({"weight": torch.full((1, 1), 5.0)}, shipped / "weights.pt")
    (configs / "plain.yaml").write_text(yaml.safe_dump(FILE))
    seeing = {"name": "only", **LINE, "inputs": {"warm": "plain", "views": "$views"}}
    stage_of = {"name": "only", **LINE, "inputs": {"warm": "plain/first"}}
    (configs / "seeing.yaml").write_text(yaml.safe_dump({"stages": [seeing]}))
    (configs / "later.yaml").write_text(yaml.safe_dump({"stages": [stage_of]}))
    mine = catalogue.Catalogue(
        configs,
        lambda: {"line": catalogue.Trainer(train_line, Shape, takes=("warm", "views"))},
        lambda name: shipped if name == "plain" else None,
    )
    monkeypatch.setattr(plugins, "registered", lambda group: {"mine": None} if group == plugins.MODELS else {})
    monkeypatch.setattr(plugins, "load", lambda group, name, what: mine)
    return shipped


def weight(path):
    return torch.load(path / "model" / "weights.pt")["weight"].item()


def test_stages_run_in_order_and_start_from_each_other(lines, tmp_path):
    """Adam moves the weight by 0.1 a step: three steps each."""
    messages: list[str] = []
    assert stages.execute(stages.make_plan("plain", tmp_path / "run"), None, messages.append, quiet=True)
    assert weight(tmp_path / "run/first") == pytest.approx(0.3, abs=0.02)
    assert weight(tmp_path / "run/second") == pytest.approx(0.6, abs=0.04)
    assert not (tmp_path / "run/other").exists(), "alternatives run by name only"
    card = json.loads((tmp_path / "run/second/model/card.json").read_text())
    assert card["command"] == f"guardpaint train plain --stage second --out {tmp_path / 'run'}"
    assert card["starts_from"]["command"].endswith(f"--stage first --out {tmp_path / 'run'}")
    assert [line.split(" in ")[0] for line in messages[::2]] == ["first: begins", "second: begins"]


def test_an_interrupted_model_goes_on_and_a_finished_one_is_left_alone(lines, tmp_path):
    plan = stages.make_plan("plain", tmp_path / "run")
    messages: list[str] = []
    for _ in range(5):
        assert not stages.execute(plan, 0.0, messages.append, quiet=True), "one step per call"
    assert (tmp_path / "run/first/model").exists() and not (tmp_path / "run/second/model").exists()
    assert plan.lines()[0].startswith("first [line] finished, skipped")
    assert plan.lines()[1].startswith("second [line] resumes")
    assert stages.execute(plan, None, messages.append, quiet=True)
    whole = stages.make_plan("plain", tmp_path / "whole")
    stages.execute(whole, None, messages.append, quiet=True)
    assert weight(tmp_path / "run/second") == weight(tmp_path / "whole/second")
    before = (tmp_path / "run/second/model/card.json").stat().st_mtime_ns
    messages.clear()
    assert stages.execute(plan, None, messages.append, quiet=True)
    assert messages == ["first: finished, skipped", "second: finished, skipped"]
    assert (tmp_path / "run/second/model/card.json").stat().st_mtime_ns == before


def test_a_run_does_not_change_its_config_on_the_way(lines, tmp_path):
    stages.execute(stages.make_plan("plain", tmp_path / "run"), 0.0, print, quiet=True)
    other = {"stages": [{**FILE["stages"][0], "model": {"goal": 2.0}}]}
    (tmp_path / "plain.yaml").write_text(yaml.safe_dump(other))
    with pytest.raises(BadConfig, match="started with another `model`"):
        stages.execute(stages.make_plan(str(tmp_path / "plain.yaml"), tmp_path / "run"), None, print, quiet=True)


def test_one_stage_by_name_needs_what_it_starts_from(lines, tmp_path):
    plan = stages.make_plan("plain", tmp_path / "run", ["other"])
    with pytest.raises(BadInput, match="stage other starts from stage first, which is not finished"):
        stages.execute(plan, None, print, quiet=True)
    stages.execute(stages.make_plan("plain", tmp_path / "run", ["first"]), None, print, quiet=True)
    assert stages.execute(plan, None, print, quiet=True) and not (tmp_path / "run/second").exists()
    with pytest.raises(BadInput, match="no stage 'third'; it has first, other, second"):
        stages.make_plan("plain", tmp_path / "run", ["third"])


def test_values_come_from_the_command_line(lines, tmp_path):
    lacking = stages.make_plan("seeing", tmp_path / "seeing")
    assert "missing: stage only needs --set views=" in lacking.lines()[0]
    with pytest.raises(BadInput, match="needs --set views="):
        stages.execute(lacking, None, print, quiet=True)
    plan = stages.make_plan("seeing", tmp_path / "seeing", (), {"views": ["a", "b"]})
    assert plan.steps[0].inputs["views"] == ("a", "b") and plan.steps[0].command.endswith("--set views=a --set views=b")
    replaced = stages.make_plan("seeing", tmp_path / "seeing", (), {"views": ["a"], "only.warm": ["elsewhere"]})
    assert replaced.steps[0].inputs["warm"] == ("elsewhere",)
    with pytest.raises(BadInput, match="--set colour: seeing takes views"):
        stages.make_plan("seeing", tmp_path / "seeing", (), {"colour": ["red"]})
    with pytest.raises(BadConfig, match="unknown: colour"):
        stages.make_plan("seeing", tmp_path / "seeing", (), {"only.colour": ["red"], "views": ["a"]})


def test_another_model_is_the_one_trained_beside_or_the_shipped_one(lines, tmp_path):
    warm = lambda: stages.make_plan("seeing", tmp_path / "seeing", (), {"views": ["a"]}).steps[0].inputs["warm"]  # noqa: E731
    assert warm() == (str(lines),)
    later = stages.make_plan("later", tmp_path / "later")
    assert later.steps[0].missing == (
        f"plain/first is not trained yet: guardpaint train plain --stage first --out {tmp_path / 'plain'}",
    )
    stages.execute(stages.make_plan("plain", tmp_path / "plain"), None, print, quiet=True)
    assert warm() == (str(tmp_path / "plain/second/model"),)
    assert stages.make_plan("later", tmp_path / "later").steps[0].inputs["warm"] == (
        str(tmp_path / "plain/first/model"),
    )


def test_the_command(lines, tmp_path):
    run = lambda *words: CliRunner().invoke(app, ["train", *words])  # noqa: E731
    listed = run("--list")
    assert listed.exit_code == 0 and "plain: A line." in listed.output and "sd15-inpaint-safe" in listed.output
    assert "auditor-paper" not in run("plain", "--list").output
    out = str(tmp_path / "run")
    shown = run("plain", "--out", out, "--dry-run")
    assert "first [line] runs: no inputs" in shown.output and not (tmp_path / "run").exists()
    assert run("plain", "--out", out, "--stage", "first", "--minutes", "5").exit_code == 0
    assert (tmp_path / "run/first/model/card.json").exists()
    assert "is not NAME=VALUE" in run("plain", "--set", "views").output
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"model": {}, "train": TRAIN}))
    one = ["stage", "line", "--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "one")]
    assert run(*one, "--set", f"warm={lines}").exit_code == 0
    card = json.loads((tmp_path / "one/model/card.json").read_text())
    assert (
        card["command"].startswith("guardpaint train stage line --config") and f"--set warm={lines}" in card["command"]
    )


def test_an_inpainter_from_pairs_to_one_lora(tmp_path):
    """SFT, then BCO on it, then both as one LoRA that loads onto the inpainter."""
    small_inpainter(tmp_path / "inpainter")
    pipe = load_pipeline(tmp_path / "inpainter")
    for split in ("train", "validation"):
        small_pairs(tmp_path / "pairs", split, {"safe": 2, "nudity": 2, "violence": 2})
    for split in ("train", "validation"):
        encode_pairs(PairStore(tmp_path / "pairs"), split, pipe, Policy.default())
    model = yaml.safe_load((catalogue.CONFIGS / "sd15-inpaint-safe.yaml").read_text())
    for stage in model["stages"][:3]:
        stage["model"] |= {"rank": 2, "checkpointing": False}
        stage["train"] = {"steps": 1, "batch_size": 4, "learning_rate": 0.01, "warmup": 1}
    (tmp_path / "safe.yaml").write_text(yaml.safe_dump(model))
    inputs = {"inpainter": [str(tmp_path / "inpainter")], "pairs": [str(tmp_path / "pairs")]}
    plan = stages.make_plan(str(tmp_path / "safe.yaml"), tmp_path / "run", (), inputs)
    assert stages.execute(plan, None, print, quiet=True)
    assert [
        card["method"]["method"] for card in json.loads((tmp_path / "run/stack/model/card.json").read_text())["stages"]
    ] == ["sft", "bco"]
    pipe.load_lora_weights(tmp_path / "run/stack/model", weight_name=LORA)
    assert pipe.get_active_adapters()
