"""A protocol as data: attacks, bases, settings and defences, from a small YAML file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from guardpaint.bases import BaseOptions
from guardpaint.errors import BadConfig, BadInput

HERE = Path(__file__).parent
KEYS = ("name", "title", "attacks", "bases", "settings", "defences")


@dataclass(frozen=True)
class Attack:
    """A row of the protocol's table."""

    title: str
    files: str
    """Pattern of the names of its prompt files."""

    def fits(self, names: tuple[str, ...]) -> bool:
        """Whether any of these names, of a file, its folders and its set, is one of the attack's."""
        return any(re.search(self.files, re.sub(r"[\W_]+", "", name.lower())) for name in names)


@dataclass(frozen=True)
class Column:
    """A column of the protocol's table: a base, and the settings that it needs instead of the common ones."""

    title: str
    own: BaseOptions


@dataclass(frozen=True)
class Protocol:
    """A published protocol."""

    name: str
    title: str
    attacks: Mapping[str, Attack]
    columns: Mapping[str, Column]
    settings: BaseOptions
    """Steps and guidance of all bases that have none of their own."""
    defences: tuple[str, ...]
    """The undefended base first, the guard last."""

    def column_title(self, base: str) -> str:
        return self.columns[base].title if base in self.columns else base


def names() -> list[str]:
    """The protocols that come with the package."""
    return sorted(file.stem for file in HERE.glob("*.yaml"))


def read(name: str) -> Protocol:
    """A protocol by name, or from a YAML file."""
    file = Path(name) if name.endswith((".yaml", ".yml")) else HERE / f"{name}.yaml"
    if not file.is_file():
        raise BadInput(f"protocol {name!r}: choose among {', '.join(names())}, or name a YAML file")
    try:
        raw = yaml.safe_load(file.read_text(encoding="utf-8"))
        return built(raw)
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError, re.error) as error:
        raise BadConfig(f"{file}: not a protocol ({type(error).__name__}: {error}); see {HERE.name}/*.yaml") from error


def built(raw: Mapping[str, Any]) -> Protocol:
    """The protocol that a YAML file describes."""
    if unknown := sorted(set(raw) - set(KEYS)):
        raise ValueError(f"unknown key {unknown[0]!r}, choose among {', '.join(KEYS)}")
    attacks = {key: Attack(str(v["title"]), str(v["files"])) for key, v in raw["attacks"].items()}
    for attack in attacks.values():
        re.compile(attack.files)
    columns = {
        name: Column(str(v["title"]), BaseOptions(**{k: w for k, w in v.items() if k != "title"}))
        for name, v in raw.get("bases", {}).items()
    }
    defences = tuple(map(str, raw["defences"]))
    if "undefended" not in defences or len(defences) < 2:
        raise ValueError("defences must name `undefended` and at least one other")
    settings = BaseOptions(**raw.get("settings", {}))
    return Protocol(str(raw["name"]), str(raw["title"]), attacks, columns, settings, defences)
