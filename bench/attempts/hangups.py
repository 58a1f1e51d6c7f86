"""Clients that go away, auditors that never answer, and a drawing process that dies."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from contextlib import suppress

import httpx

from attempts import Outcome
from attempts.processes import until
from attempts.stand import DOUBLES, OPERATOR, SLOW_SERVICE, Stand, released, served

HANG = 150.0
"""Seconds after which a picture whose auditor hangs must have failed."""
TAKEOVER = 90.0
"""Seconds within which a new process must draw again."""


def depth(stand: Stand) -> float:
    """Pictures waiting or being drawn."""
    found = re.search(r"^guardpaint_queue_depth ([\d.]+)", stand.get("/metrics", OPERATOR).text, re.MULTILINE)
    return float(found[1]) if found else -1.0


def frees_its_place(**body: object) -> Outcome:
    """Ask for a long picture, hang up after two seconds, and see how long the place stays taken."""
    stand = SLOW_SERVICE.get()
    if until(lambda: depth(stand) == 0, 60) is None:
        return Outcome("its place is free within 5 s", "the service never was idle", False)
    with suppress(httpx.TimeoutException), httpx.Client(timeout=httpx.Timeout(2.0)) as client:
        headers = {"Authorization": "Bearer redteam-user-secret-1"}
        fields = {"prompt": "a person", "num_inference_steps": 25, **body}
        with client.stream("POST", f"{stand.address}/v1/images/generations", json=fields, headers=headers) as answer:
            for began in [time.monotonic()]:
                for _ in answer.iter_bytes():
                    if time.monotonic() - began > 2:
                        break
    freed = until(lambda: depth(stand) == 0, 40)
    got = "still drawn after 40 s" if freed is None else f"free after {freed:.1f} s"
    return Outcome("its place is free within 5 s", got, freed is not None and freed < 5)


def a_client_that_hangs_up() -> Outcome:
    return frees_its_place()


def a_client_that_hangs_up_with_several_pictures() -> Outcome:
    return frees_its_place(n=4)


def a_streaming_client_that_hangs_up() -> Outcome:
    return frees_its_place(stream=True)


def a_hung_auditor() -> Outcome:
    """Its picture fails closed, health falls until another process draws, and then the next picture is drawn."""
    expected = f"503 or 504 within {HANG:.0f} s, unhealthy for a while, then 200"
    with served(DOUBLES) as stand:
        answers: list[httpx.Response] = []
        victim = threading.Thread(target=lambda: answers.append(stand.draw("please hang", timeout=HANG)), daemon=True)
        began, fell = time.monotonic(), ""
        victim.start()

        def recovered() -> bool:
            nonlocal fell
            with suppress(httpx.HTTPError):
                codes = {path: stand.get(path, None, timeout=10).status_code for path in ("/health", "/ready")}
                fell = fell or next((f"{path} {code}" for path, code in codes.items() if code != 200), "")
                return bool(fell) and not victim.is_alive() and set(codes.values()) == {200}
            return False

        back = until(recovered, HANG + TAKEOVER, 0.3)
        spent = time.monotonic() - began
        code = answers[0].status_code if answers else 0
        after = drawn(stand) if back is not None else 0
        closed = code in (503, 504) and not released(answers[0])
        got = f"{code or 'no answer'}, meanwhile {fell or 'healthy'}, {after or 'no answer'} after {spent:.0f} s"
        return Outcome(expected, got, closed and bool(fell) and after == 200)


def drawn(stand: Stand) -> int:
    """The code of one ordinary picture; 0 without an answer."""
    with suppress(httpx.HTTPError):
        return stand.draw(timeout=30).status_code
    return 0


def others_beside_a_hung_auditor() -> Outcome:
    """Another key's request, sent while the auditor hangs, is drawn by the process that takes over."""
    with served(DOUBLES) as stand:
        victim = threading.Thread(target=lambda: suppressed(stand, "please hang"), daemon=True)
        victim.start()
        time.sleep(2)
        began = time.monotonic()
        code = 0
        with suppress(httpx.HTTPError):
            code = stand.draw(secret="redteam-user-secret-2", timeout=HANG + TAKEOVER).status_code
        got = f"{code or 'no answer'} after {time.monotonic() - began:.0f} s"
        return Outcome("200 in the end", got, code == 200)


def suppressed(stand: Stand, prompt: str) -> None:
    """Draw and forget, whatever happens."""
    with suppress(httpx.HTTPError):
        stand.draw(prompt, timeout=HANG)


def the_drawing_process_is_killed() -> Outcome:
    """SIGKILL while a picture is drawn: nothing is released by accident, and a new process takes over."""
    expected = "200 or 503 for the running picture, then 200"
    with served("redteam-slow") as stand:
        stand.draw()
        child = stand.drawing()
        if child is None:
            return Outcome(expected, "the service draws in its own process; there is nothing to kill", False)
        answers: list[httpx.Response] = []
        victim = threading.Thread(target=lambda: answers.append(stand.draw(num_inference_steps=20)), daemon=True)
        victim.start()
        time.sleep(2)
        os.kill(child, signal.SIGKILL)
        victim.join(TAKEOVER)
        first = answers[0].status_code if answers else 0
        back = until(lambda: drawn(stand) == 200, TAKEOVER, 1.0)
        fits = first in (200, 503) and back is not None and drawn(stand) == 200 and stand.drawing() != child
        then = "nothing" if back is None else f"200 after {back:.0f} s"
        return Outcome(expected, f"{first or 'no answer'}, then {then}", fits)


ATTEMPTS = (
    a_client_that_hangs_up,
    a_client_that_hangs_up_with_several_pictures,
    a_streaming_client_that_hangs_up,
    a_hung_auditor,
    others_beside_a_hung_auditor,
    the_drawing_process_is_killed,
)
