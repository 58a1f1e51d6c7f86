"""Device truth: planted leaks and every stage's step under the other device, into docs/results/recipe.json.

    python bench/recipe_devices.py                     # runs the tests that hold them, one after the other
    python bench/recipe_devices.py --out runs/recipe.json

The leaks are tests/testing/test_other_device.py; a stage is a test called `test_stage_…` in a test_other_device_*.py.
Other scripts write the same file; their numbers and rows stay.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from guardpaint.store.checkpoint import read_json
from guardpaint.store.results import REVISION, metric, read_rows, require_clean, write_results

OUT = Path("docs/results/recipe.json")
TESTS = Path(__file__).parents[1] / "tests"
PART = "device_truth"
KINDS = {"stage": "test_stage_", "leak": "test_planted_leak_is_found"}
Row = dict[str, Any]


def files() -> list[str]:
    return [str(TESTS / "testing/test_other_device.py"), *map(str, sorted(TESTS.rglob("test_other_device_*.py")))]


def measured(names: Sequence[str]) -> list[Row]:
    """A row per stage and per planted leak: whether its test passed, and its seconds without shared preparation."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow or not slow"]
        options = [f"--junitxml={report}", "-o", "junit_duration_report=call", "-o", "junit_family=xunit1"]
        subprocess.run([*command, *options, *names], check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
        return rows_of(ElementTree.parse(report))


def rows_of(report: ElementTree.ElementTree[Any]) -> list[Row]:
    """Rows of a test report; a test that was skipped did not pass."""
    rows: list[Row] = []
    for case in report.iter("testcase"):
        name = str(case.get("name"))
        for kind, start in KINDS.items():
            if name.startswith(start):
                group = str(case.get("classname")).split(".")[-1].removeprefix("test_other_device_")
                passed = not any(case.find(bad) is not None for bad in ("failure", "error", "skipped"))
                what = name.removeprefix(start).strip("[]").replace("[", " ")
                label = f"{group}: {what}" if kind == "stage" else what
                rows.append({"kind": kind, "name": label, "passed": int(passed), "seconds": case.get("time")})
    return rows


def metrics(rows: Sequence[Row]) -> Row:
    """How many stages ran on the other device, and how many of the planted leaks it found."""
    stages, leaks = ([int(r["passed"]) for r in rows if r["kind"] == kind] for kind in ("stage", "leak"))
    seconds = sum(float(r["seconds"]) for r in rows)
    return {
        f"{PART}.stages": metric(sum(stages), len(stages), goal=f">={len(stages)}"),
        f"{PART}.planted_found": metric(sum(leaks), len(leaks), goal=f">={max(10, len(leaks))}"),
        f"{PART}.seconds": metric(round(seconds, 1), len(rows), note="one thread"),
    }


def merged(found: Row, rows: Sequence[Row], out: Path) -> tuple[Row, list[Row]]:
    """All metrics and rows of the file, with these in place of the earlier ones of this part."""
    before = read_json(out)["metrics"] if out.exists() else {}
    kept = {k: v for k, v in before.items() if not k.startswith(f"{PART}.")}
    others = [r for r in read_rows(out) if r.get("part") != PART]
    return {**kept, **found}, [*others, *({"part": PART, "git": REVISION, **r} for r in rows)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args().out
    require_clean(out)
    rows = measured(files())
    found = metrics(rows)
    write_results(out, *merged(found, rows, out), seed=0)
    for row in rows:
        print(f"{row['kind']:5} {row['name']:50} {'ok' if row['passed'] else 'FAILED'} {float(row['seconds']):6.1f} s")
    print({name: m["value"] for name, m in found.items()}, f"in {out}")
    return int(any(not row["passed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
