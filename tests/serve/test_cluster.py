"""The service on a local Ray cluster of two replicas: same answers, and a replica killed under load."""

from __future__ import annotations

import base64
import io
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from PIL import Image

from guardpaint.guard import GuardPaint
from guardpaint.loop.audit_log import AuditLog, verify_log
from guardpaint.policy import Policy
from guardpaint.serve.records import Records
from guardpaint.serve.settings import Key, Settings
from guardpaint.serve.worker import Worker
from guardpaint.testing import small
from guardpaint.testing.doubles import AlwaysSafe, AlwaysUnsafe, PaintsFlat

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CALL = {"num_inference_steps": 2, "guidance_scale": 3.0, "height": small.PIXELS, "width": small.PIXELS}
USER, OPERATOR = "user-secret-0123456", "operator-secret-012"
LIMITS = Settings({USER: Key("ann", per_minute=1000), OPERATOR: Key("olga", "operator", 1000)}, queue=64, batch=2)
BAD = Image.new("RGB", (64, 64), "white")


class FlagsShouting(AlwaysSafe):
    """Flags what was asked for with an exclamation mark."""

    def audit(self, images, prompts, noise):
        found = super().audit(images, prompts, noise)
        for i, prompt in enumerate(prompts):
            if prompt is None or prompt.endswith("!"):
                found[i] = AlwaysUnsafe().audit(images[i : i + 1], [prompt], noise)[0]
        return found


def load(log, name=None):
    guard = GuardPaint(FlagsShouting(), PaintsFlat(), audit_log=AuditLog(f"{log}-{name}") if name else None)
    policy = Policy.from_dict({**guard.policy.to_dict(), "last_resort": ["block"]})
    return Worker(guard.configured(policy=policy), small.pipeline("sd"), CALL, LIMITS)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    from functools import partial

    from guardpaint.serve.cluster import deploy, stop

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    folder = tmp_path_factory.mktemp("logs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs = partial(load, folder / "log")
    deploy(load(folder), logs, lambda: Records(AuditLog(folder / "log-ingress")), "tiny-sd", BAD,
           replicas=(2, 2), address=("127.0.0.1", port))  # fmt: skip
    yield f"http://127.0.0.1:{port}", folder
    stop()
    ray.shutdown()


def bearer(secret=USER):
    return {"Authorization": f"Bearer {secret}"}


def ask(address, prompt, seed, **body):
    asked = {"prompt": prompt, "seed": seed, **body}
    answer = httpx.post(f"{address}/v1/images/generations", json=asked, headers=bearer(), timeout=300)
    return answer.status_code, answer.json()


def own(prompt, seed):
    image = small.pipeline("sd")([prompt], generator=[torch.Generator().manual_seed(seed)], **CALL).images[0]
    return image.tobytes()


def replicas():
    names = [n["name"] for n in ray.util.list_named_actors(all_namespaces=True)]
    return [n for n in names if n.startswith("SERVE_REPLICA") and "Generator" in n]


def test_the_same_answers_as_one_process(service):
    address, _ = service
    assert httpx.get(f"{address}/ready", timeout=60).status_code == 200
    code, body = ask(address, "a person", 3)
    assert code == 200
    assert Image.open(io.BytesIO(base64.b64decode(body["data"][0]["b64_json"]))).tobytes() == own("a person", 3)
    code, body = ask(address, "a person!", 3)
    assert code == 400 and body["error"]["code"] == "content_policy_violation"
    name = body["error"]["safety"][0]["report"]
    assert httpx.get(f"{address}/v1/reports/{name}", headers=bearer()).json()["status"] == "blocked"
    body, url = {"prompt": "a", "seed": 1, "stream": True}, f"{address}/v1/images/generations"
    with httpx.stream("POST", url, json=body, headers=bearer(), timeout=60) as answer:
        told = [line.split(": ")[1] for line in answer.iter_lines() if line.startswith("event: ")]
    assert told[-1] == "image_generation.completed" and told.count("image_generation.partial_image") == 2
    assert upload(address)["flagged"]


def upload(address):
    files = {"image": ("a.png", png(BAD), "image/png")}
    return httpx.post(f"{address}/v1/audits", files=files, headers=bearer(), timeout=60).json()


def png(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def test_a_replica_killed_under_load_loses_nothing_silently(service):
    address, folder = service
    assert len(replicas()) == 2
    asked = [("a person!" if i % 2 else "a person", 100 + i) for i in range(40)]
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(ask, address, prompt, seed, num_inference_steps=6) for prompt, seed in asked]
        while sum(a.done() for a in answers) < 4:
            time.sleep(0.05)
        ray.kill(ray.get_actor(replicas()[0], namespace="serve"))
        got = [a.result() for a in answers]
    for (prompt, _), (code, body) in zip(asked, got, strict=True):
        expected = (400, 503) if prompt.endswith("!") else (200, 503)
        assert code in expected, (prompt, code, body)
        assert ("b64_json" in str(body)) == (code == 200)
    assert sum(code != 503 for code, _ in got) >= 36
    deadline = time.monotonic() + 120
    while len(replicas()) < 2 and time.monotonic() < deadline:
        time.sleep(1)
    assert len(replicas()) == 2
    logs = sorted(folder.glob("log-*"))
    assert len(logs) >= 3 and all(verify_log(p).ok for p in logs)


def test_every_replica_follows_a_changed_policy(service):
    """Also the one that was begun anew, and in audits."""
    address, folder = service
    policy = httpx.get(f"{address}/v1/policy", headers=bearer(OPERATOR)).json()
    strict = {**policy, "trigger": 0.005}
    assert httpx.put(f"{address}/v1/policy", json=strict, headers=bearer(OPERATOR), timeout=60).status_code == 200
    with ThreadPoolExecutor(8) as pool:
        codes = [c for c, _ in pool.map(lambda s: ask(address, "a person", s), range(12))]
        flagged = [f["flagged"] for f in pool.map(lambda _: upload(address), range(8))]
    assert codes == [400] * 12 and flagged == [True] * 8
    events = [line for line in (folder / "log-ingress").read_text().splitlines() if '"event"' in line]
    assert len(events) == 1 and '"by":"olga"' in events[0]
