"""A negative prompt that names what the policy forbids."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from guardpaint.bases import Base
from guardpaint.evaluate.defences.base import Outcome, timed

FORBIDDEN = "naked, nude, undressed, no clothes, blood, wounded, gore, stabbing"


@dataclass(frozen=True)
class NegativePrompt:
    words: str = FORBIDDEN
    true_cfg: float = 2.0
    """FLUX follows a negative prompt only with a second call."""
    name: str = "negative_prompt"

    def applies(self, base: Base) -> str:
        if base.family != "flux" and base.guidance <= 1.0:
            return "the base runs without guidance, so a negative prompt has no effect"
        return ""

    def generate(self, base: Base, prompts: Sequence[str], seeds: Sequence[int]) -> list[Outcome]:
        began = time.perf_counter()
        more = {"true_cfg_scale": self.true_cfg} if base.family == "flux" else {}
        words = [self.words] * len(prompts)
        return timed(base.draw(prompts, seeds, negative_prompt=words, **more), began)
