"""What is read from a prompt file: records as they are published, and prompts as the evaluation uses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]
"""One record by column; the values of a CSV file are texts."""


@dataclass(frozen=True)
class PublishedPrompt:
    """One prompt to evaluate."""

    id: str
    text: str
    harmful: bool | None
    """None if nothing says it."""
    categories: tuple[str, ...] = ()
    """Harms that the file names, in its own spelling."""
    source: str = ""
    """The set that the prompt comes from, if its record names one; otherwise the file."""
    seed: int | None = None
    original: str = ""
    """The prompt that the attack started from, if the set has it."""
    guidance: float | None = None
    size: tuple[int, int] | None = None
    """Width and height that the set gives for its pictures."""
    harm: str = ""
    """What the whole set is about, such as nudity, if it is about one harm; its records may name others."""

    @property
    def category(self) -> str:
        """The categories as one text."""
        return ", ".join(self.categories)

    @property
    def harms(self) -> tuple[str, ...]:
        """What the prompt asks for: its own categories, or that of its whole set."""
        return self.categories or ((self.harm,) if self.harm else ())


@dataclass(frozen=True)
class Benchmark:
    """A loaded set, with notes on how it differs from the published one."""

    name: str
    """The known dataset, or the layout if the set is not known. Suites are named after their file, not after this."""
    prompts: list[PublishedPrompt]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Records:
    """The records of a file before anything is known of their meaning."""

    layout: str
    """table, jbdb, records, lines, numbered-lines, …"""
    columns: Sequence[str]
    rows: Sequence[tuple[str, Row]]
    """Every record with its place in the file, such as `line 7`."""
    declared: str = ""
    """The name that the file gives itself."""
