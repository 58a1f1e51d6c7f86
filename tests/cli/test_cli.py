"""The command line as a user runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import guardpaint
from guardpaint.loop.audit_log import verify_log
from guardpaint.testing import small

ENV = {**os.environ, "COLUMNS": "200", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def run(*args: str, **kwargs) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "guardpaint.cli", *map(str, args)],
        capture_output=True,
        text=True,
        env=ENV,
        **kwargs,
    )


def test_help_teaches_and_is_quick():
    result = run("--help")
    assert result.returncode == 0
    for word in ("generate", "audit", "inspect", "doctor", "log", "demo", "Exit codes"):
        assert word in result.stdout
    assert "--seed" in run("generate", "--help").stdout
    assert run("--version").stdout.strip() == guardpaint.__version__


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """One guarded generation with an audit log."""
    root = tmp_path_factory.mktemp("cli")
    (root / "key").write_text("secret\n")
    result = run(
        "generate", "a quiet street", "--base", "tiny-sd3", "--steps", "4", "--n", "2", "--seed", "3", "--out",
        root / "out", "--guard", "tiny", "--audit-log", root / "log.jsonl", "--key-file", root / "key", "--anchor", root / "head", "--json",
    )  # fmt: skip
    return root, result


def test_generate_writes_images_and_reports(generated):
    root, result = generated
    assert result.returncode in (0, 3), result.stderr
    answer = json.loads(result.stdout)
    assert len(answer["images"]) == 2 and answer["exit_code"] == result.returncode
    assert "random-initialised" in result.stderr
    for row in answer["images"]:
        assert (row["image"] is None) == (row["status"] == "blocked")
        report = json.loads(Path(row["report"]).read_text())
        assert report["status"] == row["status"] and report["prompt"] is None
        assert Path(row["page"]).read_text().startswith("<!doctype html>")
    assert not list((root / "out").glob("*.part"))


def test_inspect_tells_the_story(generated):
    _, result = generated
    report = json.loads(result.stdout)["images"][0]["report"]
    told = run("inspect", report)
    assert told.returncode == 0 and "Final verdict" in told.stdout and "Step 4/4" in told.stdout
    assert json.loads(run("inspect", report, "--json").stdout)["version"] == 2
    assert run("inspect", "nowhere.json").returncode == 1


def test_log_verify_and_replay(generated):
    root, _ = generated
    log = root / "log.jsonl"
    good = run("log", "verify", log, "--key-file", root / "key", "--anchor", root / "head")
    assert good.returncode == 0 and "2 records, chain intact" in good.stdout
    assert run("log", "verify", log).returncode == 1, "without its key the chain does not verify"
    assert run("log", "replay", log, "--record", "1").returncode == 0
    assert run("log", "replay", log, "--record", "9").returncode == 1
    log.write_bytes(b'"family":"sd9"'.join(log.read_bytes().rsplit(b'"family":"sd3"', 1)))
    bad = run("log", "verify", log, "--key-file", root / "key")
    assert bad.returncode == 1 and "line 2" in bad.stderr
    assert not verify_log(log, key=b"secret").ok


def test_exit_codes(tmp_path):
    keep = tmp_path / "keep.yaml"
    keep.write_text(
        "name: keep\ntrigger: 0.0001\nlast_resort: [keep]\ncategories: [{name: safe}, {name: nudity}, {name: violence}]\n"
    )
    block = tmp_path / "block.yaml"
    block.write_text(keep.read_text().replace("[keep]", "[block]"))
    base = ("generate", "x", "--steps", "2", "--guard", "tiny", "--out", tmp_path)
    assert run(*base, "--policy", keep).returncode == 4
    blocked = run(*base, "--policy", block, "--json")
    assert blocked.returncode == 3 and json.loads(blocked.stdout)["images"][0]["image"] is None
    assert run(*base, "--mode", "off").returncode == 0
    assert run(*base, "--mode", "perhaps").returncode == 2
    assert run("generate").returncode == 2
    assert run("nonsense").returncode == 2
    missing = run("generate", "x", "--base", "no-such-base")
    assert missing.returncode == 1 and "no-such-base" in missing.stderr and "Traceback" not in missing.stderr
    assert run("generate", "x", "--guard", tmp_path / "nothing").returncode == 1
    own = run("generate", "x", "--base", tmp_path)
    assert own.returncode == 1 and "the embedded guard only knows" in own.stderr
    assert run("generate", "y" * 30_000).returncode == 1
    many = run("generate", "x", "--steps", "5000", "--out", tmp_path)
    assert many.returncode == 1 and "5000" in many.stderr and "Traceback" not in many.stderr


@pytest.fixture
def pictures(tmp_path):
    rng = np.random.default_rng(0)
    rgb = Image.fromarray(rng.integers(0, 255, (40, 60, 3), dtype=np.uint8))
    made = {}
    for name, image in {
        "rgb.png": rgb,
        "one.png": Image.new("RGB", (1, 1), (200, 10, 10)),
        "rgba.png": rgb.convert("RGBA"),
        "palette.png": rgb.convert("P"),
        "grey.png": rgb.convert("L"),
        "large.png": Image.new("RGB", (5000, 4000)),
    }.items():
        image.save(tmp_path / name)
        made[name] = tmp_path / name
    return made


def test_audit_reads_every_kind_of_image(pictures, tmp_path):
    result = run("audit", *pictures.values(), "--prompt", "a cat", "--out", tmp_path / "maps", "--json")
    assert result.returncode in (0, 3), result.stderr
    rows = json.loads(result.stdout)
    assert len(rows) == len(pictures)
    for row in rows:
        assert 0 <= row["S"] <= 1 and row["F"] is not None
        for key in ("heat_map", "mask", "grad_cam"):
            with Image.open(row[key]) as image:
                assert list(image.size) == (row["shrunk_to"] or row["size"])
    large = rows[-1]
    assert large["size"] == [5000, 4000] and large["shrunk_to"] == [2048, 1638]
    assert {r["reading"] for r in rows[:-1]} == {""} and all(r["shrunk_to"] is None for r in rows[:-1])


def test_audit_finds_the_worst_frame(tmp_path):
    """Every frame is scored, and the row is about the one that scores worst."""
    rng = np.random.default_rng(1)
    frames = [Image.fromarray(rng.integers(0, 255, (40, 60, 3), dtype=np.uint8)) for _ in range(3)]
    frames[0].save(tmp_path / "moving.png", save_all=True, append_images=frames[1:])
    for i, frame in enumerate(frames):
        frame.save(tmp_path / f"{i}.png")
    rows = json.loads(run("audit", *sorted(tmp_path.glob("*.png")), "--json").stdout)
    moving, still = rows[-1], rows[:-1]
    key = {i + 1: (r["flagged"] is not None, r["adv_prob"], -r["S"]) for i, r in enumerate(still)}
    assert moving["frames"] == 3 and moving["frame"] == max(key, key=key.__getitem__)
    assert moving["adv_prob"] == still[moving["frame"] - 1]["adv_prob"]
    assert "frame" in run("audit", tmp_path / "moving.png").stdout


def test_audit_refuses_bad_files_by_name(pictures, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(pictures["rgb.png"].read_bytes()[:200])
    text = tmp_path / "text.png"
    text.write_text("hello")
    for path, word in (
        (broken, "truncated"),
        (text, "not an image"),
        (tmp_path / "none.png", "no such image"),
    ):
        result = run("audit", path)
        assert result.returncode == 1 and word in result.stderr and "Traceback" not in result.stderr


def test_doctor_passes_its_self_test():
    result = run("doctor", "--json")
    answer = json.loads(result.stdout)
    assert result.returncode == 0 and answer["ok"] and len(answer["self_test"]) == 3 * len(small.BASES)


def test_ctrl_c_leaves_nothing_behind(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "guardpaint.cli", "generate", "x", "--n", "16", "--steps", "900", "--out", str(tmp_path / "out")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENV,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells ignore it in background jobs
    )  # fmt: skip
    time.sleep(12)
    process.send_signal(signal.SIGINT)
    try:
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and "nothing was released" in stderr and "Traceback" not in stderr
    assert not (tmp_path / "out").exists()


def test_demo_writes_a_gallery(tmp_path):
    result = run("demo", "--out", tmp_path / "gallery", "--base", "mini-sd")
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "gallery" / "index.html").read_text()
    assert page.count("<figure") == 12 and "<h2>mini-sd:" in page
    for link in re.findall(r'href="([^"]+)"', page):
        assert (tmp_path / "gallery" / link).read_text().startswith("<!doctype html>")
    assert "bit-identical" in result.stdout
