"""Measured results: docs/results/<component>.json beside its raw rows (SPEC §7). Written by commands only.

A file in docs/results names the revision that was measured, so the commands that write there refuse a checkout with
uncommitted changes. Result files do not count as changes, because one command after another writes them.
"""

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

from guardpaint.errors import BadInput
from guardpaint.store.checkpoint import write_atomic, write_json

RESULTS = "docs/results"
SCRATCH = "runs"
"""Folders of a checkout: published results, and what may be thrown away."""


def metric(
    value: float | None,
    n: int,
    *,
    goal: str | None = None,
    ci: tuple[float, float] | None = None,
    note: str = "",
    sure: bool = False,
) -> dict[str, Any]:
    """One metric. `met` says whether the value meets a goal like '<=0.04', or with `sure` the whole interval."""
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
    """Write the JSON, and its rows as gzipped CSV next to it (byte-stable: no timestamp in the archive).

    If the checkout was changed since the command started, the results go to runs/ instead and BadInput says so.
    """
    path = Path(path)
    try:
        require_clean(path)
    except BadInput as error:
        spare = checkout_of(path) / SCRATCH / path.name
        write_files(spare, metrics, rows, seed)
        raise BadInput(f"{error} The measured results are kept in {spare}.") from error
    write_files(path, metrics, rows, seed)


def write_files(path: Path, metrics: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], seed: int) -> None:
    """Write both files, with the command, revision, seed and machine that produced them."""
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


def require_clean(path: str | Path) -> None:
    """Raise BadInput if `path` lies in docs/results of a checkout with uncommitted changes.

    Commands call it before they start to measure. A path anywhere else is always allowed.
    """
    path = Path(path).resolve()
    root = checkout_of(path)
    if not path.is_relative_to(root / RESULTS):
        return
    changed = changed_files(root)
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise BadInput(
            f"{path}: not written, because the checkout has uncommitted changes ({', '.join(changed[:3])}{more}). "
            f"Commit them first, or write outside {RESULTS}, for example to {SCRATCH}/{path.name}."
        )


def checkout_of(path: Path) -> Path:
    """Return the root of the git checkout that `path` is or will be in; the nearest folder if there is none."""
    folder = next(p for p in path.resolve().parents if p.is_dir())
    root = git("rev-parse", "--show-toplevel", folder=folder)
    return Path(root) if root else folder


def changed_files(folder: Path) -> list[str]:
    """Return the tracked files of a checkout that differ from its last commit, without result files."""
    changed = git("diff", "--name-only", "HEAD", "--", ":/", f":(top,exclude){RESULTS}", folder=folder)
    return changed.splitlines()


def git(*words: str, folder: Path) -> str:
    """Return what a git command prints; nothing if it fails or there is no git."""
    try:
        result = subprocess.run(["git", *words], capture_output=True, text=True, check=True, cwd=folder)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return result.stdout.strip()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows beside a results file, with all values as text; none if the file was never written."""
    raw = path.with_suffix(".rows.csv.gz")
    if not raw.exists():
        return []
    return list(csv.DictReader(io.StringIO(gzip.decompress(raw.read_bytes()).decode())))


def command() -> str:
    """The command line of this process, without paths of this machine and without access tokens."""
    program, *rest = sys.argv
    start = ["guardpaint"] if Path(program).name == "guardpaint" else ["python", relative(program)]
    return " ".join([*start, *map(relative, without_tokens(rest))])


def without_tokens(words: Sequence[str]) -> list[str]:
    """Words of a command line with `…` in place of the value of --token."""
    kept = ["--token=…" if word.startswith("--token=") else word for word in words]
    return ["…" if k and kept[k - 1] == "--token" else word for k, word in enumerate(kept)]


def relative(argument: str) -> str:
    """Command-line words without this machine's paths."""
    if os.path.isabs(argument):
        return os.path.relpath(argument)
    return argument


def git_revision(folder: Path) -> str:
    """Return the commit of a checkout, with -dirty if the code was changed since; "unknown" outside of git."""
    head = git("describe", "--always", folder=folder)
    return f"{head}-dirty" if head and changed_files(folder) else head or "unknown"


def machine() -> dict[str, Any]:
    import torch

    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


REVISION = git_revision(Path.cwd())
"""Read when this module is loaded: the code that runs, not what the checkout has become by the end of a long run."""
