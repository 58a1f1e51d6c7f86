"""The product without the toy world: imports of `paperdolls` are blocked, and everything else goes on working."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

BLOCKED = "import sys; sys.modules['paperdolls'] = None; "
ENV = {**os.environ, "COLUMNS": "200", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", BLOCKED + code], capture_output=True, text=True, env=ENV)


def command(*words: str) -> subprocess.CompletedProcess:
    return run(f"sys.argv = ['guardpaint', *{words!r}]; from guardpaint.cli import main; main()")


@pytest.mark.parametrize(
    "words",
    [
        ("demo", "--out", "unused"),
        ("generate", "a cat", "--base", "mini-sd"),
        ("generate", "a cat", "--base", "tiny-sd"),
        ("serve", "--base", "mini-sd"),
    ],
    ids=["demo", "named-base", "embedded-guard", "serve"],
)
def test_what_needs_the_world_says_how_to_install_it(words):
    result = command(*words)
    assert result.returncode == 1
    assert "pip install" in result.stderr and "paperdolls" in result.stderr, result.stderr
    assert "Traceback" not in result.stderr


def test_the_embedded_guard_says_how_to_install_it():
    result = run("from guardpaint import GuardPaint; GuardPaint.embedded()")
    assert "MissingPackage" in result.stderr and "pip install" in result.stderr


def test_the_rest_works(tmp_path):
    result = command(
        "generate", "a cat", "--base", "tiny-sd", "--guard", "tiny", "--steps", "3", "--out", str(tmp_path)
    )
    assert result.returncode in (0, 3), result.stderr
    assert list(tmp_path.glob("*.json"))
    assert command("--help").returncode == 0


def test_the_doctor_names_what_is_missing():
    result = command("doctor", "--json")
    assert result.returncode == 0, result.stderr
    assert '"ok": true' in result.stdout
