"""The service as callers meet it: the official client, errors with their codes, nothing by a side door."""

from __future__ import annotations

import base64
import io
import json
import logging
import pickle
import re
import time

import pytest
import torch
from fastapi.testclient import TestClient
from helpers import serving
from PIL import Image
from services import BAD, CALL, KEYS, OPERATOR, OTHER, USER, bearer, make

from guardpaint.errors import BadConfig, BadInput
from guardpaint.guard import GuardPaint
from guardpaint.loop.audit_log import AuditLog, read_key, verify_log
from guardpaint.policy import Policy
from guardpaint.serve.app import Service, create_app
from guardpaint.serve.jobs import Ask, Cancelled, Job, Overloaded
from guardpaint.serve.limits import Rates
from guardpaint.serve.settings import Key, Settings, load_keys
from guardpaint.serve.worker import Worker
from guardpaint.testing import small
from guardpaint.testing.doubles import AlwaysSafe, AlwaysUnsafe, FlagsBright, PaintsFlat, Raises


@pytest.fixture
def client():
    opened = []

    def open_client(auditor=None, guard=None, **settings):
        app = create_app(make(auditor, guard, **settings))
        test = TestClient(app, raise_server_exceptions=False)
        test.__enter__()
        opened.append(test)
        return test

    yield open_client
    for test in opened:
        test.__exit__(None, None, None)


def ask(test, secret=USER, **body):
    return test.post("/v1/images/generations", json={"prompt": "a person", "seed": 1, **body}, headers=bearer(secret))


def picture(item):
    return Image.open(io.BytesIO(base64.b64decode(item["b64_json"])))


# The API -----------------------------------------------------------------------------------------------------


def test_a_calm_prompt_gets_the_pipelines_own_picture(client):
    answer = ask(client(), n=2)
    assert answer.status_code == 200 and answer.headers["x-request-id"]
    own = small.pipeline("sd")(
        ["a person"] * 2, generator=[torch.Generator().manual_seed(s) for s in (1, 2)], **CALL
    ).images
    data = answer.json()["data"]
    assert [picture(d).tobytes() for d in data] == [i.tobytes() for i in own]
    assert all(d["safety"]["status"] == "clean" and d["safety"]["report"] for d in data)
    assert [d["seed"] for d in data] == [1, 2]


def test_everything_blocked_is_a_400_with_its_code(client):
    answer = ask(client(guard=blocking()))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "content_policy_violation" and error["safety"][0]["status"] == "blocked"


def blocking():
    from dataclasses import replace

    guard = GuardPaint(AlwaysUnsafe(), PaintsFlat())
    return guard.configured(policy=replace(guard.policy, last_resort=("block",)))


class EverySecond(AlwaysSafe):
    """Flags the second picture of every batch."""

    def audit(self, images, prompts, noise):
        found = AlwaysSafe().audit(images, prompts, noise)
        for i, prompt in enumerate(prompts):
            if prompt is not None and prompt.endswith("!"):
                found[i] = AlwaysUnsafe().audit(images[i : i + 1], [prompt], noise)[0]
        return found


def test_a_picture_by_url_is_its_owners(client):
    test = client()
    url = ask(test, response_format="url").json()["data"][0]["url"]
    path = url[url.index("/v1/") :]
    assert test.get(path, headers=bearer()).headers["content-type"] == "image/png"
    assert test.get(path, headers=bearer(OTHER)).status_code == 404
    assert test.get(path, headers=bearer(OPERATOR)).status_code == 200
    assert test.get(path).status_code == 401


def test_reports_are_their_owners(client):
    test = client(FlagsBright(gain=3.0))
    answer = ask(test)
    items = answer.json().get("data") or answer.json()["error"]["safety"]
    name = items[0]["safety"]["report"] if "safety" in items[0] else items[0]["report"]
    assert test.get(f"/v1/reports/{name}", headers=bearer()).json()["version"] == 2
    assert test.get(f"/v1/reports/{name}", headers=bearer(OTHER)).status_code == 404
    assert "<html" in test.get(f"/v1/reports/{name}?html=true", headers=bearer()).text.lower()


