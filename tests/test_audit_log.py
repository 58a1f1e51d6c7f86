"""The audit trail: what tampering it finds, and what a replay recomputes."""

from __future__ import annotations

import json

import pytest
from helpers import bright_guard, call

from guardpaint.audit_log import AuditLog, read_entries, replay, verify_log
from guardpaint.errors import AuditLogError


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
    with pytest.raises(AuditLogError, match="not appending"):
        AuditLog(path, key=b"secret")


def test_one_chain_per_process(tmp_path):
    with AuditLog(tmp_path / "a.jsonl"), pytest.raises(AuditLogError, match="in use"):
        AuditLog(tmp_path / "a.jsonl")


def test_prompts_are_hashed_unless_asked_for(written):
    path, _ = written
    assert b"secret prompt" not in path.read_bytes()
    report = read_entries(path)[0][1]["report"]
    assert len(report["prompt_sha256"]) == 64 and report["posture"]["audited_steps"]


def test_replay_recomputes_every_decision(written):
    path, _ = written
    reports = [e["report"] for _, e, _ in read_entries(path)]
    tournaments = [t for r in reports for s in r["steps"] for t in s["tournaments"]]
    assert tournaments and all(replay(r) == [] for r in reports)
    changed = json.loads(json.dumps(reports[0]))
    t = next(t for s in changed["steps"] for t in s["tournaments"] if t["winner"] is not None)
    t["candidates"][t["winner"]]["scores"]["S"] = 0.0
    assert any("utility" in p for p in replay(changed)) and any("winner" in p for p in replay(changed))
