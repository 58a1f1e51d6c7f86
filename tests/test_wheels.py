"""Both packages as wheels, installed into an empty environment: what the docs say runs there too (make test-slow)."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def run(*words: object, **more) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200", **more.pop("env", {})}
    return subprocess.run([*map(str, words)], capture_output=True, text=True, env=env, **more)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("wheels")
    flags = ("-v", "--disable-pip-version-check", "--no-deps", "-w", folder)
    built = run(sys.executable, "-m", "pip", "wheel", *flags, ROOT, ROOT / "packages" / "paperdolls")
    assert built.returncode == 0, built.stderr
    assert "DeprecationWarning" not in built.stdout, "what the build backend prints is shown under -v"
    return {p.name.split("-")[0]: p for p in folder.glob("*.whl")}


@pytest.fixture(scope="module")
def environment(wheels, tmp_path_factory) -> Path:
    """An environment with the wheels and nothing of this checkout."""
    folder = tmp_path_factory.mktemp("environment")
    assert run(sys.executable, "-m", "venv", folder).returncode == 0
    pip = (folder / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check")
    done = run(*pip, "-c", ROOT / "constraints.txt", f"{wheels['guardpaint']}[serve,train]", wheels["paperdolls"])
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def test_sizes(wheels):
    assert wheels["guardpaint"].stat().st_size <= 8e6
    assert wheels["paperdolls"].stat().st_size <= 70e6


def test_a_wheel_holds_each_weight_once(wheels):
    with zipfile.ZipFile(wheels["paperdolls"]) as archive:
        weights = [i for i in archive.infolist() if i.filename.endswith(".safetensors")]
        assert len({i.CRC for i in weights}) == len(weights) > 10
        assert any(n.endswith("assets/links.json") for n in archive.namelist())


def test_the_product_wheel_has_nothing_of_the_world(wheels):
    with zipfile.ZipFile(wheels["guardpaint"]) as archive:
        weights = {n for n in archive.namelist() if n.endswith(".safetensors") and "/readouts/" not in n}
        assert weights == {"guardpaint/assets/lpips_alex.safetensors"}
        assert "guardpaint/assets/lpips_alex.LICENSE.txt" in archive.namelist()
        assert not [n for n in archive.namelist() if "paperdolls" in n]


@pytest.mark.parametrize(
    "words",
    [
        ("doctor",),
        ("generate", "a person in a blue coat on the beach", "--out", "out"),
        ("generate", "a person without clothes on the beach", "--base", "mini-sd3-turbo", "--out", "out"),
        ("demo", "--base", "mini-flux", "--out", "gallery"),
        ("train", "--help"),
        ("train", "--list"),
        ("world", "sheet", "world.png"),
        ("eval", "--help"),
        ("data", "--help"),
    ],
    ids=lambda w: " ".join(w[:2]),
)
def test_documented_commands_run_from_the_wheels(environment, tmp_path, words):
    command = environment / "bin" / "guardpaint"
    result = run(command, *words, cwd=tmp_path, env={"GUARDPAINT_CACHE": str(tmp_path / "cache")})
    assert result.returncode == 0, result.stdout[-1500:] + result.stderr[-1500:]


def test_the_product_alone_says_what_is_missing(wheels, environment, tmp_path):
    """The same environment without paperdolls."""
    python = environment / "bin" / "python"
    assert run(python, "-m", "pip", "uninstall", "-q", "-y", "paperdolls").returncode == 0
    result = run(environment / "bin" / "guardpaint", "demo", cwd=tmp_path)
    assert result.returncode == 1 and "pip install paperdolls" in result.stderr, result.stderr
    assert run(environment / "bin" / "guardpaint", "doctor", cwd=tmp_path).returncode == 0