def test_what_is_kept_is_bounded_in_bytes_too(client):
    """Of clear evidence 256 reports would take gigabytes."""
    guard = GuardPaint(FlagsBright(gain=3.0), PaintsFlat()).configured(retain_evidence=True)
    test = client(guard=guard, kept_memory=1)
    answers = [ask(test, response_format="url") for _ in range(2)]
    names = [(a.json().get("data") or a.json()["error"]["safety"])[0] for a in answers]
    names = [n["safety"]["report"] if "safety" in n else n["report"] for n in names]
    codes = [test.get(f"/v1/reports/{name}", headers=bearer()).status_code for name in names]
    assert codes == [404, 200], "the newest one stays"


def test_a_report_is_kept_packed(client):
    test = client(FlagsBright(gain=3.0))
    ask(test)
    service = test.app.state.service
    (name,) = service.reports.kept.values
    report, taken = service.report(name, KEYS[USER]), service.reports.kept.bytes
    assert report.evidence and report.steps and taken < 0.4 * len(pickle.dumps(report))
    assert service.worker.guard._reports.most == 1, "the guard keeps none beside the service"


def test_evidence_in_the_clear_is_for_operators(client):
    guard = GuardPaint(FlagsBright(gain=3.0), PaintsFlat()).configured(retain_evidence=True)
    test = client(guard=guard)
    answer = ask(test)
    items = answer.json().get("data") or answer.json()["error"]["safety"]
    name = items[0]["safety"]["report"] if "safety" in items[0] else items[0]["report"]
    assert test.get(f"/v1/reports/{name}?html=true", headers=bearer()).status_code == 403
    assert test.get(f"/v1/reports/{name}?html=true", headers=bearer(OPERATOR)).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"n": 99}, 400, "n=99"),
        ({"n": 0}, 400, "n:"),
        ({"size": "big"}, 400, "size"),
        ({"size": "65x65"}, 400, "size=65x65"),
        ({"num_inference_steps": 5000}, 400, "num_inference_steps=5000"),
        ({"prompt": "x" * 3000}, 413, "3000 characters"),
        ({"prompt": ""}, 400, "prompt"),
        ({"model": "dall-e"}, 404, "dall-e"),
        ({"colour": "red"}, 400, "colour"),
    ],
)
def test_bad_requests_name_what_is_wrong(client, body, status, word):
    answer = ask(client(), **body)
    assert answer.status_code == status and word in answer.json()["error"]["message"]


def test_malformed_and_oversized_bodies(client):
    test = client(largest_body=2000)
    headers = {**bearer(), "content-type": "application/json"}
    assert test.post("/v1/images/generations", content="{nonsense", headers=headers).status_code == 400
    assert test.post("/v1/images/generations", content="x" * 3000, headers=headers).status_code == 413


@pytest.mark.parametrize("secret", ["", "wrong", USER + "x"])
def test_bad_keys_are_refused_everywhere(client, secret):
    test = client()
    for method, path in (("POST", "/v1/images/generations"), ("GET", "/v1/models"), ("POST", "/v1/audits"),
                         ("GET", "/v1/reports/x"), ("GET", "/v1/images/x.png"), ("GET", "/v1/policy")):  # fmt: skip
        answer = test.request(method, path, headers=bearer(secret) if secret else {}, json={"prompt": "a"})
        assert answer.status_code == 401, path


def test_rates_and_queues_say_when_to_come_back(client):
    slow = {**KEYS, USER: Key("ann", per_minute=2)}
    worker = Worker(GuardPaint(AlwaysSafe(), PaintsFlat()), small.pipeline("sd"), CALL, Settings(keys=slow))
    service = Service(worker, "m", Settings(keys=slow), BAD)
    with TestClient(create_app(service)) as test:
        assert ask(test, n=2).status_code == 200
        answer = ask(test)
        assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
    test = client(queue=2)
    answer = ask(test, n=3)
    assert answer.status_code == 503 and answer.headers["retry-after"]


def test_the_official_client_works_unchanged():
    """openai's own package against a real server on loopback."""
    openai = pytest.importorskip("openai")
    with serving(create_app(make(EverySecond()))) as address:
        api = openai.OpenAI(api_key=USER, base_url=f"{address}/v1", max_retries=0)
        assert [m.id for m in api.models.list()] == ["tiny-sd"]
        out = api.images.generate(prompt="a person", n=1, response_format="b64_json", extra_body={"seed": 1})
        assert base64.b64decode(out.data[0].b64_json)[1:4] == b"PNG"
        with pytest.raises(openai.BadRequestError) as caught:
            api.images.generate(prompt="a person!", n=1)
        assert caught.value.code == "content_policy_violation"
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(api_key="wrong", base_url=f"{address}/v1", max_retries=0).models.list()


