"""Every command that asks something of a world, on a YAML testbed and with imports of `paperdolls` blocked.

It does its work, or it names what is missing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from guardpaint.cli.evaluate import app

HERE = Path(__file__).parent
WORKS = {
    "attack pgj": "pgj on first: ",
    "attack daca": "daca on first: ",
    "attack sneakyprompt": "of 1 prompts succeed behind the filter",
    "attack ring_a_bell": "of 1 prompts succeed behind the filter",
    "prompts": "table, 24 prompts: 24 unknown",
    "run benign": "benign: 4 new of 4",
    "run attack": "pgj: 2 new of 2",
    "run file": "2 new of 2",
    "report": "note: no KID, which needs reference pictures to compare distributions with",
    "fid": ".",
    "corpus-auditor": "clean.accuracy",
    "proposers": "first.uniform.utility",
    "gtp": "| first | No GTP |",
    "moment": "moment.pilot.end.asr",
    "seed-pairs": "seedpairs.auditor.auc_all",
    "over-refusal": "| first.undefended |",
    "rollouts states": "states",
    "rollouts play": "1 new tournaments",
}
"""Commands that do their work, and what they say."""
MISSING = {
    "attack mma": "whose vocabulary has whole words",
    "run post_hoc_inpaint": "post_hoc_inpaint needs an inpainting model that was not trained for safety",
    "adaptive": "eval adaptive needs pictures with truth masks, which the testbed 'small' does not have",
    "auditor": "eval auditor needs pictures with truth masks, which the testbed 'small' does not have",
    "data views": "needs views of its own pictures to train an auditor on, which the testbed 'small' does not have",
    "data pairs": "needs pairs of its own pictures to train an inpainter on, which the testbed 'small' does not have",
    "inpainter": "eval inpainter needs cases to measure an inpainter on, which the testbed 'small' does not have",
}
"""Commands that need more than this testbed has, and what they name."""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    root = tmp_path_factory.mktemp("without")
    path = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, HERE.parent / "without_dolls.py", root],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        cwd=root,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("command", WORKS)
def test_it_works(said, command):
    code, error, output = said[command]
    assert code == 0 and not error, output
    assert WORKS[command] in " ".join(output.split())


@pytest.mark.parametrize("command", MISSING)
def test_it_names_what_is_missing(said, command):
    _, error, message = said[command]
    assert error == "MissingCapability", message
    assert MISSING[command] in message


def test_without_a_testbed_the_error_says_how_to_install_one(said):
    _, error, message = said["no testbed"]
    assert error == "MissingPackage" and "pip install" in message


@pytest.mark.parametrize("command", ["data ingest", "serve"])
def test_what_asks_the_installed_world_says_how_to_install_it(said, command):
    _, error, message = said[command]
    assert error in ("MissingPackage", "BadInput") and "pip install" in message, message


def test_figures_say_which_rows_they_need(said):
    assert said["figures"][1] == "BadInput" and "no rows of harmful prompts with ours" in said["figures"][2]


def test_no_command_is_forgotten(said):
    """A protocol and the page of labels have tests of their own: they ask for a folder of files, and for a browser."""
    named = {c.name for c in app.registered_commands} - {"protocol", "label"}
    assert named == {name.split()[0] for name in said} - {"no", "data", "rollouts", "serve"}
