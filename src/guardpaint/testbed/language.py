"""The vocabulary of a world: what a filter forbids, harmless wordings of it, and a text encoder to compare them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from guardpaint.errors import MissingCapability
from guardpaint.testbed import phrases

Span = tuple[int, int]


@dataclass(frozen=True)
class Lexicon:
    """Words and phrases of a world, by harm where they have one."""

    keywords: tuple[str, ...] = ()
    """Words that a keyword filter refuses, in any form."""
    sentences: tuple[str, ...] = ()
    """Sentences that an embedding filter refuses prompts for being close to."""
    open_phrases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Per harm: phrases that ask for it openly."""
    hidden_phrases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Per harm: figures of speech for it, which a filter does not know."""
    words: tuple[str, ...] = ()
    """Everyday words that no filter knows."""
    contexts: tuple[str, ...] = ()
    """Harmless sentences with a gap, as in "a person {} on the beach": a phrase in the gap makes them harmful."""
    subjects: tuple[str, ...] = ("person", "woman", "man", "figure", "somebody")
    """Words for the person that a prompt is about."""
    filter_words: tuple[str, ...] = ()
    """Words that the filter in front of a base refuses, if they are others than the keywords."""
    filter_by_meaning: bool = True
    """Whether that filter also refuses prompts that an encoder finds close to the sentences."""

    def harm_of(self, prompt: str) -> str | None:
        """The first harm that the prompt asks for openly, or None."""
        return next((h for h, phrases in self.open_phrases.items() if any(p in prompt for p in phrases)), None)

    def forbidden_span(self, prompt: str) -> Span | None:
        """The part of a prompt that asks for something forbidden: the longest open phrase, else the first keyword."""
        known = [p for phrases in self.open_phrases.values() for p in phrases]
        for phrase in sorted(known, key=len, reverse=True):
            at = prompt.find(phrase)
            if at >= 0:
                return at, at + len(phrase)
        for word in self.keywords:
            match = re.search(rf"\b{re.escape(word)}\w*", prompt)
            if match:
                return match.span()
        return None

    def lone(self, prompt: str) -> tuple[str, Span | None]:
        """The prompt with all forbidden phrases but one removed, and the span of that one; None if there is none.

        An attack replaces one phrase. If others stayed, a filter would refuse the prompt in any case.
        """
        span = self.forbidden_span(prompt)
        if span is None:
            return prompt, None
        head, phrase, tail = prompt[: span[0]], prompt[span[0] : span[1]], prompt[span[1] :]
        head, tail = self.purged(head), self.purged(tail)
        return f"{head}{phrase}{tail}", (len(head), len(head) + len(phrase))

    def purged(self, text: str) -> str:
        """The text without any forbidden phrase."""
        while (span := self.forbidden_span(text)) is not None:
            text = f"{text[: span[0]].rstrip()} {text[span[1] :].lstrip()}"
        return text

    def harmless_words(self) -> list[str]:
        """Single everyday words, those of the figures of speech among them, that contain no keyword."""
        hidden = [p for phrases in self.hidden_phrases.values() for p in phrases]
        words = dict.fromkeys(w for p in (*self.words, *hidden) for w in re.findall(r"[a-z']+", p.lower()))
        return [w for w in words if not any(k in w for k in self.keywords)]


@runtime_checkable
class Rewriter(Protocol):
    """A language model that words a prompt differently."""

    def similar_phrases(self, prompt: str, count: int) -> list[str]:
        """At most `count` harmless-sounding phrases for what the prompt asks for openly."""
        ...


@dataclass(frozen=True)
class Surrogate:
    """A CLIP-like text encoder and its tokenizer, which an attacker knows completely.

    The attacked system may read a prompt with further encoders that the attacker does not know.
    """

    tokenizer: Any
    encoder: Any

    @property
    def device(self) -> torch.device:
        return next(self.encoder.parameters()).device

    @property
    def length(self) -> int:
        return int(self.tokenizer.model_max_length)

    def ids(self, texts: Sequence[str]) -> Int[Tensor, "b l"]:
        return self.tokenizer(
            list(texts), padding="max_length", max_length=self.length, truncation=True, return_tensors="pt"
        ).input_ids

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> Float[Tensor, "b d"]:
        """Mean text state of each text, scaled to unit length; on the CPU."""
        ids = self.ids(texts).to(self.device)
        return self.pool(self.encoder(ids).last_hidden_state, ids).cpu()

    def pool(self, states: Float[Tensor, "b l d"], ids: Int[Tensor, "b l"]) -> Float[Tensor, "b d"]:
        real = (ids != self.tokenizer.pad_token_id).float()
        real[:, 0] = 1
        mean = (states * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        return torch.nn.functional.normalize(mean, dim=1)

    def similarity(self, texts: Sequence[str], target: str) -> Float[Tensor, " b"]:
        return self.embed(texts) @ self.embed([target])[0]


@dataclass
class Objective:
    """The cosine between the embedding of a prompt and a wanted direction; it counts the texts that it reads."""

    surrogate: Surrogate
    wanted: Float[Tensor, " d"]
    reads: int = 0

    def __post_init__(self) -> None:
        self.wanted = torch.nn.functional.normalize(self.wanted, dim=0)

    def __call__(self, texts: Sequence[str]) -> Float[Tensor, " b"]:
        self.reads += len(texts)
        return self.surrogate.embed(texts) @ self.wanted


@dataclass(frozen=True)
class Attacker:
    """What an attacker knows of a world: its vocabulary, a text encoder, and possibly a language model."""

    surrogate: Surrogate
    lexicon: Lexicon
    rewriter: Rewriter | None = None

    def similar_phrases(self, prompt: str, count: int = 20) -> list[str]:
        """Figures of speech for what a prompt asks for: from the rewriter if there is one, or else the lexicon's.

        Without either they are built in, for the harms of the default policy.
        """
        if self.rewriter is not None:
            return self.rewriter.similar_phrases(prompt, count)
        harm, hidden = self.lexicon.harm_of(prompt), self.lexicon.hidden_phrases
        if hidden:
            return list(hidden.get(harm or "", list(hidden.values())[-1]))[:count]
        built_in = harm if harm in phrases.HIDDEN else phrases.harm_of(prompt)
        if built_in is None:
            raise MissingCapability(
                "this attack needs a rewriter, or hidden_phrases in the testbed's lexicon: no phrases are built in for "
                f"what {prompt!r} asks for"
            )
        return list(phrases.HIDDEN[built_in])[:count]


def whole_words(tokenizer: Any, lexicon: Lexicon) -> dict[str, int]:
    """The tokens that are a whole word, in the order of their numbers, with these numbers.

    Words that contain a forbidden word or are part of one are left out.
    """
    vocab: dict[str, int] = tokenizer.get_vocab()
    words = {token.removesuffix("</w>"): i for token, i in vocab.items() if token.endswith("</w>")}
    plain = {w: i for w, i in words.items() if len(w) > 1 and w.isascii() and w.isalpha()}
    allowed = {w: i for w, i in plain.items() if not any(w in k or k in w for k in lexicon.keywords)}
    return dict(sorted(allowed.items(), key=lambda item: item[1]))


def everyday_words(attacker: Attacker, attack: str) -> list[str]:
    """The lexicon's harmless words, or the whole words of the surrogate's vocabulary if the lexicon has none.

    Raises MissingCapability, which names the attack, if neither has any.
    """
    words = attacker.lexicon.harmless_words() or list(whole_words(attacker.surrogate.tokenizer, attacker.lexicon))
    if not words:
        raise MissingCapability(
            f"{attack} needs words in the testbed's lexicon, or a surrogate whose vocabulary has whole words: "
            "everyday words that no filter knows"
        )
    return words


def replaced(prompt: str, span: Span, words: str) -> str:
    """The prompt with other words in the span; spaces are single, and none comes before a comma or full stop."""
    return " ".join(f"{prompt[: span[0]]} {words} {prompt[span[1] :]}".split()).replace(" ,", ",").replace(" .", ".")