# Streaming ---------------------------------------------------------------------------------------------------


def events(answer):
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]


def test_partial_pictures_are_blurred_for_ordinary_callers(client):
    guard = GuardPaint(AlwaysSafe(), PaintsFlat()).configured(retain_evidence=True)
    test = client(guard=guard)
    for secret, blurred in ((USER, True), (OPERATOR, False)):
        found = events(ask(test, secret, stream=True))
        partial = [e for e in found if e["type"].endswith("partial_image")]
        assert len(partial) == 2 and all(e["blurred"] is blurred for e in partial)
        assert found[-1]["type"] == "image_generation.completed" and found[-1]["safety"]["status"] == "clean"


def test_audits_are_streamed_as_they_happen(client):
    """Two steps, the last one audited: its score comes before its picture; no stream, no events."""
    found = events(ask(client(FlagsBright(gain=0.1)), stream=True))
    kinds = [e["type"].rsplit(".", 1)[-1] for e in found]
    assert kinds.count("audit") == 1 and kinds.index("audit") < kinds.index("completed")
    audit = found[kinds.index("audit")]
    assert audit["progress"] == 1.0 and not audit["triggered"]
    score = audit["audits"][0]["scores"]["adv_prob"]
    assert 0 <= score <= 1 and score == round(score, 1)


def test_a_blocked_stream_ends_in_an_error_without_a_picture(client):
    found = events(ask(client(guard=blocking()), stream=True))
    assert found[-1]["type"] == "error" and found[-1]["error"]["code"] == "content_policy_violation"
    assert "b64_json" not in found[-1]


def test_a_full_queue_is_an_event_too(client):
    found = events(ask(client(queue=1), n=3, stream=True))
    assert found == [{"type": "error", "status": 503, "error": found[0]["error"]}]


def numbers(value):
    """Every float of a JSON document but those that tell the course of a generation."""
    if isinstance(value, dict):
        return [n for k, v in value.items() if k not in ("progress", "noise") for n in numbers(v)]
    if isinstance(value, list):
        return [n for v in value for n in numbers(v)]
    return [value] if isinstance(value, float) else []


def test_no_fine_score_reaches_an_ordinary_key(client):
    """Neither in the answer nor in the report, as JSON or as a page; operators see them all."""
    test = client(FlagsBright(gain=1.3))
    answer = ask(test).json()
    safety = (answer["data"][0] if "data" in answer else answer["error"])["safety"]
    safety = safety[0] if isinstance(safety, list) else safety
    assert safety["triggered"] and not re.search(r"\d\.\d", safety["reason"])
    own = test.get(f"/v1/reports/{safety['report']}", headers=bearer()).json()
    whole = test.get(f"/v1/reports/{safety['report']}", headers=bearer(OPERATOR)).json()
    assert all(n == round(n, 1) for part in ("steps", "final") for n in numbers(own[part]))
    assert any(n != round(n, 1) for n in numbers(whole["steps"]))
    reasons = [a["reason"] for s in own["steps"] for a in s["audits"]] + [s["reason"] for s in own["steps"]]
    assert any(reasons) and not any(re.search(r"\d\.\d", r) for r in reasons)
    page = test.get(f"/v1/reports/{safety['report']}?html=true", headers=bearer()).text
    fine = whole["steps"][0]["audits"][0]["scores"]["adv_prob"]
    assert f"{fine:.3f}" not in page


# Failing closed ----------------------------------------------------------------------------------------------


def test_a_crashing_auditor_releases_nothing(client):
    answer = ask(client(Raises()))
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "guard_failed"


def test_an_unwritable_log_releases_nothing(client, tmp_path):
    guard = GuardPaint(AlwaysSafe(), PaintsFlat(), audit_log=AuditLog(tmp_path / "log.jsonl"))
    test = client(guard=guard)
    assert ask(test).status_code == 200
    guard.audit_log.close()
    answer = ask(test)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "guard_failed"
    assert answer.headers["retry-after"] and "b64_json" not in answer.text
    policy = test.get("/v1/policy", headers=bearer(OPERATOR)).json()
    change = test.put("/v1/policy", json={**policy, "trigger": 0.9}, headers=bearer(OPERATOR))
    assert change.status_code == 503
    assert test.get("/v1/policy", headers=bearer(OPERATOR)).json() == policy


