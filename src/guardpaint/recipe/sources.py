"""Files outside of a recipe's folder that its commands read: policies, testbeds, manifests, and what those two name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from guardpaint.policy import policy_file

YAML = (".yaml", ".yml")
LOCAL = ("parquet", "jsonl", "csv", "imagefolder", "webdataset")
"""Formats of a manifest's sources that are read from this machine."""


@dataclass(frozen=True)
class SourceFile:
    """A file or folder that a command reads and no stage writes."""

    label: str
    """What a ledger calls it; it does not change when the recipe's files are moved together."""
    path: Path
    named_by: str = ""
    """The file that names it, if it is not on the command line."""

    @property
    def there(self) -> bool:
        """Whether it is there, as far as a path without wildcards can tell."""
        return any(c in str(self.path) for c in "*{") or self.path.exists()


def source_files(options: Mapping[str, Any], words: Sequence[str], out: Path) -> tuple[SourceFile, ...]:
    """The files that the options and words of a command name: policies, and YAML files with what they name."""
    found: list[SourceFile] = []
    for key, value in (*leaves(options), *(("", word) for word in words)):
        if not isinstance(value, str):
            continue
        if key == "policy":
            found.append(SourceFile(f"policy {Path(value).name}", policy_file(value).absolute()))
        elif value.endswith(YAML) and Path(value).is_file() and not Path(value).is_relative_to(out / "configs"):
            path = Path(value).absolute()
            found += [SourceFile(path.name, path), *named_in(path)]
    return tuple(dict.fromkeys(found))


def named_in(path: Path) -> Iterator[SourceFile]:
    """The files that a testbed's or a manifest's YAML file names; nothing for a file that is neither."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return  # the command that reads it says what is wrong
    if not isinstance(data, Mapping):
        return
    sources = data.get("sources")
    if isinstance(sources, list):  # a manifest, whose paths are relative to where commands run
        for row in sources:
            if isinstance(row, Mapping) and row.get("format") in LOCAL:
                for key in ("path", "root"):
                    if isinstance(row.get(key), str):
                        yield SourceFile(f"{path.name}: {row[key]}", Path(row[key]).absolute(), path.name)
        return
    for key, value in leaves(data):  # a testbed, whose files are relative to its own folder
        if isinstance(value, str) and (key == "file" or is_beside(value, path)):
            yield SourceFile(f"{path.name}: {value}", (path.parent / value).absolute(), path.name)


def is_beside(value: str, path: Path) -> bool:
    """Whether a text is the name of a file in the folder of another file."""
    try:
        return bool(value.strip()) and len(value) < 200 and "\n" not in value and (path.parent / value).is_file()
    except (OSError, ValueError):
        return False


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value inside nested mappings and lists, with the key that it is under."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from leaves(part, str(name))
    elif isinstance(value, list):
        for part in value:
            yield from leaves(part, key)
    else:
        yield key, value
