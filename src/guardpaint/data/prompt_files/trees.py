"""Finds the records in the shapes of JSON in which prompt sets are published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from guardpaint.data.prompt_files.records import Records, Row
from guardpaint.errors import BadInput

TEXT = "prompt"


def records_of(path: Path, value: Any) -> Records:
    """The records of a JSON value, whatever they are nested in."""
    if isinstance(value, list):
        return from_list(path, value)
    if not isinstance(value, dict) or not value:
        raise BadInput(f"{path}: neither an object nor a list of records")
    if isinstance(value.get("prompts"), list):
        found = from_list(path, value["prompts"], "prompt")
        name = value.get("name")
        layout = "jbdb" if found.layout == "records" else found.layout
        return Records(layout, found.columns, found.rows, name if isinstance(name, str) else "")
    sections = {k: v for k, v in value.items() if k.endswith("_data") and is_table(v)}
    if sections:
        rows = [
            (f"{k}[{i}]", {**r, "section": k.removesuffix("_data")})
            for k, v in sections.items()
            for i, r in enumerate(v)
        ]
        return records("sections", rows)
    if all(isinstance(v, dict) for v in value.values()):
        return records("keyed", [(f"record {k!r}", {"id": str(k), **r}) for k, r in value.items()])
    lists = [k for k, v in value.items() if is_table(v)]
    if len(lists) == 1:
        return from_list(path, value[lists[0]])
    raise BadInput(
        f'{path}: neither {{"prompts": [...]}} nor a list or dictionary of records; its keys are '
        + ", ".join(map(str, list(value)[:12]))
    )


def is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(r, dict) for r in value)


def from_list(path: Path, items: Sequence[Any], noun: str = "record") -> Records:
    """Records of a list of objects, texts, or [id, category, prompt]."""
    if not items:
        raise BadInput(f"{path}: no records")
    if all(isinstance(item, str) for item in items):
        return records("strings", [(f"{noun} {i}", {"id": str(i), TEXT: item}) for i, item in enumerate(items)])
    if all(isinstance(item, list) for item in items):
        return triples(path, items)
    for i, item in enumerate(items):
        if not isinstance(item, dict):
            raise BadInput(f"{path}: {noun} {i} is no object, but {type(item).__name__}")
    if all(isinstance(item.get("data"), dict) for item in items):
        return records("label-studio", [(f"{noun} {i}", annotated(item)) for i, item in enumerate(items)])
    if all(isinstance(item.get("body"), dict) and "messages" in item["body"] for item in items):
        return records("chat-requests", [(f"{noun} {i}", asked(item)) for i, item in enumerate(items)])
    return records("records", [(f"{noun} {i}", item) for i, item in enumerate(items)])


def records(layout: str, rows: Sequence[tuple[str, Row]]) -> Records:
    """Records whose columns are all keys that occur, in the order of their first occurrence."""
    return Records(layout, list(dict.fromkeys(k for _, row in rows for k in row)), rows)


def triples(path: Path, items: Sequence[list[Any]]) -> Records:
    """Records of lists without key names, of which only [id, category, prompt] is known."""
    for i, item in enumerate(items):
        if len(item) != 3 or not all(isinstance(v, str) for v in item) or not item[0].strip().isdigit():
            raise BadInput(f"{path}: record {i} is a list, but not [number, category, prompt]")
    return records(
        "triples",
        [(f"record {i}", dict(zip(("id", "category", TEXT), item, strict=True))) for i, item in enumerate(items)],
    )


def annotated(item: dict[str, Any]) -> Row:
    """A Label Studio task as a flat record; annotators' choices, cancelled ones too, replace its category."""
    choices = [
        choice
        for annotation in item.get("annotations") or ()
        for result in annotation.get("result") or ()
        for choice in (result.get("value") or {}).get("choices") or ()
    ]
    return {**item["data"], **({"category": list(dict.fromkeys(choices))} if choices else {})}


def asked(item: dict[str, Any]) -> Row:
    """A chat request as a record: its prompt is what the user says; system messages are instructions."""
    said = [m.get("content") for m in item["body"]["messages"] if isinstance(m, dict) and m.get("role") == "user"]
    return {"id": str(item.get("custom_id", "")), TEXT: "\n".join(s for s in said if isinstance(s, str))}