def test_a_changed_policy_is_on_record(client, tmp_path):
    path = tmp_path / "log.jsonl"
    test = client(guard=GuardPaint(AlwaysSafe(), PaintsFlat(), audit_log=AuditLog(path)))
    ask(test)
    policy = test.get("/v1/policy", headers=bearer(OPERATOR)).json()
    assert test.put("/v1/policy", json={**policy, "trigger": 0.9}, headers=bearer(OPERATOR)).status_code == 200
    ask(test)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert ["report" in r for r in rows] == [True, False, True]
    changed = {**policy, "trigger": 0.9}
    digest = Policy.from_dict(changed).digest()
    assert rows[1]["event"] == {"by": "olga", "policy": changed, "policy_sha256": digest}
    assert verify_log(path).ok


# Operations --------------------------------------------------------------------------------------------------


def test_health_and_readiness(client):
    strict, blind = client(FlagsBright(gain=3.0)), client(AlwaysSafe())
    assert strict.get("/health").json() == {"status": "ok"} and strict.get("/ready").status_code == 200
    assert blind.get("/ready").status_code == 503


def test_metrics_count_what_happened(client):
    test = client(guard=blocking())
    ask(test)
    text = test.get("/metrics", headers=bearer(OPERATOR)).text
    assert 'guardpaint_pictures_total{status="blocked"} 1.0' in text
    assert 'guardpaint_triggers_total{category="nudity"} 1.0' in text
    assert "guardpaint_audit_score_bucket" in text and "guardpaint_queue_depth 0.0" in text


def test_pictures_are_counted_before_they_are_answered(client):
    """Whoever has the answer finds the picture in /metrics, on a busy machine too."""
    test = client(guard=blocking())
    worker = test.app.state.service.worker
    counted, seen = worker.on_batch, []

    def count(batch, reports, seconds):
        seen.append([job.future.done() for job in batch])
        counted(batch, reports, seconds)

    worker.on_batch = count
    ask(test)
    assert seen == [[False]]


def test_a_policy_is_changed_without_a_restart(client):
    test = client(FlagsBright())
    policy = test.get("/v1/policy", headers=bearer(OPERATOR)).json()
    assert test.get("/v1/policy", headers=bearer()).status_code == 403
    assert test.put("/v1/policy", json={**policy, "trigger": 0.0}, headers=bearer()).status_code == 403
    before = ask(test)
    changed = test.put(
        "/v1/policy", json={**policy, "trigger": 0.001, "last_resort": ["block"]}, headers=bearer(OPERATOR)
    )
    assert changed.status_code == 200
    after = ask(test)
    assert before.status_code == 200 and after.status_code == 400
    assert test.put("/v1/policy", json={"x": 1}, headers=bearer(OPERATOR)).status_code == 400


def upload(test, image, secret=USER, **data):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    files = {"image": ("a.png", buffer.getvalue(), "image/png")}
    return test.post("/v1/audits", files=files, data=data, headers=bearer(secret))


def test_uploads_are_audited(client):
    test = client(FlagsBright())
    half = Image.new("RGB", (64, 64), (150, 150, 150))
    half.paste((255, 255, 255), (0, 0, 64, 30))
    bright, dark = upload(test, half).json(), upload(test, Image.new("RGB", (64, 64)), prompt="night").json()
    assert bright["flagged"] and bright["boxes"] and not dark["flagged"] and dark["boxes"] == []
    exact = upload(test, half, OPERATOR).json()
    assert bright["overlay"] is None and exact["overlay"]
    assert all(v == round(v, 1) for v in bright["probs"].values()) and exact["probs"] != bright["probs"]
    wrong = test.post("/v1/audits", files={"image": ("a.png", b"no image")}, headers=bearer())
    assert wrong.status_code == 400 and "not an image" in wrong.json()["error"]["message"]


# The worker --------------------------------------------------------------------------------------------------


def jobs(count, steps=2, prompt="a person"):
    return [Job(prompt, i, Ask(steps, 3.0, (small.PIXELS, small.PIXELS)), "ann") for i in range(count)]


def test_compatible_pictures_are_drawn_together():
    worker = Worker(GuardPaint(AlwaysSafe(), PaintsFlat()), small.pipeline("sd"), CALL, Settings(batch=3, linger=0.3))
    mixed = [*jobs(2), *jobs(1, steps=1), *jobs(1)]
    worker.submit(mixed)
    for job in mixed:
        job.future.result(60)
    assert worker.batches == 2
    worker.close()


