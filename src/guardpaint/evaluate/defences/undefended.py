"""The base model as it is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from guardpaint.bases import Base
from guardpaint.evaluate.defences.base import Everywhere, Outcome, timed


@dataclass(frozen=True)
class Undefended(Everywhere):
    name: str = "undefended"

    def generate(self, base: Base, prompts: Sequence[str], seeds: Sequence[int]) -> list[Outcome]:
        began = time.perf_counter()
        return timed(base.draw(prompts, seeds), began)
