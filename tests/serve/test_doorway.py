"""Hosts, origins, headers and the shape of errors."""

from __future__ import annotations

import json

import pytest
from fastapi.testclient import TestClient
from services import BAD, CALL, OPERATOR, bearer, make

from guardpaint.guard import GuardPaint
from guardpaint.serve.app import create_app
from guardpaint.serve.service import Service
from guardpaint.serve.settings import Settings
from guardpaint.serve.worker import Worker
from guardpaint.testing import small
from guardpaint.testing.doubles import AlwaysSafe, PaintsFlat

MARK = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def keyed():
    with TestClient(create_app(make()), raise_server_exceptions=False) as test:
        yield test


@pytest.fixture(scope="module")
def keyless():
    limits = Settings(hosts=("guard.internal",))
    service = Service(
        Worker(GuardPaint(AlwaysSafe(), PaintsFlat()), small.pipeline("sd"), CALL, limits), "m", limits, BAD
    )
    with TestClient(create_app(service), base_url="http://127.0.0.1:8000", raise_server_exceptions=False) as test:
        yield test


# Errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "more", "status", "code"),
    [
        ("GET", f"/{MARK}", {}, 404, "not_found"),
        ("GET", f"/v1/{MARK}", {}, 404, "not_found"),
        ("GET", "/v1/models/", {}, 404, "not_found"),
        ("GET", f"/v1/reports/{MARK}", {}, 404, "not_found"),
        ("GET", "/v1/reports/" + "a" * 5000, {}, 404, "not_found"),
        ("GET", f"/v1/images/{MARK}.png", {}, 404, "not_found"),
        ("DELETE", "/v1/models", {}, 405, "method_not_allowed"),
        ("POST", "/health", {}, 405, "method_not_allowed"),
        ("BREW", "/v1/models", {}, 405, "method_not_allowed"),
        ("POST", "/v1/images/generations", {"content": "{nonsense" + MARK}, 400, "invalid_request"),
        ("POST", "/v1/images/generations", {"content": b"\xff\xfe{"}, 400, "invalid_request"),
        ("POST", "/v1/images/generations", {"content": "[" * 100_000}, 400, "invalid_request"),
        ("POST", "/v1/images/generations", {"content": '{"prompt": "a", "n": ' + "9" * 6000 + "}"}, 400, "invalid_request"),
        ("POST", "/v1/images/generations", {"content": '{"prompt": "\\ud800"}'}, 400, "invalid_request"),
        ("POST", "/v1/images/generations", {"content": '{"prompt": "a", "guidance_scale": NaN}'}, 400, "invalid_request"),
        ("POST", "/v1/images/generations", {"json": {"prompt": "a", MARK: 1}}, 400, "invalid_request"),
        ("POST", "/v1/images/generations", {"json": {"prompt": "a", "x" * 5000: 1}}, 400, "invalid_request"),
        ("POST", "/v1/images/generations", {"json": {"prompt": "a", "size": MARK}}, 400, "invalid_request"),
        ("POST", "/v1/images/generations", {"json": {"prompt": "a", "size": "00x00"}}, 400, "invalid_request"),
        ("POST", "/v1/images/generations", {"json": {"prompt": "a", "size": "08x64"}}, 400, "invalid_request"),
        ("POST", "/v1/images/generations", {"json": {"prompt": "a", "size": "٦٤x٦٤"}}, 400, "invalid_request"),
        ("POST", "/v1/images/generations", {"json": {"prompt": "a", "model": MARK}}, 404, "model_not_found"),
        ("POST", "/v1/images/generations", {"content": "prompt=a", "headers": {"content-type": "text/plain"}}, 400, "invalid_request"),
        ("POST", "/v1/audits", {"content": "x", "headers": {"content-type": "multipart/form-data"}}, 400, "invalid_request"),
        ("POST", "/v1/audits", {"content": "x", "headers": {"content-type": "multipart/form-data; boundary=" + MARK}}, 400, "invalid_request"),
        ("POST", "/v1/audits", {"json": {}}, 400, "invalid_request"),
        ("GET", "/v1/reports/x?html=" + MARK, {}, 400, "invalid_request"),
        ("PUT", "/v1/policy", {"json": {"name": MARK}}, 400, "invalid_request"),
        ("PUT", "/v1/policy", {"content": '{"name": "\\ud800", "categories": [{"name": "safe"}, {"name": "nudity"}]}'}, 400, "invalid_request"),
        ("PUT", "/v1/policy", {"content": '{"trigger": NaN}'}, 400, "invalid_request"),
        ("PUT", "/v1/policy", {"json": [1, 2]}, 400, "invalid_request"),
    ],
)  # fmt: skip
def test_every_error_has_the_same_shape(keyed, method, path, more, status, code):
    headers = {"content-type": "application/json", **bearer(OPERATOR), **more.pop("headers", {})}
    if "json" in more:
        more = {"content": json.dumps(more["json"])}
    answer = keyed.request(method, path, headers=headers, **more)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, code)
    assert answer.json().keys() == {"error"} and {"message", "type", "param", "code"} == error.keys()
    assert "<" not in answer.text and "Traceback" not in answer.text and len(answer.text) < 1500
    assert answer.headers["content-type"] == "application/json" and answer.headers["x-request-id"]
    assert status != 405 or answer.headers["allow"]


