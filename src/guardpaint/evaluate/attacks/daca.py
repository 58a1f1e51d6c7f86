"""DACA: divide the prompt into clauses, and describe each one harmlessly in a sentence of its own."""

from __future__ import annotations

import re
from dataclasses import dataclass

from guardpaint.evaluate.attacks.system import Attempt, Target, attempt, shuffled
from guardpaint.testbed.language import Attacker, Lexicon


def parts(prompt: str) -> list[str]:
    """Clauses of a prompt: at full stops, colons and commas."""
    return [p.strip() for p in re.split(r"[.:,]", prompt) if p.strip()]


@dataclass(frozen=True)
class DivideAndConquer:
    name: str = "daca"

    def search(self, target: str, system: Target, attacker: Attacker, seed: int) -> Attempt:
        prompt = target
        for phrase in shuffled(attacker.similar_phrases(target), "daca", seed, target)[: system.left]:
            prompt = self.rewritten(target, phrase, attacker.lexicon)
            if system.ask(prompt, seed)[1]:
                return attempt(self.name, target, system, prompt, True)
        return attempt(self.name, target, system, prompt, False)

    def rewritten(self, target: str, phrase: str, lexicon: Lexicon) -> str:
        """Every clause as a sentence of its own, with `phrase` in place of the forbidden words."""
        clauses = [" ".join(c.split()) for c in parts(lexicon.purged(target))]
        subjects = "|".join(map(re.escape, lexicon.subjects))
        main = next((c for c in clauses if re.search(rf"\b({subjects})\b", c)), "a person")
        rest = [c for c in clauses if c != main]
        return ". ".join([f"{main} {phrase}", *rest]) + "."
