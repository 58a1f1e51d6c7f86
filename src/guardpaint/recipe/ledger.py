"""What a recipe's folder remembers of each stage: its settings, the digests of what it read and wrote, and when.

OUT/ledger/STAGE.json is written before a stage starts and when it ends; OUT/ledger/digests.json spares reading files
again that have not changed since.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from guardpaint.recipe.spec import HubModel, Recipe, Stage
from guardpaint.store.checkpoint import read_json, short_hash, write_json

FOLDER = "ledger"
DONE, RUNNING, INTERRUPTED, FAILED = "done", "running", "interrupted", "failed"
LEFT_OVER = (".part",)


@dataclass
class Record:
    """One stage's entry."""

    status: str
    settings: dict[str, Any]
    inputs: dict[str, str]
    """Digest of each input when the stage started."""
    outputs: dict[str, str] = field(default_factory=dict)
    """Digest of each output and update when it ended."""
    started: str = ""
    seconds: float = 0.0
    """All attempts together."""
    memory_gb: float = 0.0
    """Largest resident memory of its processes."""
    exit: int | None = None
    command: str = ""
    commits: dict[str, str] = field(default_factory=dict)
    """Commit of each hub repository that it used, as far as the hub's cache tells."""


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S")


class Ledger:
    """Reads and writes the records of a recipe's folder."""

    def __init__(self, out: Path) -> None:
        self.out, self.folder = out, out / FOLDER
        self.cache_file = self.folder / "digests.json"
        self.cache: dict[str, list[Any]] = read_json(self.cache_file) if self.cache_file.exists() else {}

    def read(self, stage: Stage) -> Record | None:
        path = self.folder / f"{stage.name}.json"
        return Record(**read_json(path)) if path.exists() else None

    def write(self, stage: Stage, record: Record) -> None:
        write_json(self.folder / f"{stage.name}.json", asdict(record))
        write_json(self.cache_file, self.cache)

    # Digests -------------------------------------------------------------------------------------------------

    def matches(self, path: str) -> list[Path]:
        """The files and folders that a path or pattern names, in the recipe's folder or absolute."""
        if Path(path).is_absolute():
            return [Path(path)] if Path(path).exists() else []
        if any(c in path for c in "*?["):
            return sorted(self.out.glob(path))
        return [self.out / path] if (self.out / path).exists() else []

    def digest(self, path: str) -> str:
        """A hash of the names and contents of all files that a path names; empty if there are none."""
        files = [f for place in self.matches(path) for f in files_of(place)]
        return short_hash([(self.name(f), self.content(f)) for f in files]) if files else ""

    def name(self, file: Path) -> str:
        return str(file.relative_to(self.out)) if file.is_relative_to(self.out) else str(file)

    def content(self, file: Path) -> str:
        """SHA-256 of a file's bytes; taken from the cache if its size and time are those of the last reading."""
        stat = file.stat()
        known = self.cache.get(self.name(file))
        if known is not None and known[:2] == [stat.st_size, stat.st_mtime_ns]:
            return str(known[2])
        digest = hashlib.sha256()
        with file.open("rb") as stream:
            while piece := stream.read(1 << 20):
                digest.update(piece)
        self.cache[self.name(file)] = [stat.st_size, stat.st_mtime_ns, digest.hexdigest()]
        return digest.hexdigest()

    def input_digests(self, recipe: Recipe, stage: Stage) -> dict[str, str]:
        """The digest of each input, as the last stage before left it, and of each file that no stage writes."""
        own = {path: self.digest_before(recipe, stage, path) for path in stage.inputs}
        return own | {f.label: self.digest(str(f.path)) for f in stage.reads if f.path.is_file()}

    def digest_before(self, recipe: Recipe, stage: Stage, path: str) -> str:
        """The digest of a path on disk, or, if a later stage has changed it in place, as this stage found it."""
        later = recipe.stages[recipe.stages.index(stage) :]
        updated = [s for s in later if any(u == path for u in s.updates) and self.read(s) is not None]
        for earlier in reversed(recipe.producers(path, stage)) if updated else ():
            record = self.read(earlier)
            if record is not None and path in record.outputs:
                return record.outputs[path]
        return self.digest(path)

    def output_digests(self, stage: Stage) -> dict[str, str]:
        return {path: self.digest(path) for path in (*stage.outputs, *stage.updates)}

    def missing_outputs(self, stage: Stage) -> list[str]:
        """Outputs and updates of which there is no file."""
        return [path for path in (*stage.outputs, *stage.updates) if not any(files_of(p) for p in self.matches(path))]


def cache_of(model: HubModel) -> Path:
    """The folder of a repository in the hub's cache on this machine."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE) / f"{'datasets' if model.dataset else 'models'}--{model.id.replace('/', '--')}"


def commits_of(stage: Stage) -> dict[str, str]:
    """The commit that each hub repository of a stage has in the hub's cache, by its id."""
    refs = {m.id: cache_of(m) / "refs" / (m.revision or "main") for m in stage.models if m.folder is None}
    return {name: ref.read_text(encoding="utf-8").strip() for name, ref in refs.items() if ref.is_file()}


def files_of(place: Path) -> list[Path]:
    """A file itself, or all files in a folder but half-written ones, in order."""
    if place.is_file():
        return [place]
    return sorted(p for p in place.rglob("*") if p.is_file() and p.suffix not in LEFT_OVER)


@dataclass(frozen=True)
class Change:
    """Why a finished or begun stage has to run again."""

    stage: str
    settings: Mapping[str, tuple[Any, Any]]
    """Old and new value of each changed setting."""
    inputs: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    undone: tuple[str, ...] = ()
    """Files that it had changed in place and that the stage before it has written anew."""

    def lines(self) -> list[str]:
        out = [f"{self.stage}: {name} was {old!r} and is now {new!r}" for name, (old, new) in self.settings.items()]
        out += [f"{self.stage}: its input {path} has changed" for path in self.inputs]
        out += [f"{self.stage}: its output {path} is missing" for path in self.missing]
        return out + [f"{self.stage}: what it changed in {path} was written anew" for path in self.undone]


def change_of(ledger: Ledger, recipe: Recipe, stage: Stage, record: Record) -> Change | None:
    """How a stage differs from its record; None if it does not."""
    keys = dict.fromkeys((*record.settings, *stage.settings))
    settings = {
        k: (record.settings.get(k), stage.settings.get(k))
        for k in keys
        if record.settings.get(k) != stage.settings.get(k)
    }
    before, current = record.inputs, ledger.input_digests(recipe, stage)
    inputs = tuple(path for path in current if before.get(path) != current[path])
    missing = tuple(ledger.missing_outputs(stage)) if record.status == DONE else ()
    gone = tuple(p for p in stage.updates if p not in missing and is_undone(ledger, recipe, stage, p))
    change = Change(stage.name, settings, inputs, missing, gone if record.status == DONE else ())
    return change if settings or inputs or missing or change.undone else None


def is_undone(ledger: Ledger, recipe: Recipe, stage: Stage, path: str) -> bool:
    """Whether a file that a stage changed in place is again what an earlier stage wrote, without the change."""
    record = ledger.read(stage)
    if record is None or path not in record.outputs:
        return False
    current = ledger.digest(path)
    before = (ledger.read(earlier) for earlier in recipe.producers(path, stage))
    return current != record.outputs[path] and any(b is not None and b.outputs.get(path) == current for b in before)
