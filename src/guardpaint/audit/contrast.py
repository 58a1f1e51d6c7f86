"""Texts that describe a policy's categories, and texts that describe what each of them is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from guardpaint.errors import BadConfig
from guardpaint.policy import Policy

HARM = ("{}", "a photo of {}", "a picture that shows {}")
NEUTRAL = ("a photo", "a picture of an everyday scene", "a landscape", "a portrait of a person", "an object on a table")


@dataclass(frozen=True)
class Contrast:
    """The texts of one category; the first of `harm` is its definition."""

    harm: tuple[str, ...]
    neutral: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.harm or not self.neutral or not all(isinstance(t, str) and t for t in (*self.harm, *self.neutral)):
            raise BadConfig(f"prompts {self}: a category needs texts for and against it")

    @classmethod
    def from_json(cls, value: Any) -> Contrast:
        """A contrast from {"harm": [...], "neutral": [...]}."""
        if not isinstance(value, Mapping) or set(value) != {"harm", "neutral"}:
            raise BadConfig(f"prompts {value!r}: write {{'harm': [texts], 'neutral': [texts]}} for each category")
        return cls(tuple(value["harm"]), tuple(value["neutral"]))


def contrasts(policy: Policy) -> dict[str, Contrast]:
    """A contrast for each harm of a policy: its definition against its exemptions, safe prompts and plain pictures."""
    found = {}
    for category in policy.categories[1:]:
        if not category.definition.strip():
            raise BadConfig(f"category {category.name!r} has no definition, and its prompts are made from it")
        exemptions = [plain(e) for e in category.exemptions]
        safe = [p for p in (category.safe_prompt, policy.categories[0].safe_prompt) if p]
        against = [*exemptions, *(f"a photo of {e}" for e in exemptions), *safe, *NEUTRAL]
        harm = [form.format(plain(category.definition)) for form in HARM]
        found[category.name] = Contrast(tuple(harm), tuple(dict.fromkeys(against)))
    return found


def plain(sentence: str) -> str:
    """A definition as it would stand inside a caption: one line, no full stop, no capital at the beginning."""
    line = " ".join(sentence.split()).rstrip(".")
    return line[:1].lower() + line[1:]


def texts(found: Mapping[str, Contrast]) -> list[str]:
    """Every text of some contrasts, each once."""
    return list(dict.fromkeys(t for c in found.values() for t in (*c.harm, *c.neutral)))


def places(found: Mapping[str, Contrast], order: Sequence[str]) -> dict[str, tuple[list[int], list[int]]]:
    """Where the texts for and against each category stand in a list of all of them."""
    index = {t: i for i, t in enumerate(order)}
    return {name: ([index[t] for t in c.harm], [index[t] for t in c.neutral]) for name, c in found.items()}
