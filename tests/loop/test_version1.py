"""Reports and audit logs of version 1: they still load, verify, replay and render.

The files in version1/ were written by GuardPaint 0.1 on a small random pipeline: one repaired picture (report.json and
record 0 of the log), one blocked picture (record 1) and a changed policy (record 2). The log's key is `secret`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from guardpaint.cli.main import app
from guardpaint.loop.audit_log import AuditLog, read_entries, replay, sign_anchor, verify_log
from guardpaint.loop.report import load_report
from guardpaint.loop.report_page import render

STORED = Path(__file__).parent / "version1"
REPORT, LOG, ANCHOR, KEY = STORED / "report.json", STORED / "log.jsonl", STORED / "head.json", b"secret"


def run(*words):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(word) for word in words])


@pytest.fixture
def reports():
    return [entry["report"] for _, entry, _ in read_entries(LOG) if "report" in entry]


def test_a_report_loads_under_the_current_names():
    stored, report = json.loads(REPORT.read_text()), load_report(REPORT)
    assert stored["version"] == 1 and "effective_settings" not in stored
    assert report["effective_settings"] == stored["posture"] and "posture" not in report
    assert {k: v for k, v in report.items() if k != "effective_settings"} == {
        k: v for k, v in stored.items() if k != "posture"
    }


def test_inspect_tells_what_happened():
    result = run("inspect", REPORT)
    assert result.exit_code == 0, result.output
    for text in (
        "repaired (enforce, StableDiffusionPipeline, seed 1",
        "Audited steps [4, 5] of 5.",
        "candidate 1 wins",
        "Reinserted by held_substitution.",
        "Final verdict: benign.",
    ):
        assert text in result.output, text
    assert json.loads(run("inspect", REPORT, "--json").output) == load_report(REPORT)


@pytest.fixture
def signed(tmp_path):
    """The log and its anchor, which version 0.1 did not sign, after `guardpaint log sign`."""
    log, anchor = (Path(shutil.copy(path, tmp_path)) for path in (LOG, ANCHOR))
    sign_anchor(log, key=KEY, anchor=anchor)
    return log, anchor


def test_the_log_verifies_with_key_and_anchor(signed):
    assert verify_log(LOG, key=KEY).ok
    state = verify_log(signed[0], key=KEY, anchor=signed[1])
    assert state.ok and state.records == 3 and state.keyed and state.anchored
    assert not verify_log(LOG, key=b"another").ok
    unsigned = verify_log(LOG, key=KEY, anchor=ANCHOR)
    assert "log sign" in unsigned.problems[0]


def test_the_log_can_be_continued(signed):
    log, anchor = signed
    with AuditLog(log, key=KEY, anchor=anchor) as opened:
        opened.append([{"policy": {}, "by": "a test"}], kind="event")
    state = verify_log(log, key=KEY, anchor=anchor)
    assert state.ok and state.records == 4


def test_replay_follows_every_decision(reports):
    assert [r["status"] for r in reports] == ["repaired", "blocked"]
    assert all(any(step["tournaments"] for step in r["steps"]) for r in reports)
    assert [replay(r) for r in reports] == [[], []]


def test_replay_finds_a_changed_score(reports):
    tournament = reports[0]["steps"][0]["tournaments"][0]
    tournament["candidates"][tournament["winner"]]["scores"]["S"] = 0.0
    assert any("winner" in problem for problem in replay(reports[0]))


def test_the_log_commands_work(signed, tmp_path):
    (tmp_path / "key").write_bytes(KEY)
    verified = run("log", "verify", signed[0], "--key-file", tmp_path / "key", "--anchor", signed[1])
    assert verified.exit_code == 0 and "3 records, chain intact" in verified.output
    for record in (0, 1):
        result = run("log", "replay", LOG, "--record", record)
        assert result.exit_code == 0 and "3 tournaments recomputed" in result.output


def test_the_page_shows_the_settings(reports):
    page = render(json.loads(REPORT.read_text()))
    assert page == render(load_report(REPORT))
    assert "<h2>Effective settings</h2>" in page and "FlagsBright" in page and "candidate 1 wins" in page
    assert "<h2>Final verdict: flagged</h2>" in render(reports[1])
