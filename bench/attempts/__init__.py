"""Attacks on the service and the library, from the outside, one function each; `bench/redteam.py` runs them.

A function takes nothing, makes what it attacks, and returns an `Outcome`. Its module is its group.
"""

from __future__ import annotations

from typing import NamedTuple


class Outcome(NamedTuple):
    """What an attempt should get, what it got, and whether that is as expected."""

    expected: str
    got: str
    as_expected: bool
