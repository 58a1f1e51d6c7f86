"""Which column of a record holds the prompt, its category, label, seed and settings. Names are read in any case."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from guardpaint.data.prompt_files.records import Records, Row
from guardpaint.errors import BadInput

PROMPTS = {
    "adv_prompt": ("target_prompt", "prompt"),
    "attack_prompt": ("original_prompt",),
    "sensitive prompt": ("normal prompt",),
    "unsafe_prompt": ("safe_prompt",),
    "prompt": (),
    "image_prompt": (),
    "text": (),
    "caption": (),
}
"""Columns that hold the prompt, the first one present counts; each with columns of what the prompt was made from."""
IDS = ("prompt_index", "case_number", "id", "index", "image_id", "custom_id")
CATEGORIES = ("categories", "category", "class", "unsafe_category", "harm_category", "harm_type", "type", "concept")
LABELS = ("label", "orignal_class", "original_class", "safety_label", "harmful", "unsafe", "is_harmful", "is_unsafe")
"""Columns that may say whether a prompt is harmful; the second spelling is a published one."""
SEEDS = ("evaluation_seed", "sd_seed", "seed")
GUIDANCE = ("evaluation_guidance", "sd_guidance_scale", "guidance_scale", "guidance")
SIZES = (("sd_image_width", "sd_image_height"), ("width", "height"))
HARMFUL = {"harmful", "harm", "unsafe", "nsfw", "malicious", "toxic"}
BENIGN = {"benign", "safe", "harmless", "sfw", "normal"}
DISCARD = "discard"
"""What annotators choose for a prompt that they keep neither as harmful nor as benign."""
REQUEST = re.compile(r"\s*\[\s*\{\s*['\"](role|content)['\"]")


def prompt_column(path: Path, records: Records, wanted: str | None) -> str:
    """The column of the prompts: the named one, or the first known name; raises BadInput if there is none."""
    listed = ", ".join(records.columns)
    if wanted is not None:
        named = find(records.columns, (wanted,))
        if named is None:
            raise BadInput(f"{path}: no column {wanted!r}; there are {listed}")
        return named
    column = find(records.columns, tuple(PROMPTS))
    if column is None:
        raise BadInput(f"{path}: no column is known to hold prompts; name one with --column: {listed}")
    if all(REQUEST.match(text_of(row, column)) for _, row in records.rows):
        raise BadInput(
            f"{path}: column {column!r} holds chat requests, as in a log, and no prompts; if they are meant, say "
            f"--column {column}"
        )
    return column


def find(columns: Sequence[str], names: Sequence[str]) -> str | None:
    """The first of these names that is a column, in the column's own spelling."""
    spelled = {c.lower(): c for c in columns}
    return next((spelled[n.lower()] for n in names if n.lower() in spelled), None)


def value_of(row: Row, names: Sequence[str]) -> Any:
    """The value of the first of these columns that the record has and that is not blank."""
    spelled = {k.lower(): k for k in row}
    values = (row[spelled[n]] for n in names if n in spelled)
    return next((v for v in values if v is not None and v != "" and v != []), None)


def text_of(row: Row, *names: str) -> str:
    """The text of the first of these columns that is not blank."""
    spelled = {k.lower(): k for k in row}
    values = (row[spelled[n.lower()]] for n in names if n.lower() in spelled)
    return next((str(v).strip() for v in values if v is not None and str(v).strip()), "")


def prompt_text(row: Row, column: str) -> str:
    """The prompt of a record. A picture with words on it is joined as the authors of that set join the two."""
    text = text_of(row, column)
    words = text_of(row, "text_prompt") if column.lower() == "image_prompt" else ""
    return f"{text}, with a sign that says '{words}'" if text and words else text


def categories_of(row: Row) -> tuple[str, ...]:
    """Harms that a record names: the keys of a `label` that is an object, or a column with one or several names."""
    label = row.get("label")
    if isinstance(label, Mapping):
        return tuple(map(str, label))
    value = value_of(row, CATEGORIES)
    if isinstance(value, (list, tuple)):
        return tuple(str(v).strip() for v in value if v is not None and str(v).strip())
    names = str(value).split(",") if value is not None else []
    return tuple(dict.fromkeys(name.strip() for name in names if name.strip()))


def meaning(value: Any, numbers: bool) -> bool | None:
    """What a label says; None if it says nothing known. With `numbers`, 1 is harmful and 0 benign."""
    spelled = str(value).strip().lower()
    if spelled in HARMFUL or (numbers and spelled in ("1", "true")):
        return True
    if spelled in BENIGN or (numbers and spelled in ("0", "false")):
        return False
    return None


def labels_of(path: Path, records: Records, numbers: bool) -> list[bool | None]:
    """What every record says of itself. A label column with other words, such as names of classes, says nothing.

    In a JailbreakDiffusionBench file the column can only mean this, so there another word raises BadInput.
    """
    column = find(records.columns, LABELS)
    if column is None:
        return [None] * len(records.rows)
    strict = records.layout == "jbdb" and column.lower() == "label"
    numbers = numbers or strict or column.lower() in LABELS[4:]
    values = [(place, row.get(column)) for place, row in records.rows]
    said = [(place, v, meaning(v, numbers)) for place, v in values if v is not None and v != ""]
    unknown = [(place, v) for place, v, m in said if m is None]
    if strict and unknown:
        raise BadInput(f"{path}: {unknown[0][0]}: label {unknown[0][1]!r} is neither harmful nor benign")
    if unknown:
        return [None] * len(records.rows)
    return [None if v is None or v == "" else meaning(v, numbers) for _, v in values]


def whole(value: Any) -> int | None:
    """The value as an integer; None if it is blank or no number."""
    try:
        return int(value)
    except (TypeError, ValueError):
        number = real(value)
        return int(number) if number is not None else None


def real(value: Any) -> float | None:
    """The value as a finite number; None if it is blank or none."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if abs(number) < float("inf") else None


def size_of(row: Row) -> tuple[int, int] | None:
    """Width and height, if a record has both."""
    for width, height in SIZES:
        both = whole(value_of(row, (width,))), whole(value_of(row, (height,)))
        if both[0] and both[1]:
            return both[0], both[1]
    return None
