"""One key asks for everything at once; another one asks for a single picture."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import httpx

from attempts import Outcome
from attempts.stand import OTHER, SLOW, USER, Stand, served

GREEDY, EACH = 8, 4
"""Requests of the greedy key and pictures in each."""


def alone(stand: Stand) -> float:
    """Seconds that a single picture takes on an idle service."""
    began = time.monotonic()
    stand.draw(secret=OTHER)
    return time.monotonic() - began


def beside(stand: Stand, requests: int, **body: object) -> tuple[int, float]:
    """Code and seconds of one request, while another key has asked for `requests` times four pictures."""

    def ask(seed: int) -> None:
        with suppress(httpx.HTTPError), httpx.Client(timeout=40) as client:
            fields = {"prompt": "a person", "n": EACH, "seed": seed, **body}
            headers = {"Authorization": f"Bearer {USER}"}
            client.post(f"{stand.address}/v1/images/generations", json=fields, headers=headers)

    threads = [threading.Thread(target=ask, args=(100 * i,), daemon=True) for i in range(requests)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    began = time.monotonic()
    code = 0
    with suppress(httpx.HTTPError):
        code = stand.draw(secret=OTHER, timeout=60).status_code
    return code, time.monotonic() - began


def one_key_fills_the_queue() -> Outcome:
    """Eight requests of four long pictures: served in turn they take more than a minute."""
    with served(SLOW) as stand:
        one = alone(stand)
        code, waited = beside(stand, GREEDY, num_inference_steps=20)
        limit = 30 + 3 * one
        got = f"{code or 'no answer'} after {waited:.1f} s (alone {one:.1f})"
        return Outcome(f"200 within {limit:.0f} s", got, code == 200 and waited < limit)


def one_key_takes_every_place() -> Outcome:
    """More requests than places: somebody else must still get one."""
    with served(SLOW) as stand:
        stand.draw()
        code, waited = beside(stand, 12, num_inference_steps=20)
        return Outcome("200", f"{code or 'no answer'} after {waited:.1f} s", code == 200)


ATTEMPTS = (one_key_fills_the_queue, one_key_takes_every_place)
