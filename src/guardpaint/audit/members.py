"""Parts that are made of other parts: how those are saved, opened, moved and named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from guardpaint.audit.part import CARD, Graded, card_of, write_card
from guardpaint.errors import BadCheckpoint, BadConfig
from guardpaint.parts.kinds import SavedPart, kind_of, part_class


def save_members(role: str, part: Graded, members: Sequence[Any], folder: Path) -> None:
    """Save a part that is made of others: its card, and each member in a numbered subfolder."""
    kinds = [kind_of(role, m) for m in members]  # before anything is written
    for number, member in enumerate(members):
        member.save_pretrained(folder / str(number))
    entries = [{"kind": k, "options": m.options()} for k, m in zip(kinds, members, strict=True)]
    write_card(folder, part.kind, part.options(), members=entries)


def open_members(role: str, kind: str, folder: Path) -> list[Any]:
    """The members of a saved part, each opened from its subfolder with its own options."""
    entries = card_of(folder, kind).get("members")
    if not isinstance(entries, list) or not entries:
        raise BadCheckpoint(f"{folder / CARD}: names no members")
    try:
        named = [(str(m["kind"]), dict(m["options"])) for m in entries]
    except (TypeError, KeyError, ValueError) as error:
        raise BadCheckpoint(f"{folder / CARD}: a member needs kind and options ({error!r})") from error
    return [
        part_class(role, name).from_pretrained(folder / str(number), **options)
        for number, (name, options) in enumerate(named)
    ]


def digests(members: Sequence[Any]) -> list[str]:
    """The digests of parts; one that has none is an error."""
    nameless = [type(m).__name__ for m in members if not isinstance(m, SavedPart)]
    if nameless:
        raise BadConfig(f"{', '.join(nameless)}: without kind, options() and digest() nobody can tell which one ran")
    return [m.digest() for m in members]


def move(members: Sequence[Any], device: Any) -> None:
    """Move every member that can be moved; a foreign part may have nothing to move."""
    for member in members:
        if hasattr(member, "to"):
            member.to(device)
