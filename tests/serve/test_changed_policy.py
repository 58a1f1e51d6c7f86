"""A policy that was changed over the API: kept over a restart, said aloud, never lost or replaced in silence."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from fastapi.testclient import TestClient
from services import BAD, CALL, KEYS, OPERATOR, bearer

from guardpaint.errors import BadConfig
from guardpaint.guard import GuardPaint
from guardpaint.loop.audit_log import AuditLog, verify_log
from guardpaint.policy import Policy
from guardpaint.serve.app import create_app
from guardpaint.serve.records import PolicyFile, Records
from guardpaint.serve.service import Service
from guardpaint.serve.settings import Settings
from guardpaint.serve.worker import Worker
from guardpaint.testing import small
from guardpaint.testing.doubles import FlagsBright, PaintsFlat

CONFIGURED = Policy.default()
STRICT = replace(CONFIGURED, trigger=0.05)


@pytest.fixture
def start(tmp_path):
    """Starts a service anew, with the same log and the same state folder; what ran before is stopped."""
    running = []

    def stop():
        while running:
            test, log = running.pop()
            test.__exit__(None, None, None)
            log.close()

    def begin(state=True):
        stop()
        log = AuditLog(tmp_path / "audit.jsonl")
        guard = GuardPaint(FlagsBright(gain=1.2), PaintsFlat(), audit_log=log)
        file = PolicyFile(tmp_path / "policy.json") if state else None
        limits = Settings(keys=KEYS)
        try:
            worker = Worker(guard, small.pipeline("sd"), CALL, limits, file)
        except BaseException:
            log.close()
            raise
        test = TestClient(create_app(Service(worker, "tiny-sd", limits, BAD)))
        test.__enter__()
        running.append((test, log))
        return test

    yield begin
    stop()


def policy_of(test):
    return Policy.from_dict(test.get("/v1/policy", headers=bearer(OPERATOR)).json())


def change(test, policy=STRICT):
    return test.put("/v1/policy", json=policy.to_dict(), headers=bearer(OPERATOR))


def test_a_changed_policy_outlasts_a_restart(start, tmp_path):
    test = start()
    assert test.get("/ready").json()["policy"] == "as configured"
    answer = change(test)
    assert answer.status_code == 200 and answer.json()["note"] == "changed over the API; a restart keeps it"
    test = start()
    assert policy_of(test) == STRICT and "changed over the API" in test.get("/ready").json()["policy"]
    worker = test.app.state.service.worker
    assert worker.guard.policy == STRICT and worker.records.restored.by == "olga"
    events = [json.loads(line)["event"] for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [e["policy_sha256"] for e in events] == [STRICT.digest()] * 2 and "restored" in events[1]
    assert verify_log(tmp_path / "audit.jsonl").ok
    change(test, CONFIGURED)
    assert test.get("/ready").json()["policy"] == "as configured" and policy_of(start()) == CONFIGURED


def test_without_a_place_to_keep_it_the_answer_says_so(start):
    test = start(state=False)
    note = change(test).json()["note"]
    assert "a restart goes back to the configured one" in note and test.get("/ready").json()["policy"] == note
    assert policy_of(start(state=False)) == CONFIGURED


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"policy": {}}', "another trigger", "no hash"])
def test_a_kept_policy_that_cannot_be_read_stops_the_start(start, tmp_path, damage):
    change(start())
    path = tmp_path / "policy.json"
    data = json.loads(path.read_text())
    if damage == "another trigger":
        data["policy"]["trigger"] = 0.9
        path.write_text(json.dumps(data))
    elif damage == "no hash":
        del data["sha256"]
        path.write_text(json.dumps(data))
    else:
        path.write_text(damage)
    with pytest.raises(BadConfig, match="cannot be read .*move it away to go back to the configured policy"):
        start()


def test_a_change_that_cannot_be_kept_is_not_made(start, tmp_path, monkeypatch):
    test = start()

    def full(path, value):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("guardpaint.serve.records.write_json", full)
    assert change(test).status_code == 503 and policy_of(test) == CONFIGURED
    assert (tmp_path / "audit.jsonl").read_text() == ""


def test_a_change_that_cannot_be_logged_is_not_kept(start, tmp_path):
    test = start()
    change(test)
    before = (tmp_path / "policy.json").read_text()
    test.app.state.service.worker.records.log.close()
    assert change(test, replace(STRICT, trigger=0.45)).status_code == 503
    assert json.loads((tmp_path / "policy.json").read_text()) == json.loads(before)


def test_another_configured_policy_is_a_choice(tmp_path):
    file = PolicyFile(tmp_path / "policy.json")
    file.restore(CONFIGURED)
    file.write(STRICT, "olga")
    file.write(replace(STRICT, trigger=0.06), "olga")
    other = replace(CONFIGURED, name="other", trigger=0.3)
    for same in (CONFIGURED, replace(STRICT, trigger=0.06)):
        assert PolicyFile(file.path).restore(same).policy.trigger == 0.06
    with pytest.raises(BadConfig, match="'other' is configured, but olga .*--changed-policy keep .*discard"):
        Records(policy_file=PolicyFile(file.path)).restore(other)
    assert Records(policy_file=PolicyFile(file.path)).restore(other, "keep").trigger == 0.06
    assert Records(policy_file=PolicyFile(file.path)).restore(other).trigger == 0.06, "the choice is remembered"
    with pytest.raises(BadConfig, match="two policies"):
        Records(policy_file=PolicyFile(file.path)).restore(CONFIGURED)
    records = Records(policy_file=PolicyFile(file.path))
    assert records.restore(CONFIGURED, "discard") == CONFIGURED and not records.restored
    assert not file.path.exists() and len(list(tmp_path.glob("policy-discarded-*.json"))) == 1
    assert Records(policy_file=PolicyFile(file.path)).restore(other) == other


def test_a_kept_policy_that_the_guard_does_not_fit_stops_the_start(start, tmp_path):
    five = Policy.load("configs/policies/five-categories.yaml")
    file = PolicyFile(tmp_path / "policy.json")
    file.restore(CONFIGURED)
    file.write(five, "olga")
    with pytest.raises(BadConfig, match="the guard knows"):
        start()
    file.write(replace(CONFIGURED, last_resort=("keep",)), "olga")
    with pytest.raises(BadConfig, match="last_resort ends in keep"):
        start()


def test_where_it_is_kept(tmp_path):
    from guardpaint.serve.start import Options, open_policy_file

    options = Options("tiny-sd", None, None, "127.0.0.1", 0, None, 1, 1, False, None, None, None, None)
    assert open_policy_file(options) is None
    beside = replace(options, audit_log=tmp_path / "audit.jsonl")
    assert open_policy_file(beside).path == tmp_path / "audit-policy.json"
    assert open_policy_file(replace(beside, state=tmp_path / "s")).path == tmp_path / "s" / "policy.json"
