"""Measured results: docs/results/<component>.json beside its raw rows (SPEC §7). Written by commands only."""

from __future__ import annotations

import csv
import gzip
import io
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from guardpaint.store.checkpoint import write_atomic, write_json


def metric(
    value: float | None,
    n: int,
    *,
    goal: str | None = None,
    ci: tuple[float, float] | None = None,
    note: str = "",
    sure: bool = False,
) -> dict[str, Any]:
    """One metric; `goal` like '<=0.04' decides `met`, by the whole interval if it must be sure."""
    row: dict[str, Any] = {"value": value, "n": n}
    if ci is not None:
        row["ci"] = list(ci)
    if goal is not None:
        row["goal"] = goal
        row["met"] = value is not None and all(meets(v, goal) for v in ((ci or (math.nan,)) if sure else (value,)))
        if sure:
            row["by"] = "interval"
    if note:
        row["note"] = note
    return row


def meets(value: float, goal: str) -> bool:
    for sign, test in (("<=", float.__le__), (">=", float.__ge__), ("<", float.__lt__), (">", float.__gt__)):
        if goal.startswith(sign):
            return bool(test(float(value), float(goal[len(sign) :])))
    raise ValueError(f"goal {goal!r}: write <=x, >=x, <x or >x")


def write_results(path: str | Path, metrics: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], seed: int) -> None:
    """The JSON, and its rows as gzipped CSV next to it (byte-stable: no timestamp in the archive)."""
    path = Path(path)
    raw = path.with_suffix(".rows.csv.gz")
    text = io.StringIO()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(raw, gzip.compress(text.getvalue().encode(), mtime=0))
    write_json(
        path,
        {
            "command": command(),
            "git": REVISION,
            "seed": seed,
            "machine": machine(),
            "raw": raw.name,
            "metrics": dict(metrics),
        },
    )


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows beside a results file, with all values as text; none if the file was never written."""
    raw = path.with_suffix(".rows.csv.gz")
    if not raw.exists():
        return []
    return list(csv.DictReader(io.StringIO(gzip.decompress(raw.read_bytes()).decode())))


def command() -> str:
    """What was typed, as anybody could type it."""
    program, *rest = sys.argv
    start = ["guardpaint"] if Path(program).name == "guardpaint" else ["python", relative(program)]
    return " ".join([*start, *map(relative, rest)])


def relative(argument: str) -> str:
    """Command-line words without this machine's paths."""
    if os.path.isabs(argument):
        return os.path.relpath(argument)
    return argument


def git_revision() -> str:
    try:
        head = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip()


def machine() -> dict[str, Any]:
    import torch

    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


REVISION = git_revision()
"""Read when this module is loaded: the code that runs, not what the checkout has become by the end of a long run."""
