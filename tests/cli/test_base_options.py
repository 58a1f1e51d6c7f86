"""The options with which base models are opened: one set, for every command that opens any."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import typer
from PIL import Image
from testbeds import Bare
from typer.testing import CliRunner

from guardpaint import bases, testbed
from guardpaint.bases import BaseOptions
from guardpaint.cli.common import BASE_OPTIONS
from guardpaint.cli.main import app
from guardpaint.draft.options import LoadOptions, Lora
from guardpaint.store.results import without_tokens
from guardpaint.testing import small

COMMANDS = (
    ["generate"], ["serve"], ["rollouts", "states"], ["data", "views"], ["data", "corpus-views"], ["eval", "run"],
    ["eval", "attack"], ["eval", "adaptive"],
)  # fmt: skip
GIVEN = ["--dtype", "bf16", "--device", "cpu", "--variant", "fp16", "--revision", "v2", "--token", "hf_secret",
         "--offload", "model", "--lora", "style=0.5", "--lora", "other", "--steps", "3", "--guidance", "2.5",
         "--size", "32"]  # fmt: skip
MEANT = BaseOptions(
    LoadOptions("bf16", "cpu", "fp16", "v2", "hf_secret", "model", (Lora("style", 0.5), Lora("other"))), 3, 2.5, 32
)


class Opened(Exception):
    """Carries the options with which a base would have been opened."""


@pytest.fixture
def opened(monkeypatch, tmp_path):
    """Run a command up to the first base that it opens; returns the options that it opens it with."""

    def load(name, options=None):
        raise Opened(name, options)

    class World(Bare):
        def base(self, name, options=None):
            raise Opened(name, options)

        def capability(self, kind):
            return self if kind is testbed.AuditorLessons else None

        def make_views(self, base, out, split, counts, tiny=None, auditor=None, options=None):
            raise Opened(base, options)

    askers = ("guardpaint.testbed", "guardpaint.evaluate.attacks.command")
    stand_ins = {
        "load_base": (load, bases.load_base),
        "open_testbed": (lambda name=None: World(), testbed.open_testbed),
    }
    for module in [importlib.import_module(name) for name in askers]:  # all imported before the first one is changed
        monkeypatch.setattr(module, "open_testbed", stand_ins["open_testbed"][0])
    monkeypatch.setattr(bases, "load_base", load)
    harness = importlib.import_module("guardpaint.evaluate.harness")
    monkeypatch.setattr(harness, "run", lambda asked: [load(base, asked.opening) for base in asked.bases])
    monkeypatch.chdir(tmp_path)

    def run(*words, env=None):
        result = CliRunner().invoke(app, [str(w) for w in words], env=env)
        assert isinstance(result.exception, Opened), (result.output, result.exception)
        return result.exception.args

    yield run
    for module in list(sys.modules.values()):  # a module that was imported meanwhile keeps what it found
        for name, (stand_in, real) in stand_ins.items():
            if getattr(module, name, None) is stand_in:
                setattr(module, name, real)


def commands(folder):
    """Every command that opens a base, with what it cannot do without."""
    guard = folder / "guard"
    if not guard.exists():
        small.guard().save_pretrained(guard)
    return {
        "generate": ["generate", "a cup", "--base", "tiny-sd", "--guard", "tiny"],
        "states": ["rollouts", "states", "tiny-sd", "--guard", guard, "--out", folder / "r"],
        "views": ["data", "views", "tiny-sd", "--out", folder / "v"],
        "corpus-views": ["data", "corpus-views", folder, "--base", "tiny-sd", "--out", folder / "v"],
        "run": ["eval", "run", "benign", "--base", "tiny-sd", "--defence", "undefended", "--out", folder / "e",
                "--n", "1"],
        "attack": ["eval", "attack", "pgj", "--base", "tiny-sd", "--out", folder / "a"],
        "adaptive": ["eval", "adaptive", "--guard", guard, "--base", "tiny-sd", "--results", folder / "x.json"],
    }  # fmt: skip


@pytest.mark.parametrize("name", ["generate", "states", "views", "corpus-views", "run", "attack", "adaptive"])
def test_the_options_reach_the_base(opened, name, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    words = commands(tmp_path)[name]
    assert opened(*words, *GIVEN) == ("tiny-sd", MEANT)
    assert opened(*words) == ("tiny-sd", BaseOptions()), "nothing is chosen for the user"


def test_the_service_passes_the_options_to_the_process_that_draws(monkeypatch):
    start = importlib.import_module("guardpaint.serve.start")
    seen = []
    monkeypatch.setattr(start, "start", lambda options, err: seen.append(options))
    result = CliRunner().invoke(app, ["serve", "--base", "tiny-sd", "--guard", "tiny", *GIVEN])
    assert result.exit_code == 0, result.output
    assert seen[0].opening == MEANT and MEANT in start.recipe(seen[0]).args


def test_a_token_is_taken_from_the_environment_and_never_printed(opened, tmp_path):
    words = commands(tmp_path)["generate"]
    assert opened(*words, env={"HF_TOKEN": "hf_secret\n"})[1].load.token == "hf_secret"
    assert opened(*words, env={"HF_TOKEN": ""})[1].load.token is None
    for command in COMMANDS:
        shown = CliRunner().invoke(app, [*command, "--help"], env={"HF_TOKEN": "hf_secret"}).output
        assert "hf_secret" not in shown and "HF_TOKEN" in shown
    assert without_tokens(["run", "--token", "hf_secret", "--n", "1"]) == ["run", "--token", "…", "--n", "1"]
    assert without_tokens(["--token=hf_secret"]) == ["--token=…"]


def test_every_command_has_every_option_once():
    root = typer.main.get_command(app)
    for path in COMMANDS:
        command = root
        for name in path:
            command = command.commands[name]
        flags = [flag for option in command.params for flag in option.opts]
        assert {f"--{name}" for name in BASE_OPTIONS} <= set(flags) and len(flags) == len(set(flags)), path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dtype", "fp8"], "dtype 'fp8': choose fp32, fp16, bf16"),
        (["--offload", "all"], "offload 'all'"),
        (["--lora", "a=b"], "LoRA 'a=b': 'b' is no scale"),
    ],
)
def test_bad_values_are_named(words, message):
    result = CliRunner().invoke(app, ["generate", "a cup", "--base", "tiny-sd", "--guard", "tiny", *words])
    assert result.exit_code and message in str(result.exception)


def test_generate_draws_as_asked(tmp_path):
    words = ["generate", "a cup", "--base", "tiny-sd", "--guard", "tiny", "--mode", "monitor", "--json",
             "--out", tmp_path, "--steps", "2", "--size", "32", "--guidance", "3", "--dtype", "fp32"]  # fmt: skip
    result = CliRunner().invoke(app, [str(w) for w in words])
    row = json.loads(result.stdout[result.stdout.index("{") :])["images"][0]
    report = json.loads(Path(row["report"]).read_text())
    assert report["effective_settings"]["executed_steps"] == 2
    assert Image.open(row["image"]).size == (32, 32)
