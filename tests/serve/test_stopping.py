"""Stopping a service by signal: new and waiting requests get 503 at once, running ones after a short grace period."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from services import OTHER, USER, bearer

from guardpaint.loop.audit_log import verify_log

pytestmark = pytest.mark.timeout(300)
TESTS = Path(__file__).parents[1]
GRACE = 4.0


@pytest.fixture
def served(tmp_path):
    """A running service: its process, that of its child, its address and its log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(TESTS / "served.py"), str(port), str(tmp_path / "log"), str(GRACE)]
    path = os.pathsep.join([str(TESTS), *(p for p in sys.path if p)])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})
    try:
        child = int(process.stdout.readline())
        address = f"http://127.0.0.1:{port}"
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                if httpx.get(f"{address}/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        yield process, child, address, tmp_path / "log"
    finally:
        process.kill()
        process.wait(10)


def ask(address, prompt, secret=USER):
    body = {"prompt": prompt, "num_inference_steps": 2}
    answer = httpx.post(f"{address}/v1/images/generations", json=body, headers=bearer(secret), timeout=120)
    return answer.status_code, answer.json(), time.monotonic()


def gone(pid):
    try:
        os.kill(pid, 0)
        return False
    except ProcessLookupError:
        return True


def test_sigterm(served):
    process, child, address, log = served
    assert ask(address, "a person")[0] == 200
    with ThreadPoolExecutor(4) as pool:
        running = pool.submit(ask, address, "hang")
        time.sleep(0.5)
        waiting = pool.submit(ask, address, "a person", OTHER)
        time.sleep(0.5)
        assert not running.done() and not waiting.done()
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        code, body, when = waiting.result(60)
        assert code == 503 and body["error"]["code"] == "overloaded" and when - began < GRACE / 2
        code, body, when = ask(address, "a person")
        assert code == 503 and "closing" in body["error"]["message"] and when - began < GRACE / 2
        assert httpx.get(f"{address}/ready").status_code == 503
        code, body, when = running.result(60)
        assert code == 503 and body["error"]["code"] == "guard_failed"
        assert GRACE - 0.5 < when - began < GRACE + 10
    process.wait(30)
    assert time.monotonic() - began < GRACE + 15 and gone(child)
    assert verify_log(log).ok
    rows = [json.loads(line)["report"] for line in log.read_text().splitlines()]
    assert [r["status"] for r in rows] == ["clean", "blocked"] and "closing" in rows[1]["errors"][0]


def test_the_child_of_a_killed_service_ends_too(served):
    process, child, _, _ = served
    assert not gone(child)
    process.kill()
    process.wait(10)
    end = time.monotonic() + 20
    while not gone(child) and time.monotonic() < end:
        time.sleep(0.1)
    assert gone(child)
