"""Attack the service and the library from the outside, fuzz it and soak it, all on loopback: docs/results/redteam.json.

    python bench/redteam.py [--only uploads --only logs.strange_anchors] [--jobs 3] [--without soak]
    python bench/redteam.py --list

At most 15 minutes on two cores. Rows are kept in runs/redteam as they are made, so an interrupted run goes on where it
stopped; a row counts as long as the code is the same, and what `--only` names is done again. The file says what got
through, not the exit code.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from attempts import (
    Outcome,
    connections,
    contracts,
    faults,
    hangups,
    loading,
    logs,
    memory,
    pipelines,
    policies,
    prompts,
    queues,
    rest,
    scores,
    sizes,
    uploads,
)
from attempts.stand import SHARED
from redteam_results import OUT, write

from guardpaint.store.results import REVISION, require_clean
from guardpaint.store.rows import append_rows, read_rows

Attempt = Callable[[], Outcome]
GROUPS = (
    connections, hangups, queues, memory, logs, loading, policies, sizes, faults, scores, uploads, prompts, rest,
    contracts, pipelines,
)  # fmt: skip
"""The slow ones first, so that none of them is left alone at the end."""
KEPT = Path("runs/redteam")
HERE = Path(__file__).parent
LIMIT = 15 * 60
PARTS = ("attempt", "fuzz", "soak")


def attempts() -> dict[str, Attempt]:
    """All attempts by name."""
    return {f"{group_of(g)}.{a.__name__}": a for g in GROUPS for a in g.ATTEMPTS}


def group_of(module: Any) -> str:
    return str(module.__name__).rpartition(".")[2]


def chosen(names: Sequence[str]) -> dict[str, Attempt]:
    """The attempts that the names ask for: whole groups, or single ones. No name asks for all."""
    found = {n: a for n, a in attempts().items() if not names or any(n == k or n.startswith(f"{k}.") for k in names)}
    unknown = [k for k in names if not any(n == k or n.startswith(f"{k}.") for n in found)]
    if unknown:
        raise SystemExit(f"--only {unknown[0]}: no such attempt or group; --list shows them")
    return found


def tried(name: str, attempt: Attempt) -> dict[str, Any]:
    """One row. An attempt that breaks has not shown anything, so it does not count as expected."""
    began = time.perf_counter()
    try:
        outcome = attempt()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"the attempt broke at {Path(where.filename).name}:{where.lineno}: {type(error).__name__}: {error}"
        outcome = Outcome("an outcome", text[:300], False)
    row = {"attempt": name, "group": name.partition(".")[0], "expected": outcome.expected, "got": outcome.got}
    return {**row, "as_expected": bool(outcome.as_expected), "seconds": round(time.perf_counter() - began, 2)}


class Kept:
    """Rows of this revision that an earlier run made, and a place for new ones."""

    def __init__(self, path: Path, again: set[str]) -> None:
        self.path, self.lock = path, threading.Lock()
        known = (
            {} if REVISION.endswith("-dirty") else {r["attempt"]: r for r in read_rows(path) if r["git"] == REVISION}
        )
        self.rows = {name: row for name, row in known.items() if name not in again}

    def add(self, row: dict[str, Any]) -> None:
        with self.lock:
            self.rows[row["attempt"]] = row
            append_rows(self.path, [{**row, "git": REVISION}])


def run_attempts(found: dict[str, Attempt], kept: Kept, jobs: int, ends: float) -> list[dict[str, Any]]:
    """The rows of these attempts, several at once; those that do not begin in time are left out and said so."""
    todo = {n: a for n, a in found.items() if n not in kept.rows}
    print(f"{len(found)} attempts, {len(todo)} to do, {jobs} at once", flush=True)
    count = 0

    def one(item: tuple[str, Attempt]) -> None:
        nonlocal count
        name, attempt = item
        if time.monotonic() > ends:
            print(f"out of time: {name}", flush=True)
            return
        row = tried(name, attempt)
        kept.add(row)
        count += 1
        mark = "as expected" if row["as_expected"] else "GOT THROUGH"
        print(f"[{count}/{len(todo)}] {mark:11} {row['seconds']:6.1f} s  {name}: {row['got']}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, todo.items()))
    for service in SHARED:
        service.close()
    return [kept.rows[n] for n in found if n in kept.rows]


def started(script: str, *words: str) -> subprocess.Popen[bytes]:
    """Another script of this folder, beside this process."""
    return subprocess.Popen([sys.executable, str(HERE / script), *words], env={**os.environ, "OMP_NUM_THREADS": "1"})


def beside(args: argparse.Namespace) -> dict[str, tuple[subprocess.Popen[bytes], Path]]:
    """The soak and the fuzzing, each as a process of its own that writes its rows into a file."""
    wanted = [p for p in ("soak", "fuzz") if p not in args.without and not args.only]
    running = {}
    for part in wanted:
        path = KEPT / f"{part}.jsonl"
        path.unlink(missing_ok=True)
        words = ("--requests", str(args.requests)) if part == "soak" else ("--inputs", str(args.inputs))
        running[part] = (started(f"{part}.py", "--rows", str(path), *words), path)
    return running


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="a group or an attempt; repeat")
    parser.add_argument("--without", action="append", default=[], choices=PARTS, help="leave a part out; repeat")
    parser.add_argument("--jobs", type=int, default=3, help="attempts at once; most of their time they wait")
    parser.add_argument("--requests", type=int, default=1000, help="requests of the soak")
    parser.add_argument("--inputs", type=int, default=10_000, help="inputs of each kind of fuzzing")
    parser.add_argument("--list", action="store_true", help="print the names of all attempts")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args()


def main() -> None:
    args = parsed()
    os.environ |= {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "DIFFUSERS_VERBOSITY": "error"}
    if args.list:
        print("\n".join(attempts()))
        return
    require_clean(args.out)
    KEPT.mkdir(parents=True, exist_ok=True)
    found = {} if "attempt" in args.without else chosen(args.only)
    ends = time.monotonic() + LIMIT - 90
    running = beside(args)
    try:
        kept = Kept(KEPT / "attempts.jsonl", set(found) if args.only else set())
        rows = run_attempts(found, kept, args.jobs, ends) if found else []
        for part, (process, _) in running.items():
            try:
                process.wait(max(30.0, ends + 60 - time.monotonic()))
            except subprocess.TimeoutExpired:
                print(f"out of time: {part}", flush=True)
    finally:
        for process, _ in running.values():
            process.terminate()  # it ends its service first
            process.wait(90)
    if args.only:
        rows = [kept.rows[n] for n in attempts() if n in kept.rows]
    shown: dict[str, Any] = {}
    if rows:
        shown = write("attempt", rows, args.out)
    for part, (process, path) in running.items():
        if process.returncode == 0:
            shown = write(part, read_rows(path), args.out)
        else:
            print(f"{part} ended with code {process.returncode}; its rows are not written", flush=True)
    for name, m in shown.items():
        if not name.startswith("attempt."):
            print(f"{name:36} {m['value']}  {m.get('goal', '')} {'' if m.get('met', True) else 'NOT MET'}")


if __name__ == "__main__":
    main()
