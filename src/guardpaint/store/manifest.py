"""guardpaint.json, the manifest of a guard folder: which parts it has, and the settings it runs with."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guardpaint.errors import BadCheckpoint
from guardpaint.store.checkpoint import read_json

MANIFEST = "guardpaint.json"
VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """What guardpaint.json says. The settings are checked where they are used."""

    config: dict[str, Any]
    decoders: tuple[str, ...]
    """Families that have a tiny decoder."""
    repairer: str
    proposer: str
    knobs: dict[str, Any] | None
    """Those of a fixed proposer."""
    ranker: bool
    readouts: dict[str, str]
    """Identity of the readouts that lie beside a decoder, by family."""


KINDS: dict[str, tuple[type, Any]] = {
    "config": (dict, ...),
    "decoders": (list, ...),
    "repairer": (str, ...),
    "proposer": (str, ...),
    "knobs": (dict, None),
    "ranker": (bool, False),
    "readouts": (dict, {}),
}
"""The type of each entry, and what stands for it where it is left out; … must be there."""


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a guard folder. Anything that is missing or of the wrong type raises BadCheckpoint."""
    path = directory / MANIFEST
    values = read_json(path)
    if not isinstance(values, dict) or values.get("version") != VERSION:
        version = values.get("version") if isinstance(values, dict) else None
        raise BadCheckpoint(f"{path}: version {reprlib.repr(version)}, expected {VERSION}")
    found = {}
    for name, (kind, otherwise) in KINDS.items():
        value = values.get(name, otherwise)
        if value is not otherwise and not isinstance(value, kind):
            raise BadCheckpoint(f"{path}: {name}={reprlib.repr(value)} is not a {kind.__name__}")
        if value is ...:
            raise BadCheckpoint(f"{path}: has no {name!r}")
        found[name] = value
    if not all(isinstance(d, str) for d in found["decoders"]):
        raise BadCheckpoint(f"{path}: decoders={reprlib.repr(found['decoders'])} are not names of families")
    names = [*found["readouts"], *found["readouts"].values()]
    if not all(isinstance(n, str) for n in names):
        raise BadCheckpoint(f"{path}: readouts={reprlib.repr(found['readouts'])} are not identities by family")
    return Manifest(**{**found, "decoders": tuple(found["decoders"])})
