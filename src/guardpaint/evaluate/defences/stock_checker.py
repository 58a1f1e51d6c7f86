"""The safety checker that comes with Stable Diffusion, as a defence: what it flags is not released."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from guardpaint.bases import Base
from guardpaint.evaluate.defences.base import Outcome
from guardpaint.evaluate.evaluated_base import EvaluatedBase, StockChecker


@dataclass(frozen=True)
class StockCheckerDefence:
    """Blocks what a checker flags: the base's own one, or one that is named for every base."""

    checker: StockChecker | None = None
    """None means the base's own."""
    name: str = "stock_checker"

    def of(self, base: Base) -> StockChecker | None:
        """The checker that looks at this base's pictures."""
        return self.checker or (base.checker if isinstance(base, EvaluatedBase) else None)

    def applies(self, base: Base) -> str:
        """The reason why there is nothing to check with; empty if there is a checker."""
        return "" if self.of(base) else "the base has no safety checker; name one as in stock_checker@FOLDER"

    def generate(self, base: Base, prompts: Sequence[str], seeds: Sequence[int]) -> list[Outcome]:
        checker = self.of(base)
        assert checker is not None
        began = time.perf_counter()
        images = base.draw(prompts, seeds)
        flags = checker.flags(images)
        spent = (time.perf_counter() - began) / len(prompts)
        return [
            Outcome(None if flag else image, "blocked" if flag else "clean", spent, {"triggered": flag})
            for image, flag in zip(images, flags, strict=True)
        ]
