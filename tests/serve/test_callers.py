"""Who asked for a picture is in its record: the name of the key and the id of the request."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest
from fastapi.testclient import TestClient
from helpers import bright_guard, call, gen
from services import OPERATOR, OTHER, USER, bearer, make

from guardpaint.errors import BadInput
from guardpaint.guard import GuardPaint
from guardpaint.loop.audit_log import AuditLog, replay, verify_log
from guardpaint.loop.report import load_report, report_schema
from guardpaint.serve.app import create_app
from guardpaint.testing import small
from guardpaint.testing.doubles import AlwaysSafe, PaintsFlat


def test_records_name_the_key_and_the_request(tmp_path):
    path = tmp_path / "log.jsonl"
    guard = GuardPaint(AlwaysSafe(), PaintsFlat(), audit_log=AuditLog(path, key=b"k"))
    with TestClient(create_app(make(guard=guard, batch=4, linger=1.0))) as test:

        def ask(secret):
            return test.post("/v1/images/generations", json={"prompt": "a person", "n": 2}, headers=bearer(secret))

        with ThreadPoolExecutor(2) as pool:
            answers = dict(zip(("ann", "bob"), pool.map(ask, (USER, OTHER)), strict=True))
        expected = {(name, a.headers["x-request-id"]) for name, a in answers.items()}
        rows = [json.loads(line)["report"] for line in path.read_text().splitlines()]
        assert len({r["request_id"] for r in rows}) == 1, "they should share a batch"
        assert {(r["caller"]["key"], r["caller"]["request"]) for r in rows} == expected and len(rows) == 4
        assert USER not in path.read_text() and OTHER not in path.read_text()
        for row in rows:
            jsonschema.validate(row, report_schema())
            assert replay(row) == []
        for name, secret in (("ann", USER), ("bob", OTHER)):
            for item in answers[name].json()["data"]:
                url = f"/v1/reports/{item['safety']['report']}"
                other = {"ann": "bob", "bob": "ann"}[name]
                own = test.get(url, headers=bearer(secret))
                assert own.json()["caller"]["key"] == name and other not in own.text
                assert test.get(url, headers=bearer(OPERATOR)).json()["caller"] == own.json()["caller"]
    assert verify_log(path, key=b"k").ok


def test_records_without_a_caller_still_verify(tmp_path):
    path = tmp_path / "log.jsonl"
    report = call(bright_guard().attach(small.pipeline("sd"))).safety[0].to_dict()
    assert "caller" not in report
    first = {**{k: v for k, v in report.items() if k != "effective_settings"}, "version": 1}
    first["posture"] = report["effective_settings"]
    with AuditLog(path) as log:
        log.append([first, report, {**report, "caller": {"key": "ann", "request": "r"}}])
    assert verify_log(path).ok
    rows = [json.loads(line)["report"] for line in path.read_text().splitlines()]
    assert all(replay(row) == [] for row in rows)
    (tmp_path / "r.json").write_text(json.dumps(rows[2]))
    assert load_report(tmp_path / "r.json")["caller"]["key"] == "ann"


def test_a_caller_is_named_for_each_image():
    twin = bright_guard(gain=0.1).attach(small.pipeline("sd"))
    who = [{"key": "a", "request": "1"}, {"key": "b", "request": "2"}]
    out = call(twin, ["a cat", "a dog"], generator=[gen(1), gen(2)], callers=who)
    assert [r.caller for r in out.safety] == who
    with pytest.raises(BadInput, match="2 callers for 1 images"):
        call(twin, callers=who)
