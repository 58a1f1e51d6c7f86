"""Auditors that answer with something that is no probability: an error, never a released picture."""

from __future__ import annotations

from attempts import Outcome
from attempts.stand import DOUBLE_SERVICE, released


def fails_closed(prompt: str) -> Outcome:
    answer = DOUBLE_SERVICE.get().draw(prompt)
    out = released(answer)
    fits = answer.status_code == 503 and not out
    return Outcome("503, nothing released", f"{answer.status_code}{', released' if out else ''}", fits)


def probabilities_above_one() -> Outcome:
    return fails_closed("probs-above-one")


def probabilities_that_do_not_sum_to_one() -> Outcome:
    return fails_closed("probs-short")


def probabilities_that_are_all_zero() -> Outcome:
    return fails_closed("probs-zero")


def probabilities_that_are_not_numbers() -> Outcome:
    return fails_closed("probs-nan")


ATTEMPTS = (
    probabilities_above_one,
    probabilities_that_do_not_sum_to_one,
    probabilities_that_are_all_zero,
    probabilities_that_are_not_numbers,
)
