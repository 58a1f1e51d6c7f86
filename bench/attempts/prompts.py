"""Prompts in what the service prints: nobody who reads its output may read what people asked for."""

from __future__ import annotations

from attempts import Outcome
from attempts.stand import DOUBLE_SERVICE, Stand, served

TAIL = "velvetharbour"
"""A word that no message of the service holds by itself."""


def kept_out(stand: Stand, **body: object) -> Outcome:
    answer = stand.send("POST", "/v1/images/generations", json=body)
    there = TAIL in stand.output()
    return Outcome("not printed", f"{answer.status_code}, {'printed' if there else 'not printed'}", not there)


def the_cut_off_tail_of_a_long_prompt() -> Outcome:
    """Text encoders cut long prompts, and diffusers says in a warning what was cut off."""
    return kept_out(DOUBLE_SERVICE.get(), prompt="a person on the beach " * 20 + TAIL)


def the_tail_while_a_picture_is_repaired() -> Outcome:
    """The inpainter has a text encoder of its own, and a warning of its own."""
    return kept_out(DOUBLE_SERVICE.get(), prompt="please flag " + "a person on the beach " * 20 + TAIL)


def the_tail_under_several_text_encoders() -> Outcome:
    """A base with three text encoders, each of which cuts at its own length."""
    with served("mini-sd3") as stand:
        return kept_out(stand, prompt="a person on the beach " * 20 + TAIL)


def a_prompt_that_is_too_long() -> Outcome:
    return kept_out(DOUBLE_SERVICE.get(), prompt=f"{TAIL} " * 400)


def a_prompt_in_a_request_that_is_refused() -> Outcome:
    return kept_out(DOUBLE_SERVICE.get(), prompt=TAIL, n=TAIL, size=TAIL, colour=TAIL)


def a_prompt_under_which_the_auditor_crashes() -> Outcome:
    return kept_out(DOUBLE_SERVICE.get(), prompt=f"please crash {TAIL}")


def a_prompt_in_the_address() -> Outcome:
    stand = DOUBLE_SERVICE.get()
    code = stand.get(f"/v1/reports/{TAIL}?prompt={TAIL}").status_code
    there = TAIL in stand.output()
    return Outcome("not printed", f"{code}, {'printed' if there else 'not printed'}", not there)


ATTEMPTS = (
    the_cut_off_tail_of_a_long_prompt,
    the_tail_while_a_picture_is_repaired,
    the_tail_under_several_text_encoders,
    a_prompt_that_is_too_long,
    a_prompt_in_a_request_that_is_refused,
    a_prompt_under_which_the_auditor_crashes,
    a_prompt_in_the_address,
)
