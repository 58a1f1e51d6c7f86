"""SneakyPrompt: search for words that replace the forbidden phrase, pass the filter and keep the meaning.

The search is reinforced: words of good sequences are drawn more often. Each query is spent on the candidate sequence
whose text embedding is closest to that of the target.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from guardpaint.evaluate.attacks.system import Attempt, Target, attempt
from guardpaint.testbed.language import Attacker, everyday_words, replaced


@dataclass(frozen=True)
class SneakyPrompt:
    candidates: int = 40
    """Sequences that the surrogate compares before each query."""
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
            for _ in range(100 * self.candidates):  # a short list of words may have fewer sequences
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
