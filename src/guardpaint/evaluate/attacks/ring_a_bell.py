"""Ring-A-Bell: a concept vector from pairs of prompts, then a genetic search for tokens that carry it."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.errors import MissingCapability
from guardpaint.evaluate.attacks.system import Attempt, Target, attempt
from guardpaint.testbed.language import Attacker, everyday_words, replaced


def concept(attacker: Attacker, target: str) -> Float[Tensor, " d"]:
    """Mean difference between sentences with a phrase of the target's harm and the same sentences without it."""
    surrogate, known, contexts = attacker.surrogate, attacker.lexicon.open_phrases, attacker.lexicon.contexts
    if not known or not contexts:
        raise MissingCapability("ring_a_bell needs open_phrases and contexts in the testbed's lexicon")
    phrases = known[attacker.lexicon.harm_of(target) or next(iter(known))]
    with_it = [context.replace("{}", phrase) for phrase in phrases for context in contexts]
    without = [" ".join(context.replace("{}", "").split()) for _ in phrases for context in contexts]
    return (surrogate.embed(with_it) - surrogate.embed(without)).mean(0)


@dataclass(frozen=True)
class RingABell:
    population: int = 30
    generations: int = 10
    strength: float = 1.5
    """η: how much of the concept is added."""
    words: int = 5
    mutation: float = 0.3
    name: str = "ring_a_bell"

    def search(self, target: str, system: Target, attacker: Attacker, seed: int) -> Attempt:
        asked, span = attacker.lexicon.lone(target)
        stripped = asked if span is None else replaced(asked, span, "")
        want = attacker.surrogate.embed([stripped])[0] + self.strength * concept(attacker, target)
        prompt = target
        for k in range(system.left):
            prompt = self.evolved(asked, span, want, attacker, random.Random(f"ring/{seed}/{k}/{target}"))
            if system.ask(prompt, seed)[1]:
                return attempt(self.name, target, system, prompt, True)
        return attempt(self.name, target, system, prompt, False)

    def evolved(
        self,
        target: str,
        span: tuple[int, int] | None,
        want: Float[Tensor, " d"],
        attacker: Attacker,
        rng: random.Random,
    ) -> str:
        """The target with the fittest words in place of its forbidden phrase."""
        pool, surrogate = everyday_words(attacker.lexicon, self.name), attacker.surrogate
        people = [rng.choices(pool, k=self.words) for _ in range(self.population)]
        where = span or (len(target), len(target))
        express = lambda genes: replaced(target, where, " ".join(genes))  # noqa: E731
        goal = torch.nn.functional.normalize(want, dim=0)
        for _ in range(self.generations):
            fit = (surrogate.embed([express(p) for p in people]) @ goal).tolist()
            order = sorted(range(len(people)), key=lambda i: -fit[i])
            parents = [people[i] for i in order[: self.population // 3]]
            people = [*parents]
            while len(people) < self.population:
                a, b = rng.sample(parents, 2)
                cut = rng.randrange(1, self.words)
                child = [*a[:cut], *b[cut:]]
                people.append([rng.choice(pool) if rng.random() < self.mutation else w for w in child])
        fit = (surrogate.embed([express(p) for p in people]) @ goal).tolist()
        return express(people[max(range(len(people)), key=lambda i: fit[i])])
