"""guardpaint.json, the manifest of a guard folder: which parts it has, and the settings it runs with."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from guardpaint.errors import BadCheckpoint
from guardpaint.store.checkpoint import read_json
from guardpaint.store.folders import HUB, Origin
from guardpaint.types import JsonDict

MANIFEST = "guardpaint.json"
VERSION = 2
ROLES = ("auditor", "approver", "repairer", "proposer", "ranker", "seam")
NEEDED = ("auditor", "repairer", "proposer")
"""Parts that every guard has. Without a seam metric in the manifest the auditor's backbone is used, or pixels."""


@dataclass(frozen=True)
class PartEntry:
    """One part of a guard as its manifest describes it."""

    kind: str
    """Its registered name, such as `classifier`."""
    source: str | None
    """Folder inside of the guard's, or hub:owner/name@revision; None if the part has no files."""
    options: JsonDict
    sha256: str | None = None
    """SHA-256 over its files; None if it has none, or if a preset names a model whose files nobody has pinned."""

    def to_dict(self) -> JsonDict:
        return asdict(self)


@dataclass(frozen=True)
class Manifest:
    """What guardpaint.json says. The settings are checked where they are used."""

    config: dict[str, Any]
    parts: Mapping[str, PartEntry]
    """By role."""
    decoders: tuple[str, ...]
    """Families that have a tiny decoder."""
    readouts: dict[str, str]
    """Identity of the readouts that lie beside a decoder, by family."""
    origins: dict[str, Origin] = field(default_factory=dict)
    """The hub's models that the weights in the folder came from, by what they are used for."""


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a guard folder, of version 1 or 2. Anything missing or of a wrong type raises BadCheckpoint."""
    path = directory / MANIFEST
    values = read_json(path)
    if not isinstance(values, dict) or values.get("version") not in (1, VERSION):
        version = values.get("version") if isinstance(values, dict) else None
        raise BadCheckpoint(f"{path}: version {reprlib.repr(version)}, expected 1 or {VERSION}")
    config = entry(path, values, "config", dict)
    decoders = entry(path, values, "decoders", list)
    readouts = entry(path, values, "readouts", dict, {})
    if not all(isinstance(d, str) for d in decoders):
        raise BadCheckpoint(f"{path}: decoders={reprlib.repr(decoders)} are not names of families")
    if not all(isinstance(n, str) for n in [*readouts, *readouts.values()]):
        raise BadCheckpoint(f"{path}: readouts={reprlib.repr(readouts)} are not identities by family")
    parts = first_version(path, values) if values["version"] == 1 else part_entries(path, values)
    origins = {use: origin_entry(path, value) for use, value in entry(path, values, "origins", dict, {}).items()}
    return Manifest(config, parts, tuple(decoders), readouts, origins)


def origin_entry(path: Path, value: Any) -> Origin:
    """One origin: repository, revision and SHA-256, which are texts; the last may be unknown."""
    known = isinstance(value, dict) and set(value) == {"repo", "revision", "sha256"}
    if not known or not all(isinstance(v, str) or (k == "sha256" and v is None) for k, v in value.items()):
        raise BadCheckpoint(f"{path}: origins: {reprlib.repr(value)} is not repo, revision and sha256")
    return Origin(value["repo"], value["revision"], sha256=value["sha256"])


def entry(path: Path, values: Mapping[str, Any], name: str, kind: type, otherwise: Any = ...) -> Any:
    """One entry of a mapping; without `otherwise` it must be there."""
    value = values.get(name, otherwise)
    if value is ...:
        raise BadCheckpoint(f"{path}: has no {name!r}")
    if value is not otherwise and not isinstance(value, kind):
        raise BadCheckpoint(f"{path}: {name}={reprlib.repr(value)} is not a {kind.__name__}")
    return value


def part_entries(path: Path, values: Mapping[str, Any]) -> dict[str, PartEntry]:
    """The parts of a manifest of version 2."""
    parts = entry(path, values, "parts", dict)
    unknown = sorted(str(r) for r in set(parts) - set(ROLES))
    missing = [r for r in NEEDED if r not in parts]
    if unknown or missing:
        raise BadCheckpoint(
            f"{path}: parts {', '.join(unknown)[:200] or 'none'} unknown, {', '.join(missing) or 'none'} missing; "
            f"a guard has {', '.join(ROLES)}"
        )
    return {role: part_entry(path, role, parts[role]) for role in ROLES if role in parts}


def part_entry(path: Path, role: str, value: Any) -> PartEntry:
    """One checked part of a manifest."""
    where = f"parts.{role}"
    if not isinstance(value, dict) or set(value) - {"kind", "source", "options", "sha256"}:
        raise BadCheckpoint(f"{path}: {where}={reprlib.repr(value)} is not kind, source, options and sha256")
    kind = entry(path, value, "kind", str)
    source = entry(path, value, "source", str, None)
    options = entry(path, value, "options", dict, {})
    sha256 = entry(path, value, "sha256", str, None)
    if source is not None and not source.startswith(HUB):
        inside = Path(source)
        if inside.is_absolute() or ".." in inside.parts or not inside.parts:
            raise BadCheckpoint(f"{path}: {where}: source {reprlib.repr(source)} is not a folder inside of the guard's")
        if sha256 is None:
            raise BadCheckpoint(f"{path}: {where} has files, but no sha256 to check them with")
    return PartEntry(kind, source, options, sha256)


def first_version(path: Path, values: Mapping[str, Any]) -> dict[str, PartEntry]:
    """The parts of a manifest of version 1, which had fixed folders and no hashes."""
    repairer = entry(path, values, "repairer", str)
    options = entry(path, values, "repairer_options", dict, {})
    proposer = entry(path, values, "proposer", str)
    knobs = entry(path, values, "knobs", dict, None)
    ranker = entry(path, values, "ranker", bool, False)
    if repairer not in ("inpainter", "native"):
        raise BadCheckpoint(f"{path.parent}: repairer {reprlib.repr(repairer)} is neither inpainter nor native")
    if proposer not in ("learned", "uniform", "fixed") and knobs is None:
        raise BadCheckpoint(f"{path.parent}: proposer {reprlib.repr(proposer)} is none of learned, uniform, fixed")
    if proposer == "learned":
        proposing = PartEntry("learned", "proposer", {})
    elif knobs is not None:
        proposing = PartEntry("fixed", None, {"knobs": knobs, "name": proposer})
    else:
        proposing = PartEntry(proposer, None, {})
    parts = {
        "auditor": PartEntry("auditor-scorer", "auditor", {}),
        "repairer": PartEntry(repairer, "repairer" if repairer == "inpainter" else None, options),
        "proposer": proposing,
    }
    return parts | ({"ranker": PartEntry("ranker", "ranker", {})} if ranker else {})
