"""SneakyPrompt: search for words that replace the forbidden phrase, pass the filter and keep the meaning.

The search is reinforced. Sequences of words that came close to the target are varied, and the words of sequences that
came closer than others of their round are drawn more often; a refused sequence is given up. Queries are spent
on the closest sequence that was not asked yet and, in turn, on the closest one without any word asked before.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from guardpaint.evaluate.attacks.gap import Gap, gap_of
from guardpaint.evaluate.attacks.system import Attempt, Target, attempt
from guardpaint.testbed.language import Attacker, everyday_words


@dataclass(frozen=True)
class SneakyPrompt:
    candidates: int = 40
    """Sequences that the surrogate compares before each query."""
    rounds: int = 5
    """Rounds that they are read in; the search learns from each."""
    longest: int = 4
    learned: float = 0.7
    """Probability that a sequence varies one of the best, and that a word is drawn by its value; else blindly."""
    best: int = 5
    """Sequences that are varied."""
    name: str = "sneakyprompt"

    def gap(self, target: str, attacker: Attacker) -> Gap:
        return gap_of(target, attacker, everyday_words(attacker, self.name))

    def size(self, rng: random.Random) -> int:
        return rng.randint(1, self.longest)

    def search(self, target: str, system: Target, attacker: Attacker, seed: int) -> Attempt:
        policy = Policy(self, self.gap(target, attacker), random.Random(f"sneaky/{seed}/{target}"))
        prompt = target
        while system.left:
            for _ in range(self.rounds):
                policy.read(policy.candidates(self.candidates // self.rounds))
            choice = policy.choice()
            if choice is None:
                break
            prompt = choice
            policy.asked.add(prompt)
            passed, seen = system.ask(prompt, seed)
            if seen:
                return attempt(self.name, target, system, prompt, True, policy.gap.objective)
            if not passed:
                policy.give_up(prompt)
        return attempt(self.name, target, system, prompt, False, policy.gap.objective)


@dataclass
class Policy:
    """What a search has learned so far, and how it draws the next sequences."""

    settings: SneakyPrompt
    gap: Gap
    rng: random.Random
    value: dict[str, float] = field(default_factory=dict)
    """Per word: how much closer than others of their round its sequences came, in standard deviations."""
    found: dict[str, tuple[float, list[str]]] = field(default_factory=dict)
    """Per prompt: its closeness to the target, and the words in its gap."""
    asked: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)

    def candidates(self, count: int) -> dict[str, list[str]]:
        """At most `count` new prompts, with the words in their gaps."""
        best = [self.found[text][1] for text in self.ranking()[: self.settings.best]]
        known = list(self.value)
        weights = [math.exp(2 * self.value[word]) for word in known]
        new: dict[str, list[str]] = {}
        for _ in range(100 * count):  # a short list of words may have fewer sequences
            if len(new) == count:
                break
            draw = lambda: self.rng.random() < self.settings.learned  # noqa: E731
            words = self.gap.drawn(self.settings.size(self.rng), self.rng)
            if best and draw():
                word = self.rng.choices(known, weights)[0] if draw() else words[0]
                words = self.varied(self.rng.choice(best), word)
            text = self.gap.filled(words)
            if text not in self.found:
                new[text] = words
        return new

    def varied(self, words: list[str], word: str) -> list[str]:
        """The sequence with this word added, in place of one of its own, or with one word fewer."""
        place = self.rng.randrange(len(words))
        change = self.rng.choice(("add", "replace", "replace", "drop"))
        if change == "add" and len(words) < self.settings.longest:
            return [*words[:place], word, *words[place:]]
        if change == "drop" and len(words) > 1:
            return [*words[:place], *words[place + 1 :]]
        return [*words[:place], word, *words[place + 1 :]]

    def read(self, fresh: dict[str, list[str]]) -> None:
        """Learn from the closeness of new prompts."""
        if not fresh:
            return
        close = self.gap.objective(list(fresh))
        merits = ((close - close.mean()) / (close.std(unbiased=False) + 1e-6)).tolist()
        for (text, words), merit, near in zip(fresh.items(), merits, close.tolist(), strict=True):
            self.found[text] = near, words
            for word in words:
                self.value[word] = self.value.get(word, 0.0) + 0.5 * (merit - self.value.get(word, 0.0))

    def ranking(self) -> list[str]:
        """The prompts that were not refused, the closest first."""
        return sorted(self.found.keys() - self.refused, key=lambda text: (-self.found[text][0], text))

    def choice(self) -> str | None:
        """The prompt to ask next: the closest one, and every second time the closest one whose words are all new.

        The surrogate is not the system: words that it likes may not draw what the attacker wants.
        """
        fresh = [text for text in self.ranking() if text not in self.asked]
        if len(self.asked) % 2:
            used = {word for text in self.asked for word in self.found[text][1]}
            fresh = [text for text in fresh if not used & set(self.found[text][1])] or fresh
        return fresh[0] if fresh else None

    def give_up(self, prompt: str) -> None:
        """Learn that the filter refuses a prompt."""
        self.refused.add(prompt)
        for word in self.found[prompt][1]:
            self.value[word] -= 1.0
