"""The audit trail: what tampering it finds, and what a replay recomputes."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from helpers import bright_guard, call

from guardpaint.errors import AuditLogError
from guardpaint.loop.audit_log import AuditLog, read_entries, replay, verify_log


@pytest.fixture
def written(tmp_path, sd_pipe):
    """A keyed, anchored log of three generations with tournaments."""
    path, anchor = tmp_path / "log.jsonl", tmp_path / "head.json"
    with AuditLog(path, key=b"secret", anchor=anchor) as log:
        guard = bright_guard(regions=1)
        guard.audit_log = log
        for seed in range(3):
            call(guard.attach(sd_pipe), "a secret prompt", seed=seed)
    return path, anchor


def test_an_untouched_log_verifies(written):
    path, anchor = written
    state = verify_log(path, key=b"secret", anchor=anchor)
    assert state.ok and state.records == 3 and state.anchored and state.keyed


def rewrite(path, change):
    lines = path.read_bytes().split(b"\n")[:-1]
    path.write_bytes(b"\n".join(change(lines)) + b"\n")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (
            "edit",
            lambda x: [
                x[0],
                x[1]
                .replace(b'"clean"', b'"blurred"')
                .replace(b'"repaired"', b'"clean"')
                .replace(b'"blocked"', b'"clean"'),
                x[2],
            ],
        ),
        ("delete", lambda x: [x[0], x[2]]),
        ("reorder", lambda x: [x[1], x[0], x[2]]),
        ("duplicate", lambda x: [x[0], x[0], x[1], x[2]]),
        ("half a line", lambda x: [x[0], x[1], x[2][:50]]),
    ],
)
def test_tampering_is_found_without_anchor(written, name, change):
    path, _ = written
    rewrite(path, change)
    state = verify_log(path, key=b"secret")
    assert not state.ok and state.problems[0].startswith("line "), name


def test_a_cut_tail_is_found_by_the_anchor_only(written):
    path, anchor = written
    rewrite(path, lambda x: x[:2])
    assert verify_log(path, key=b"secret").ok
    state = verify_log(path, key=b"secret", anchor=anchor)
    assert not state.ok and "cut or replaced" in state.problems[0]


def test_a_forged_chain_is_found_by_the_key(written, tmp_path):
    path, _ = written
    with AuditLog(tmp_path / "forged.jsonl") as forged:
        forged.append([e["report"] for _, e, _ in read_entries(path)])
    assert verify_log(tmp_path / "forged.jsonl").ok
    assert not verify_log(tmp_path / "forged.jsonl", key=b"secret").ok


def test_appending_continues_the_chain_and_refuses_a_broken_one(written):
    path, anchor = written
    with AuditLog(path, key=b"secret", anchor=anchor) as log:
        log.append([{"note": 1}])
    assert verify_log(path, key=b"secret", anchor=anchor).records == 4
    rewrite(path, lambda x: [x[1], x[0]])
    with pytest.raises(AuditLogError, match="nothing is appended"):
        AuditLog(path, key=b"secret")


def test_one_chain_per_process(tmp_path):
    with AuditLog(tmp_path / "a.jsonl"), pytest.raises(AuditLogError, match="in use"):
        AuditLog(tmp_path / "a.jsonl")


def test_prompts_are_hashed_unless_asked_for(written):
    path, _ = written
    assert b"secret prompt" not in path.read_bytes()
    report = read_entries(path)[0][1]["report"]
    assert len(report["prompt_sha256"]) == 64 and report["effective_settings"]["audited_steps"]


def test_replay_recomputes_every_decision(written):
    path, _ = written
    reports = [e["report"] for _, e, _ in read_entries(path)]
    tournaments = [t for r in reports for s in r["steps"] for t in s["tournaments"]]
    assert tournaments and all(replay(r) == [] for r in reports)
    changed = json.loads(json.dumps(reports[0]))
    t = next(t for s in changed["steps"] for t in s["tournaments"] if t["winner"] is not None)
    t["candidates"][t["winner"]]["scores"]["S"] = 0.0
    assert any("utility" in p for p in replay(changed)) and any("winner" in p for p in replay(changed))


def test_reopening_does_not_forget_a_cut_tail(written):
    path, anchor = written
    rewrite(path, lambda x: x[:2])
    with pytest.raises(AuditLogError, match="cut or replaced"):
        AuditLog(path, key=b"secret", anchor=anchor)


def test_a_log_ahead_of_its_anchor_is_whole(written):
    """A crash between the record and the anchor leaves the log one ahead: that is no tampering."""
    path, anchor = written
    behind = anchor.read_bytes()
    with AuditLog(path, key=b"secret", anchor=anchor) as log:
        log.append([{"note": 1}])
    anchor.write_bytes(behind)
    assert verify_log(path, key=b"secret", anchor=anchor).ok
    AuditLog(path, key=b"secret", anchor=anchor).close()


def test_a_lost_anchor_is_noticed(written):
    path, anchor = written
    anchor.unlink()
    with pytest.raises(AuditLogError, match="unreadable"):
        AuditLog(path, key=b"secret", anchor=anchor)


def test_an_anchor_that_cannot_be_written_takes_the_record_back(tmp_path, monkeypatch):
    import guardpaint.loop.log_chain as module

    log = AuditLog(tmp_path / "log.jsonl", anchor=tmp_path / "head")
    log.append([{"n": 0}])

    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_atomic", full)
    with pytest.raises(AuditLogError, match="No space left"):
        log.append([{"n": 1}])
    monkeypatch.undo()
    log.append([{"n": 2}])
    state = verify_log(tmp_path / "log.jsonl", anchor=tmp_path / "head")
    assert state.ok and state.records == 2


def test_replay_checks_the_recorded_gates(written):
    path, _ = written
    report = read_entries(path)[0][1]["report"]
    gate = next(g for s in report["steps"] for t in s["tournaments"] for c in t["candidates"] for g in c["gates"])
    gate["passed"] = not gate["passed"]
    assert any("gates" in p for p in replay(report))


def test_a_log_is_verified_line_by_line(tmp_path):
    """A service verifies its log when it starts, however long that has become."""
    with AuditLog(tmp_path / "long.jsonl") as log:
        log.append([{"n": n, "text": "x" * 20_000} for n in range(1000)])
    tracemalloc.start()
    try:
        state = verify_log(tmp_path / "long.jsonl")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert state.ok and state.records == 1000 and (tmp_path / "long.jsonl").stat().st_size > 20e6
    assert peak < 3e6, peak
