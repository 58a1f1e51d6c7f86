"""SneakyPrompt: search token sequences that stand for the forbidden words, pass the filter and keep the meaning.

A reinforced search: words that made good sequences are drawn more often; a question is spent only on a sequence whose
text embedding comes close enough to the target's.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from guardpaint.evaluate.attacks.system import Attempt, Target, attempt
from guardpaint.testbed.language import Attacker, everyday_words, replaced


@dataclass(frozen=True)
class SneakyPrompt:
    candidates: int = 40
    """Sequences compared by the surrogate before each question."""
    longest: int = 4
    reward: float = 1.0
    name: str = "sneakyprompt"

    def search(self, target: str, system: Target, attacker: Attacker, seed: int) -> Attempt:
        rng = random.Random(f"sneaky/{seed}/{target}")
        asked, span = attacker.lexicon.lone(target)
        words = everyday_words(attacker.lexicon, self.name)
        weight = dict.fromkeys(words, 1.0)
        best = target
        tried: set[str] = set()
        while system.left:
            made: set[str] = set()
            for _ in range(100 * self.candidates):  # a few words make only so many sequences
                if len(made) == self.candidates:
                    break
                size = rng.randint(1, self.longest)
                chosen = rng.choices(words, [weight[w] for w in words], k=size)
                made.add(replaced(asked, span, " ".join(chosen)) if span else f"{target} {' '.join(chosen)}")
            fresh = sorted(made - tried)
            if not fresh:
                break
            close = attacker.surrogate.similarity(fresh, target)
            prompt = fresh[int(close.argmax())]
            tried.add(prompt)
            passed, seen = system.ask(prompt, seed)
            if seen:
                return attempt(self.name, target, system, prompt, True)
            gain = self.reward * float(close.max()) if passed else -0.5 * self.reward
            for w in set(prompt.split()) & set(words):
                weight[w] = max(0.05, weight[w] + gain)
            best = prompt
        return attempt(self.name, target, system, best, False)
