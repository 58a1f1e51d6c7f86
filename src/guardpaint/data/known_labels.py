"""Labels that a corpus brings along: by the folder that an image lies in, or by a column of its source.

guardpaint data label corpora/mine --labeler folders:labels.yaml
guardpaint data label corpora/mine --labeler column:rating#labels.yaml

The file maps folders or values to categories of the policy, each to one or to a list. A column that already holds
names of categories needs no file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from guardpaint.data.questions import Answer
from guardpaint.data.sources import FILE
from guardpaint.data.store import Example
from guardpaint.errors import BadConfig, BadInput
from guardpaint.policy import Policy
from guardpaint.types import SAFE

FOLDERS, COLUMN = "folders", "column"


@dataclass(frozen=True)
class KnownLabels:
    """Answers from what the source says; what it does not say, or what the map does not name, is unreadable."""

    policy: Policy
    column: str | None
    """The column with the labels; None if the folder of the image is the label."""
    categories: Mapping[str, tuple[str, ...]]
    """Folder or value → categories."""

    @property
    def name(self) -> str:
        return FOLDERS if self.column is None else f"{COLUMN}-{self.column}"

    def question(self) -> str:
        """What the answers depend on; it distinguishes labels files, as a labeler's question does."""
        return json.dumps([self.name, {k: sorted(v) for k, v in sorted(self.categories.items())}, self.policy.names])

    def read(self, examples: Sequence[Example]) -> list[Answer]:
        """One answer per example: 1 for the categories that the source names, 0 for the others."""
        return [self.by_folder(e) if self.column is None else self.by_column(e, self.column) for e in examples]

    def by_folder(self, example: Example) -> Answer:
        """The category of the innermost folder that the map names."""
        file = example.columns().get(FILE)
        if file is None:
            return Answer(None, "", f"source {example.source} gives its images no path")
        for folder in reversed(PurePosixPath(file).parts[:-1]):
            if folder in self.categories:
                return self.scored(folder)
        return Answer(None, file, f"no folder of {example.source} on its path is in the map")

    def by_column(self, example: Example, column: str) -> Answer:
        columns = example.columns()
        if column not in columns:
            return Answer(None, "", f"source {example.source} kept no column {column!r}; add it to `keep` and ingest")
        value = columns[column]
        text = str(value).strip()
        if text not in self.categories:
            return Answer(None, text, f"value {text!r} of column {column!r} names no category")
        return self.scored(text)

    def scored(self, value: str) -> Answer:
        named = self.categories[value]
        return Answer({n: float(n in named) for n in self.policy.names}, value)


def open_known(spec: str, policy: Policy) -> KnownLabels | None:
    """The labels that `folders:MAP.yaml`, `column:NAME` or `column:NAME#MAP.yaml` means; None for another labeler."""
    kind, _, where = spec.partition(":")
    if kind == FOLDERS:
        if not where:
            raise BadConfig(f"labeler {spec!r}: write folders:MAP.yaml, with a line `folder: category` for each")
        return KnownLabels(policy, None, read_map(Path(where), policy))
    if kind == COLUMN:
        column, _, file = where.partition("#")
        if not column:
            raise BadConfig(f"labeler {spec!r}: write column:NAME or column:NAME#MAP.yaml")
        own = {n: (n,) for n in policy.names}
        return KnownLabels(policy, column, read_map(Path(file), policy) if file else own)
    return None


def read_map(path: Path, policy: Policy) -> dict[str, tuple[str, ...]]:
    """Folder or value → categories, from a YAML mapping."""
    try:
        rows: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadConfig(f"{path}: not YAML ({error})") from error
    if not isinstance(rows, dict) or not rows:
        raise BadConfig(f"{path}: write lines of the form `folder: category`")
    found = {}
    for key, value in rows.items():
        names = tuple(value) if isinstance(value, list) else (value,)
        wrong = [n for n in names if n not in policy.names]
        if wrong or not names or (SAFE in names and len(names) > 1):
            raise BadConfig(
                f"{path}: {key}: {value!r} is no category, or list of harms, of the policy; it has "
                f"{', '.join(policy.names)}"
            )
        found[str(key).strip()] = names
    return found