def test_batching_changes_no_decision():
    """A flagged picture and a calm one in one batch: each has its own fate."""
    from dataclasses import replace

    guard = GuardPaint(EverySecond(), PaintsFlat())
    guard = guard.configured(policy=replace(guard.policy, last_resort=("block",)))
    worker = Worker(guard, small.pipeline("sd"), CALL, Settings(batch=2, linger=0.3))
    pair = [*jobs(1), *jobs(1, prompt="a person!")]
    worker.submit(pair)
    calm, flagged = (j.future.result(60) for j in pair)
    assert worker.batches == 1 and calm.report.status == "clean" and calm.image is not None
    assert flagged.report.status == "blocked" and flagged.image is None
    worker.close()


def test_pictures_nobody_waits_for_are_not_finished():
    worker = Worker(GuardPaint(AlwaysSafe(), PaintsFlat()), small.pipeline("sd"), CALL, Settings(linger=0.0))
    (long,) = jobs(1, steps=900)
    worker.submit([long])
    time.sleep(0.3)
    long.gone.set()
    began = time.monotonic()
    with pytest.raises(Cancelled):
        long.future.result(30)
    assert time.monotonic() - began < 20
    worker.close()


def test_closing_fails_what_waits_and_takes_nothing_new():
    worker = Worker(GuardPaint(AlwaysSafe(), PaintsFlat()), small.pipeline("sd"), CALL, Settings(batch=1, linger=0.0))
    many = jobs(4, steps=8)
    worker.submit(many)
    time.sleep(0.05)
    worker.close()
    ends = [j.future.exception(10) for j in many]
    assert any(isinstance(e, Overloaded) for e in ends)
    with pytest.raises(Overloaded, match="closing"):
        worker.submit(jobs(1))


def test_rates_refill_steadily():
    now = [0.0]
    rates = Rates(lambda: now[0])
    key = Key("ann", per_minute=60)
    assert rates.take(key, 60) == 0.0 and rates.take(key, 1) == pytest.approx(1.0)
    now[0] = 10.0
    assert rates.take(key, 10) == 0.0 and rates.take(key, 1) > 0


def test_key_files(tmp_path):
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({USER: {"name": "ann"}, OPERATOR: {"name": "olga", "role": "operator"}}))
    assert load_keys(path)[OPERATOR].operator
    for text, word in (("{}", "no keys"), ('{"short": {"name": "x"}}', "shorter than 16"), ("[", "not a key file"),
                       (json.dumps({USER: {"name": "a"}, OTHER: {"name": "a"}}), "'a' has two secrets"),
                       (json.dumps({USER: {"name": "a", "role": "king"}}), "role='king'")):  # fmt: skip
        path.write_text(text)
        with pytest.raises(BadConfig, match=word):
            load_keys(path)
    with pytest.raises(BadConfig, match="no such key file"):
        load_keys(tmp_path / "none.json")


def test_the_services_log_is_signed_with_the_key_that_verifies_it(tmp_path):
    """A key file ends in a newline; the command that verifies a log does not count it."""
    from guardpaint.serve.start import Options, open_log

    key = tmp_path / "key"
    key.write_bytes(b"a long secret\n")
    options = Options("tiny-sd", None, None, "127.0.0.1", 0, None, 1, 1, False, tmp_path / "log.jsonl", key, None, None)
    log = open_log(options)
    log.append([{"a": 1}])
    assert verify_log(tmp_path / "log.jsonl", key=read_key(key)).ok
    key.write_bytes(b"\n")
    with pytest.raises(BadInput, match="empty"):
        open_log(options)


def test_a_body_without_a_length_is_counted_too(client):
    test = client(largest_body=2000)

    def pieces():
        for _ in range(10):
            yield b"x" * 500

    headers = {**bearer(), "content-type": "application/json"}
    assert test.post("/v1/images/generations", content=pieces(), headers=headers).status_code == 413


@pytest.mark.parametrize("mode", ["monitor", "off"])
def test_a_guard_that_does_not_enforce_is_not_served(mode):
    with pytest.raises(BadConfig, match="a service needs mode=enforce"):
        make(guard=GuardPaint(AlwaysSafe(), PaintsFlat()).configured(mode=mode))


def test_a_running_service_does_not_begin_to_keep_flagged_pictures(client):
    test = client(FlagsBright())
    policy = test.get("/v1/policy", headers=bearer(OPERATOR)).json()
    answer = test.put("/v1/policy", json={**policy, "last_resort": ["keep"]}, headers=bearer(OPERATOR))
    assert answer.status_code == 400 and "started with a policy that blocks" in answer.json()["error"]["message"]