def test_an_unexpected_error_has_it_too(monkeypatch):
    service = make()
    monkeypatch.setattr(Service, "jobs", lambda *_: 1 / 0)
    with TestClient(create_app(service), raise_server_exceptions=False) as test:
        answer = test.post("/v1/images/generations", json={"prompt": "a"}, headers=bearer())
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
    assert answer.headers["x-content-type-options"] == "nosniff" and "Zero" not in answer.text


def test_the_schema_promises_no_other_shape(keyed):
    described = keyed.get("/openapi.json").json()
    operations = [o for methods in described["paths"].values() for o in methods.values()]
    assert all("422" not in o["responses"] for o in operations)
    assert "HTTPValidationError" not in json.dumps(described)


def test_refusals_come_before_the_body(keyed):
    def never():
        raise AssertionError("the body was read")
        yield b""

    answer = keyed.post("/v1/images/generations", content=never(), headers={"content-type": "application/json"})
    assert answer.status_code == 401


# Hosts and origins -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200), ("localhost", 200), ("LOCALHOST:8000", 200), ("localhost.:80", 200), ("[::1]:8000", 200),
        ("127.8.9.1", 200), ("guard.internal:8000", 200), ("evil.example", 400), ("evil.example:8000", 400),
        ("127.0.0.1.evil.example", 400), ("localhost.evil.example", 400), ("10.0.0.1", 400), ("", 400), ("[::1", 400),
        ("127.0.0.1@evil.example", 400), ("0x7f000001", 400), ("0.0.0.0", 400),
    ],
)  # fmt: skip
def test_a_name_that_was_pointed_here_is_refused_without_keys(keyless, host, status):
    for method, path in (("GET", "/v1/me"), ("GET", "/")):
        answer = keyless.request(method, path, headers={"host": host})
        assert answer.status_code == status
        assert status == 200 or answer.json()["error"]["code"] == "invalid_host"


def test_with_keys_any_host_is_served_unless_names_are_given(keyed):
    assert keyed.get("/v1/me", headers={**bearer(), "host": "guard.example"}).status_code == 200
    with TestClient(create_app(make(hosts=("guard.example",)))) as test:
        assert test.get("/v1/me", headers={**bearer(), "host": "guard.example"}).status_code == 200
        assert test.get("/v1/me", headers={**bearer(), "host": "other.example"}).status_code == 400


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://127.0.0.1:8000"}, 200),
        ({"origin": "http://127.0.0.1:8000", "sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://127.0.0.1:9000"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
    ],
)
def test_other_sites_change_nothing_without_keys(keyless, headers, status):
    answer = keyless.post("/v1/images/generations", json={"prompt": "a", "seed": 1}, headers=headers)
    assert answer.status_code == status
    assert status == 200 or answer.json()["error"]["code"] == "cross_site"
    assert keyless.get("/v1/me", headers=headers).status_code == 200


# Headers -----------------------------------------------------------------------------------------------------


def test_answers_are_not_sniffed_framed_or_cached(keyed):
    made = keyed.post("/v1/images/generations", json={"prompt": "a", "response_format": "url"}, headers=bearer())
    item = made.json()["data"][0]
    path = item["url"].split("testserver")[1]
    for url in (path, f"/v1/reports/{item['safety']['report']}?html=true", "/", "/v1/me", "/nothing", "/health"):
        answer = keyed.get(url, headers=bearer())
        assert answer.headers["x-content-type-options"] == "nosniff", url
        assert answer.headers["cache-control"] == "no-store" and answer.headers["x-frame-options"] == "DENY"
        policy = answer.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in policy and "default-src 'none'" in policy and "unsafe" not in policy


def test_the_pages_scripts_are_the_only_ones(keyed):
    policy = keyed.get("/").headers["content-security-policy"]
    assert "script-src 'sha256-" in policy and "style-src 'sha256-" in policy
    item = keyed.post("/v1/images/generations", json={"prompt": "a"}, headers=bearer()).json()["data"][0]
    report = keyed.get(f"/v1/reports/{item['safety']['report']}?html=true", headers=bearer())
    assert "script-src" not in report.headers["content-security-policy"]
