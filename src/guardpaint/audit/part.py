"""What auditors and approvers share: options, levels, a card beside the weights, and a digest.

A part is saved as its weights in the usual layout and a card, `part.json`, with its kind and its options. Parts
that are made of others keep them in numbered subfolders, and the card lists their kinds.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from guardpaint.audit.levels import checked_levels
from guardpaint.errors import BadCheckpoint, BadConfig
from guardpaint.store.checkpoint import read_json, sha256_hex, write_json
from guardpaint.types import JsonDict

CARD = "part.json"
S = TypeVar("S")
G = TypeVar("G", bound="Graded")


class Graded:
    """A part whose settings are one frozen dataclass, with a level for each category among them."""

    kind: ClassVar[str]
    categories: tuple[str, ...]
    settings: Any

    @property
    def levels(self) -> dict[str, float]:
        """The level of every harm that this part covers."""
        return checked_levels(self.settings.levels, self.categories)

    def options(self) -> JsonDict:
        """Everything but the weights, as JSON values."""
        return json.loads(json.dumps(asdict(self.settings)))

    def with_levels(self: G, levels: Mapping[str, float]) -> G:
        """The same part, sharing its weights, with other levels for the categories that are named."""
        twin = copy.copy(self)
        twin.settings = replace(self.settings, levels=checked_levels({**self.levels, **levels}, self.categories))
        return twin


def settings_from(shape: type[S], values: Mapping[str, Any], kind: str) -> S:
    """The settings of a part from options that may come from JSON."""
    known = [f.name for f in fields(shape)]  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise BadConfig(f"{kind}: unknown option(s) {', '.join(unknown)}; it has {', '.join(known)}")
    try:
        return shape(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
    except TypeError as error:
        raise BadConfig(f"{kind}: {error}") from error


def write_card(folder: Path, kind: str, options: JsonDict, **more: Any) -> None:
    """Write a part's kind and options, and whatever else its kind wants to remember."""
    write_json(folder / CARD, {"kind": kind, "options": options, **more})


def read_card(folder: Path, kind: str) -> JsonDict:
    """The options in a folder's card; none if the folder has no card, as on the hub."""
    return card_of(folder, kind).get("options", {}) if (folder / CARD).exists() else {}


def card_of(folder: Path, kind: str) -> JsonDict:
    """A folder's card. Raises BadCheckpoint if it belongs to a part of another kind."""
    card = read_json(folder / CARD)
    if not isinstance(card, dict) or card.get("kind") != kind:
        raise BadCheckpoint(f"{folder / CARD}: not the card of a part of kind {kind!r}")
    return card


def digest_of(part: Graded, *contents: str) -> str:
    """SHA-256 over a part's kind, its options and the digests of its weights."""
    return sha256_hex(json.dumps([part.kind, part.options(), *contents], sort_keys=True))