def test_failing_accounts_do_not_stop_the_worker():
    worker = Worker(GuardPaint(AlwaysSafe(), PaintsFlat()), small.pipeline("sd"), CALL, Settings(linger=0.0))

    def broken(*_):
        raise RuntimeError("no")

    worker.on_batch = broken
    for _ in range(2):
        (job,) = jobs(1)
        worker.submit([job])
        assert job.future.result(60).image is not None
    worker.close()


def test_closing_after_a_client_left_resolves_the_others():
    worker = Worker(GuardPaint(AlwaysSafe(), PaintsFlat()), small.pipeline("sd"), CALL, Settings(batch=1, linger=0.0))
    many = jobs(4, steps=8)
    worker.submit(many)
    many[2].future.cancel()
    worker.close()
    assert not worker.thread.is_alive() and all(j.future.done() for j in many)


def test_turned_away_pictures_cost_no_rate(client):
    keys = {**KEYS, USER: Key("ann", per_minute=3)}
    limits = Settings(keys=keys, queue=2)
    worker = Worker(GuardPaint(AlwaysSafe(), PaintsFlat()), small.pipeline("sd"), CALL, limits)
    service = Service(worker, "m", limits, BAD)
    with TestClient(create_app(service)) as test:
        assert ask(test, n=3).status_code == 503
        assert ask(test, n=2).status_code == 200


# The log under a running service ------------------------------------------------------------------------------


def logged(client, tmp_path):
    """A service with a keyed and anchored log."""

    class FlagsWhite(AlwaysSafe):
        """Flags the plain white picture of the self-test and nothing else."""

        def audit(self, images, prompts, noise):
            white = [bool((image > 0.99).all()) for image in images]
            return [(AlwaysUnsafe() if w else AlwaysSafe()).audit(images[:1], [p], noise)[0]
                    for w, p in zip(white, prompts, strict=True)]  # fmt: skip

    log = AuditLog(tmp_path / "audit.jsonl", key=b"secret", anchor=tmp_path / "head")
    return client(guard=GuardPaint(FlagsWhite(), PaintsFlat(), audit_log=log))


@pytest.mark.parametrize("damage", ["removed", "truncated"])
def test_a_log_that_was_touched_stops_releases_and_readiness(client, tmp_path, damage):
    test = logged(client, tmp_path)
    assert ask(test).status_code == 200 and test.get("/ready").status_code == 200
    path = tmp_path / "audit.jsonl"
    path.unlink() if damage == "removed" else path.write_bytes(b"")
    answer = ask(test)
    assert answer.status_code == 503 and "b64_json" not in answer.text
    ready = test.get("/ready")
    assert ready.status_code == 503 and "audit log" in ready.json()["error"]["message"]


def test_an_operator_rotates_the_log_of_a_running_service(client, tmp_path):
    test = logged(client, tmp_path)
    assert ask(test).status_code == 200
    assert test.post("/v1/log/rotate", headers=bearer()).status_code == 403
    answer = test.post("/v1/log/rotate", headers=bearer(OPERATOR))
    assert answer.status_code == 200 and (tmp_path / answer.json()["archived"]).exists()
    assert ask(test).status_code == 200
    state = verify_log(tmp_path / "audit.jsonl", key=b"secret", anchor=tmp_path / "head")
    assert state.ok and state.records == 3
    assert client().post("/v1/log/rotate", headers=bearer(OPERATOR)).status_code == 400


def test_the_tail_of_a_long_prompt_is_not_logged(client):
    """diffusers warns about what its text encoder cuts off, and quotes it."""
    from diffusers.utils import logging as diffusers_log

    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    level = diffusers_log.get_verbosity()
    diffusers_log.set_verbosity_warning()
    logging.getLogger("diffusers").addHandler(handler)
    try:
        long, pipe = "a quiet street " * 20 + "with a private name", small.pipeline("sd")
        logging.getLogger(type(pipe).__module__).filters.clear()  # those of services that other tests started
        pipe(long, **CALL)
        assert any("private name" in line for line in seen), "what is being prevented"
        seen.clear()
        assert ask(client(), prompt=long).status_code == 200
        assert not any("private name" in line for line in seen)
    finally:
        logging.getLogger("diffusers").removeHandler(handler)
        diffusers_log.set_verbosity(level)
