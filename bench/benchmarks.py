"""What the evaluation of benchmarks does here: docs/results/benchmarks.json.

    python bench/benchmarks.py [--part layouts] [--out FILE]

Every part is a function in bench/benchmarks_PART.py that measures and returns a `Measured`. A run replaces the metrics
and rows of the parts that it ran and keeps those of the others.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path

from benchmarks_results import OUT, Measured, write

from guardpaint.store.results import require_clean

PARTS: dict[str, str] = {
    "layouts": "benchmarks_layouts:measure",
    "protocol": "benchmarks_protocol:measure",
    "judges": "benchmarks_judges:measure",
    "attacks": "benchmarks_attacks:measure",
    "moment": "benchmarks_moment:measure",
    "ppi": "benchmarks_ppi:measure",
    "seedpairs": "benchmarks_seedpairs:measure",
}
"""Each part's function, as MODULE:FUNCTION; a module is imported only if its part runs."""


def function(part: str) -> Callable[[], Measured]:
    """The function that measures a part."""
    module, _, name = PARTS[part].partition(":")
    found: Callable[[], Measured] = getattr(importlib.import_module(module), name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=list(PARTS), help="repeat (default: all)")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    require_clean(args.out)
    for part in args.part or PARTS:
        for name, m in write(part, function(part)(), args.out).items():
            print(f"{name:40} {m['value']} n {m['n']} {m.get('note', '')}", flush=True)


if __name__ == "__main__":
    main()
