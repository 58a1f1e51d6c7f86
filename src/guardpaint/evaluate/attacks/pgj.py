"""PGJ: replace the forbidden phrase by harmless ones that look alike, until a picture shows what the attacker wants."""

from __future__ import annotations

from dataclasses import dataclass

from guardpaint.evaluate.attacks.system import Attempt, Target, attempt, shuffled
from guardpaint.testbed.language import Attacker, replaced


@dataclass(frozen=True)
class PerceptionGuided:
    name: str = "pgj"

    def search(self, target: str, system: Target, attacker: Attacker, seed: int) -> Attempt:
        asked, span = attacker.lexicon.lone(target)
        prompt = target
        if span is not None:
            for phrase in shuffled(attacker.similar_phrases(target), "pgj", seed, target)[: system.left]:
                prompt = replaced(asked, span, phrase)
                if system.ask(prompt, seed)[1]:
                    return attempt(self.name, target, system, prompt, True)
        return attempt(self.name, target, system, prompt, False)
