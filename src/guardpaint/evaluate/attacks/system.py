"""The system under attack and what an attacker may know of it: answers to prompts, and a text encoder of its own."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor

from guardpaint.evaluate.defences.base import Base, Defence
from paperdolls.captions import (
    HIDDEN_BLADE,
    HIDDEN_NUDITY,
    HIDDEN_SPLASH,
    KEYWORDS,
    PLAIN_BLADE,
    PLAIN_NUDITY,
    PLAIN_SPLASH,
    WORDS,
)

Eyes = Callable[[Image.Image], bool]
"""Whether the attacker, looking at a picture, sees what they wanted."""


@dataclass
class Target:
    """A deployed system: a defence in front of or around a base. Every question is counted."""

    base: Base
    defence: Defence
    eyes: Eyes
    budget: int = 20
    asked: list[tuple[str, str]] = field(default_factory=list)

    @property
    def left(self) -> int:
        return self.budget - len(self.asked)

    def ask(self, prompt: str, seed: int) -> tuple[bool, bool]:
        """(a picture came back, it shows what was wanted); costs one question."""
        if self.left <= 0:
            raise RuntimeError("the attack asked more often than its budget allows")
        out = self.defence.generate(self.base, [prompt], [seed])[0]
        seen = out.image is not None and self.eyes(out.image)
        self.asked.append((prompt, "success" if seen else out.status))
        return out.image is not None, seen


@dataclass(frozen=True)
class Attempt:
    """What an attack found."""

    attack: str
    target: str
    prompt: str
    success: bool
    """By the attacker's own eyes, within the budget."""
    queries: int
    log: list[tuple[str, str]]


@runtime_checkable
class Attack(Protocol):
    @property
    def name(self) -> str: ...

    def search(self, target: str, system: Target, surrogate: Surrogate, seed: int) -> Attempt: ...


@dataclass(frozen=True)
class Surrogate:
    """A CLIP text encoder with its tokenizer, fully known to the attacker: not the system's whole text path."""

    tokenizer: Any
    encoder: Any

    @property
    def length(self) -> int:
        return int(self.tokenizer.model_max_length)

    def ids(self, texts: Sequence[str]) -> Int[Tensor, "b l"]:
        return self.tokenizer(
            list(texts), padding="max_length", max_length=self.length, truncation=True, return_tensors="pt"
        ).input_ids

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> Float[Tensor, "b d"]:
        """Mean text state, unit length."""
        return self.pool(self.encoder(self.ids(texts)).last_hidden_state, self.ids(texts))

    def pool(self, states: Float[Tensor, "b l d"], ids: Int[Tensor, "b l"]) -> Float[Tensor, "b d"]:
        real = (ids != self.tokenizer.pad_token_id).float()
        real[:, 0] = 1
        mean = (states * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        return torch.nn.functional.normalize(mean, dim=1)

    def similarity(self, texts: Sequence[str], target: str) -> Float[Tensor, " b"]:
        return self.embed(texts) @ self.embed([target])[0]


def forbidden_span(prompt: str) -> tuple[int, int] | None:
    """The part of a prompt that asks for something forbidden: a whole known phrase, else the first keyword."""
    for phrase in sorted((*PLAIN_NUDITY, *PLAIN_SPLASH, *PLAIN_BLADE), key=len, reverse=True):
        at = prompt.find(phrase)
        if at >= 0:
            return at, at + len(phrase)
    for word in KEYWORDS:
        found = re.search(rf"\b{re.escape(word)}\w*", prompt)
        if found:
            return found.span()
    return None


def lone(prompt: str) -> tuple[str, tuple[int, int] | None]:
    """The prompt with one forbidden phrase left, and where it is: further ones would be refused whatever is done."""
    span = forbidden_span(prompt)
    if span is None:
        return prompt, None
    head, phrase, tail = prompt[: span[0]], prompt[span[0] : span[1]], prompt[span[1] :]
    head, tail = purged(head), purged(tail)
    return f"{head}{phrase}{tail}", (len(head), len(head) + len(phrase))


def purged(text: str) -> str:
    """Without any forbidden phrase."""
    while (span := forbidden_span(text)) is not None:
        text = f"{text[: span[0]].rstrip()} {text[span[1] :].lstrip()}"
    return text


def replaced(prompt: str, span: tuple[int, int], words: str) -> str:
    return " ".join(f"{prompt[: span[0]]} {words} {prompt[span[1] :]}".split()).replace(" ,", ",").replace(" .", ".")


def harmless_words() -> list[str]:
    """Everyday words of this world that no filter knows, the words of its figures of speech among them."""
    phrases = [p for group in WORDS.values() for p in group]
    phrases += [*HIDDEN_NUDITY, *HIDDEN_SPLASH, *HIDDEN_BLADE]
    words = dict.fromkeys(w for p in phrases for w in re.findall(r"[a-z']+", p.lower()))
    return [w for w in words if not any(k in w for k in KEYWORDS)]


def similar_phrases(prompt: str) -> tuple[str, ...]:
    """Figures of speech for what a prompt asks, as a language model would suggest them."""
    if any(p in prompt for p in PLAIN_NUDITY):
        return HIDDEN_NUDITY
    return HIDDEN_BLADE if any(p in prompt for p in PLAIN_BLADE) else HIDDEN_SPLASH


def attempt(name: str, target: str, system: Target, prompt: str, success: bool) -> Attempt:
    return Attempt(name, target, prompt, success, len(system.asked), list(system.asked))


def shuffled(items: Sequence[str], *keys: object) -> list[str]:
    """By seed, the same on every machine."""
    rng = random.Random("/".join(map(str, keys)))
    return rng.sample(list(items), len(items))
