"""Result files name the revision that was measured, so a checkout with uncommitted changes is refused."""

from __future__ import annotations

import json
import subprocess

import pytest
from typer.testing import CliRunner

from guardpaint.cli.evaluate import app
from guardpaint.errors import BadInput
from guardpaint.store.results import changed_files, git_revision, metric, require_clean, write_results


@pytest.fixture
def checkout(tmp_path):
    """A git checkout with five committed files and one published result."""

    def git(*words):
        identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    for name in "abcde":
        (tmp_path / f"{name}.py").write_text("x = 1\n")
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "results" / "old.json").write_text("{}")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    return tmp_path


def write(path):
    write_results(path, {"a": metric(1.0, 2)}, [{"x": 1}, {"x": 2}], seed=3)


def test_a_clean_checkout_gets_its_results_more_than_once(checkout):
    """Long commands write their file several times; result files are no changes of the code."""
    path = checkout / "docs" / "results" / "old.json"
    write(path)
    write(path)
    data = json.loads(path.read_text())
    assert data["seed"] == 3 and data["metrics"] == {"a": {"value": 1.0, "n": 2}}
    assert (path.parent / data["raw"]).exists()
    assert changed_files(checkout) == [] and not git_revision(checkout).endswith("-dirty")


def test_a_changed_checkout_is_refused_before_the_work(checkout):
    for name in "abcde":
        (checkout / f"{name}.py").write_text("x = 2\n")
    with pytest.raises(BadInput, match=r"\(a.py, b.py, c.py and 2 more\). Commit them first, or write outside docs/re"):
        require_clean(checkout / "docs" / "results" / "new.json")
    assert git_revision(checkout).endswith("-dirty")


def test_a_change_during_the_work_does_not_lose_the_results(checkout):
    (checkout / "b.py").write_text("x = 2\n")
    with pytest.raises(BadInput, match=r"\(b.py\).*kept in .*runs/new.json"):
        write(checkout / "docs" / "results" / "new.json")
    assert not (checkout / "docs" / "results" / "new.json").exists()
    assert json.loads((checkout / "runs" / "new.json").read_text())["seed"] == 3


def test_a_staged_change_counts_and_an_untracked_file_does_not(checkout):
    (checkout / "notes.txt").write_text("later")
    require_clean(checkout / "docs" / "results" / "new.json")
    subprocess.run(["git", "add", "notes.txt"], cwd=checkout, check=True)
    with pytest.raises(BadInput, match="notes.txt"):
        require_clean(checkout / "docs" / "results" / "new.json")


def test_anywhere_else_is_always_allowed(checkout, tmp_path_factory):
    (checkout / "a.py").write_text("x = 2\n")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for path in (checkout / "runs" / "new.json", elsewhere / "docs" / "results" / "new.json"):
        write(path)
        assert path.exists()
    assert git_revision(elsewhere) == "unknown"


def test_a_relative_path_is_that_of_the_working_directory(checkout, monkeypatch):
    (checkout / "a.py").write_text("x = 2\n")
    monkeypatch.chdir(checkout / "docs")
    with pytest.raises(BadInput, match=r"a\.py"):
        require_clean("results/new.json")
    require_clean("new.json")


def test_commands_check_before_they_measure(checkout, monkeypatch):
    """The guard that the command names does not exist: the check comes before it is opened."""
    (checkout / "a.py").write_text("x = 2\n")
    monkeypatch.chdir(checkout)
    words = ["adaptive", "--guard", "missing"]
    refused = CliRunner().invoke(app, words)
    assert isinstance(refused.exception, BadInput) and "uncommitted changes (a.py)" in str(refused.exception)
    elsewhere = CliRunner().invoke(app, [*words, "--results", "runs/adaptive.json"])
    assert elsewhere.exception is not None and "uncommitted" not in str(elsewhere.exception)
