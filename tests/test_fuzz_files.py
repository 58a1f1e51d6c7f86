"""Strange files end in the package's own errors. FUZZ_INPUTS=10000 makes it as many inputs of every kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from guardpaint.config import GuardConfig
from guardpaint.errors import AuditLogError, BadCheckpoint, BadConfig, GuardPaintError
from guardpaint.guard import GuardPaint
from guardpaint.loop.audit_log import AuditLog
from guardpaint.loop.log_chain import continued_from, line_of, read_anchor, verify_log
from guardpaint.loop.log_replay import replay
from guardpaint.parts.folder import read_settings
from guardpaint.policy import Policy
from guardpaint.store.manifest import ROLES
from guardpaint.testing import small

INPUTS = int(os.environ.get("FUZZ_INPUTS", "100"))


@pytest.fixture(scope="module")
def fuzz_files():
    bench = str(Path(__file__).parents[1] / "bench")
    sys.path.insert(0, bench)
    import fuzz_files

    yield fuzz_files
    sys.path.remove(bench)


def test_strange_files_end_in_our_own_errors(tmp_path):
    """In a process of its own: there annotations are not checked, as in use, and memory is its own."""
    script = Path(__file__).parents[1] / "bench" / "fuzz_files.py"
    command = [sys.executable, str(script), "--n", str(INPUTS), "--seed", "1", "--out", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for name, found in json.loads((tmp_path / "found.json").read_text()).items():
        assert found["inputs"] in (INPUTS, INPUTS // 50) and not found["errors_other"] + found["hangs"], name
        assert INPUTS < 1000 or found["rss_growth_mb"] < 50, (name, found)


def test_the_fuzzing_finds_a_reader_that_is_not_careful(fuzz_files, tmp_path):
    def careless(_, data):
        json.loads(data)["version"]

    found = fuzz_files.measured(lambda s: s.spoilt(b'{"version": 1}'), careless, tmp_path, 100, 0)
    assert found["inputs"] == 100 and found["errors_other"] > 10


# What was found ----------------------------------------------------------------------------------------------

POLICIES = {
    "an aliased bomb": "a: &a [x, x]\nb: &b [*a, *a]\nname: *b\n",
    "merge keys": "categories: [&a {x: 1}, {<<: [*a, *a]}]\n",
    "a date that is none": "name: 2001-99-99\n",
    "a huge hexadecimal number": "trigger: 0x" + "f" * 5000,
    "a huge number": "trigger: " + "9" * 5000,
    "a weight beyond floats": "categories: [{name: safe, weight: 1" + "0" * 400 + "}, {name: nudity}]",
    "deep nesting": "[" * 5000,
    "keys of several types": "a: 1\n1: 2\nnull: 3\n",
    "an object": "name: !!python/object/apply:os.system [true]\n",
    "a name that is a list": "name: [x]\ncategories: [{name: safe}, {name: nudity}]\n",
    "a text for a list": "categories: [{name: safe, exemptions: all}, {name: nudity}]\n",
    "a truth for a number": "trigger: true\ncategories: [{name: safe}, {name: nudity}]\n",
    "too large": "name: x\n" * 20_000,
}


@pytest.mark.parametrize("text", POLICIES.values(), ids=POLICIES)
def test_strange_policies(text, tmp_path):
    path, start = tmp_path / "policy.yaml", time.monotonic()
    path.write_text(text)
    with pytest.raises(BadConfig) as caught:
        Policy.load(path)
    assert len(str(caught.value)) < 2000 and time.monotonic() - start < 10


def test_a_policy_that_is_a_folder(tmp_path):
    with pytest.raises(BadConfig, match="cannot be read"):
        Policy.load(tmp_path)


MANIFESTS = ("[]", "7", '{"version": 1}', "[" * 100_000, "9" * 5000, '{"version": 1, "config": 7}', "\x00")


@pytest.mark.parametrize("text", MANIFESTS, ids=lambda t: t[:20])
def test_strange_manifests(text, tmp_path):
    (tmp_path / "guardpaint.json").write_text(text)
    with pytest.raises(BadCheckpoint):
        read_settings(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("decoders", ["../../elsewhere"], "families are"),
        ("decoders", "sd", "not a list"),
        ("repairer", {"kind": "x" * 9999}, "repairer of kind"),
        ("repairer", "native", "is not kind, source"),
        ("proposer", {"kind": "fixed", "options": {"knobs": {"cfg": "hot"}}}, "cfg must be a number"),
        ("proposer", {"kind": "fixed", "options": {"knobs": {"depth": 10**9}}}, "depth must be a whole number"),
        ("proposer", {"kind": "fixed", "options": {"speed": 3}}, "no option speed"),
        ("auditor", {"kind": "auditor-scorer", "source": "../../elsewhere", "sha256": ""}, "not a folder inside"),
        ("auditor", {"kind": "auditor-scorer", "source": "/tmp", "sha256": ""}, "not a folder inside"),
        ("auditor", {"kind": "auditor-scorer", "source": "auditor"}, "no sha256"),
        ("config", {"retain_evidence": "no"}, "retain_evidence"),
        ("config", {"calibration": 7}, "is a mapping"),
        ("config", {"calibration": {"alpha": 0.1, "beta": 0.1, "data": "", "bands": [{"start": 0, "thresholds": [],
                                    "mask_level": None, "n": {}}]}}, "calibration"),
    ],
)  # fmt: skip
def test_strange_entries_of_a_manifest(guard_folder, key, value, match):
    path = guard_folder / "guardpaint.json"
    sound = path.read_text()
    manifest = json.loads(sound)
    (manifest["parts"] if key in ROLES else manifest)[key] = value
    path.write_text(json.dumps(manifest))
    try:
        with pytest.raises((BadCheckpoint, BadConfig), match=match) as caught:
            GuardPaint.from_pretrained(guard_folder)
        assert len(str(caught.value)) < 3000
    finally:
        path.write_text(sound)


@pytest.fixture(scope="module")
def guard_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guard")
    small.guard().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "change",
    [{"text_dim": 2**40}, {"stage_depths": [10**9]}, {"heads": 0}, {"vocab_size": -1}, {"sizes": "x"}, {"": {}}],
)
def test_an_auditor_of_strange_sizes_takes_no_memory(guard_folder, change):
    path = guard_folder / "auditor" / "config.json"
    sound = path.read_text()
    path.write_text(json.dumps({**json.loads(sound), **change}))
    try:
        start = time.monotonic()
        with pytest.raises((BadCheckpoint, BadConfig)):
            GuardPaint.from_pretrained(guard_folder)
        assert time.monotonic() - start < 20
    finally:
        path.write_text(sound)


def test_settings_that_are_no_mapping():
    for value in ([], None, "x", 7):
        with pytest.raises(BadConfig, match="mapping"):
            GuardConfig.from_dict(value)


FIRST_LINES = (
    {"event": {"rotated_from": {"file": "x" * 300, "seq": 0, "head": "0"}}},
    {"event": {"rotated_from": {"file": "a\x00b", "seq": 0, "head": "0"}}},
    {"event": {"rotated_from": {"file": "a", "seq": float("inf"), "head": "0"}}},
    {"event": {"rotated_from": {"file": "a", "seq": -1, "head": "0"}}},
    {"event": {"rotated_from": "\ud800"}, "hash": "\ud800", "seq": 0, "prev": "0" * 64},
)


@pytest.mark.parametrize("entry", FIRST_LINES, ids=range(len(FIRST_LINES)))
def test_strange_first_records(entry, tmp_path):
    path = tmp_path / "audit.jsonl"
    path.write_text(json.dumps(entry) + "\n")
    assert not verify_log(path).ok
    with pytest.raises(AuditLogError):
        AuditLog(path)


def test_a_record_as_deep_as_a_well(tmp_path):
    path = tmp_path / "audit.jsonl"
    path.write_bytes(b"[" * 200_000 + b"\n")
    assert continued_from(path) is None and not verify_log(path).ok


def test_strange_signatures_of_an_anchor(tmp_path):
    anchor = tmp_path / "head"
    for text in ('{"seq": 0, "head": "%s", "mac": "é"}' % ("0" * 64), "[" * 200_000, '{"seq": 1e999}'):
        anchor.write_text(text)
        with pytest.raises(AuditLogError):
            read_anchor(anchor, b"key")


def test_replay_of_a_record_that_is_no_report(tmp_path):
    for report in ({}, {"steps": 7}, {"steps": [{}]}, {"steps": [{"step": 0, "tournaments": [{"rules": {}}]}]}):
        with pytest.raises(GuardPaintError):
            replay(report)
    assert line_of({"seq": 0}, None)[1]
