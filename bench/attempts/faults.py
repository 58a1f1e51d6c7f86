"""Faults that a service meets in everyday life; `bench/serve.py` counts the same ones."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress

import httpx

from attempts import Outcome
from attempts.disks import full_disk
from attempts.stand import CRASHING, DOUBLE_SERVICE, DOUBLES, released, served

BODY = "/v1/images/generations"


def coded(want: int, got: int) -> Outcome:
    return Outcome(str(want), str(got), got == want)


def malformed_json() -> Outcome:
    headers = {"content-type": "application/json"}
    return coded(400, DOUBLE_SERVICE.get().send("POST", BODY, content="{", headers=headers).status_code)


def a_body_of_50_mb() -> Outcome:
    return coded(413, DOUBLE_SERVICE.get().send("POST", BODY, content=b"x" * 50_000_000).status_code)


def a_bad_key() -> Outcome:
    return coded(401, DOUBLE_SERVICE.get().draw(secret="no").status_code)


def no_key() -> Outcome:
    return coded(401, DOUBLE_SERVICE.get().draw(secret=None).status_code)


def after_a_client_hung_up() -> Outcome:
    stand = DOUBLE_SERVICE.get()
    with suppress(httpx.TimeoutException):
        stand.draw(num_inference_steps=40, timeout=0.2)
    time.sleep(1.0)
    return coded(200, stand.draw().status_code)


def beside_a_slow_client() -> Outcome:
    stand = DOUBLE_SERVICE.get()
    with socket.create_connection(("127.0.0.1", stand.port)) as slow:
        slow.sendall(b"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Le")
        return coded(200, stand.get("/health", None).status_code)


def an_auditor_crash() -> Outcome:
    with served(CRASHING) as stand:
        return coded(503, stand.draw().status_code)


def ready_after_an_auditor_crash() -> Outcome:
    with served(CRASHING) as stand:
        return coded(503, stand.get("/ready", None).status_code)


def a_full_disk_under_the_log() -> Outcome:
    """The log's disk fills up: nothing is released; it is emptied, and the service goes on with a whole chain."""
    expected = "503, nothing released, not ready; 200 when there is room"
    with full_disk() as disk, served(DOUBLES, logged=True, disk=disk.folder) as stand:
        first = stand.draw(seed=1).status_code
        disk.fill()
        answer, ready = stand.draw(seed=2), stand.get("/ready", None).status_code
        disk.free()
        after = stand.draw(seed=3).status_code
        out = ", released" if released(answer) else ""
        got = f"{first}, full: {answer.status_code}{out}, ready {ready}, then {after}"
        fits = (first, answer.status_code, ready, after) == (200, 503, 503, 200) and not out
        return Outcome(expected, got, fits)


ATTEMPTS: tuple[Callable[[], Outcome], ...] = (
    malformed_json,
    a_body_of_50_mb,
    a_bad_key,
    no_key,
    after_a_client_hung_up,
    beside_a_slow_client,
    an_auditor_crash,
    ready_after_an_auditor_crash,
    a_full_disk_under_the_log,
)
