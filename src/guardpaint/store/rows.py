"""Append-only JSONL files: one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from guardpaint.errors import BadInput


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a file; none if it does not exist.

    A half-written last line is what a crash leaves behind, and is dropped. Any other line that is not a JSON object
    raises BadInput with its number.
    """
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise BadInput(f"{path}:{number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise BadInput(f"{path}:{number}: not a JSON object")
        rows.append(row)
    return rows


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add rows at the end of a file, after repairing a last line that a crash cut short.

    A whole last line that only lacks its newline is kept.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        repair_end(file)
        file.writelines((json.dumps(dict(row), ensure_ascii=False) + "\n").encode() for row in rows)


def repair_end(file: Any) -> None:
    """End the file with a whole line: complete the last one if it is JSON, drop it otherwise."""
    end = start = file.seek(0, 2)
    tail = b""
    while start and b"\n" not in tail:
        start = max(0, start - 65_536)
        file.seek(start)
        tail = file.read(end - start)
    last = tail[tail.rfind(b"\n") + 1 :]
    if not last:
        return
    try:
        json.loads(last)
    except ValueError:
        file.truncate(end - len(last))
    else:
        file.write(b"\n")
