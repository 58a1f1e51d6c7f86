"""Entry points of other packages: whatever breaks in them is an error of ours that names them, and stops nothing else."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import EntryPoint

import pytest
import typer
from typer.testing import CliRunner

from guardpaint.bases import load_base
from guardpaint.errors import BadPlugin, MissingPackage
from guardpaint.store import plugins

main = importlib.import_module("guardpaint.cli.main")  # the package's own `main` is the function
MODULES = {
    "their_ruin": "raise RuntimeError('no [licence] key')",
    "their_lack": "import a_package_that_is_not_there",
    "their_tools": """
import typer
NUMBER = 5
good = typer.Typer()

@good.command()
def hello():
    typer.echo("hello")

@good.command()
def bye():
    typer.echo("bye")
""",
}
COMMANDS = {
    "good": "their_tools:good",
    "number": "their_tools:NUMBER",
    "absent": "their_tools:absent",
    "ruin": "their_ruin:app",
    "lack": "their_lack:app",
}


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Pretend that installed packages register these commands, and a base that breaks on import."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    found = {
        plugins.COMMANDS: {name: EntryPoint(name, value, plugins.COMMANDS) for name, value in COMMANDS.items()},
        plugins.BASES: {"ruin": EntryPoint("ruin", "their_ruin:base", plugins.BASES)},
    }
    original = plugins.registered
    monkeypatch.setattr(plugins, "registered", lambda group: found.get(group) or original(group))
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


def test_a_base_that_breaks_on_import_names_entry_point_and_package(packages):
    with pytest.raises(
        BadPlugin, match=r"base 'ruin'.*ruin = their_ruin:base of the package `their_ruin`.*no \[licence"
    ):
        load_base("ruin")
    with pytest.raises(MissingPackage, match="their_lack.*No module named 'a_package_that_is_not_there'.*pip install"):
        plugins.load(plugins.COMMANDS, "lack", "the command 'lack'")


def test_the_package_is_the_distribution_that_registers_it():
    point = plugins.registered(plugins.GUARDS)["embedded"]
    assert plugins.package_of(point) in ("paperdolls", "guardpaint-paperdolls")


def test_broken_commands_are_said_and_all_others_work(packages, monkeypatch, capsys):
    app = typer.Typer()
    app.command("doctor")(lambda: typer.echo("as ever"))
    monkeypatch.setattr(main, "app", app)
    main.add_plugins()
    said = " ".join(capsys.readouterr().err.split())
    for name in ("number", "absent", "ruin", "lack"):
        assert f"the command '{name}'" in said and COMMANDS[name] in said
    assert "no [licence] key" in said
    assert "as ever" in CliRunner().invoke(app, ["doctor"]).output
    assert "hello" in CliRunner().invoke(app, ["good", "hello"]).output
