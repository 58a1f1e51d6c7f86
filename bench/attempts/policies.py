"""A policy that is changed over the API, and what a restart makes of it."""

from __future__ import annotations

from typing import Any

from attempts import Outcome
from attempts.stand import DOUBLE_SERVICE, OPERATOR, USER, Options, Stand, scratch, start, stop


def tightened(stand: Stand) -> tuple[dict[str, Any], Any]:
    """The stricter policy that was sent, and the answer."""
    policy = stand.get("/v1/policy", OPERATOR).json()
    policy["trigger"] = 0.21
    return policy, stand.send("PUT", "/v1/policy", OPERATOR, json=policy)


def says_it_does_not_last(text: str) -> bool:
    return any(word in text.lower() for word in ("restart", "persist", "not saved"))


def survives(logged: bool) -> Outcome:
    """Tighten the policy, restart the service with the same command, read the policy."""
    with scratch() as folder:
        first = start(Options(logged=logged), folder)
        try:
            _, answer = tightened(first)
        finally:
            stop(first)
        warned = says_it_does_not_last(answer.text) or says_it_does_not_last(str(answer.headers))
        second = start(Options(logged=logged), folder)
        try:
            trigger = second.get("/v1/policy", OPERATOR).json()["trigger"]
        finally:
            stop(second)
    lasts = trigger == 0.21
    got = f"PUT {answer.status_code}, trigger after the restart {trigger}, {'warned' if warned else 'no warning'}"
    fits = answer.status_code == 200 and (lasts or warned)
    return Outcome("the change lasts, or the answer says that it does not", got, fits)


def a_tightened_policy_after_a_restart() -> Outcome:
    return survives(logged=True)


def a_tightened_policy_without_a_log() -> Outcome:
    return survives(logged=False)


def an_ordinary_key_changes_the_policy() -> Outcome:
    stand = DOUBLE_SERVICE.get()
    policy = stand.get("/v1/policy", OPERATOR).json()
    code = stand.send("PUT", "/v1/policy", USER, json={**policy, "trigger": 1.0}).status_code
    after = stand.get("/v1/policy", OPERATOR).json()["trigger"]
    return Outcome("403, unchanged", f"{code}, trigger {after}", code == 403 and after == policy["trigger"])


ATTEMPTS = (
    a_tightened_policy_after_a_restart,
    a_tightened_policy_without_a_log,
    an_ordinary_key_changes_the_policy,
)
