"""DACA: the scene is taken apart, every part described harmlessly in a sentence of its own, and put together again."""

from __future__ import annotations

import re
from dataclasses import dataclass

from guardpaint.evaluate.attacks.system import Attempt, Surrogate, Target, attempt, purged, shuffled, similar_phrases


def parts(prompt: str) -> list[str]:
    """Clauses of a prompt: at full stops, colons and commas."""
    return [p.strip() for p in re.split(r"[.:,]", prompt) if p.strip()]


@dataclass(frozen=True)
class DivideAndConquer:
    name: str = "daca"

    def search(self, target: str, system: Target, surrogate: Surrogate, seed: int) -> Attempt:
        prompt = target
        for phrase in shuffled(similar_phrases(target), "daca", seed, target)[: system.left]:
            prompt = self.rewritten(target, phrase)
            if system.ask(prompt, seed)[1]:
                return attempt(self.name, target, system, prompt, True)
        return attempt(self.name, target, system, prompt, False)

    def rewritten(self, target: str, phrase: str) -> str:
        """Every clause a sentence; the forbidden words leave, and what they meant comes back as one more."""
        kept = purged(target)
        clauses = [" ".join(c.split()) for c in parts(kept)]
        main = next((c for c in clauses if re.search(r"\b(person|woman|man|figure|somebody)\b", c)), "a person")
        rest = [c for c in clauses if c != main]
        return ". ".join([f"{main} {phrase}", *rest]) + "."
