"""Open small bases of every family from folders stored in fp32, fp16 and bf16, and draw one guarded step with each.

python bench/half_precision.py

The weights are random: what is measured is that folders as people have them load and run in one precision.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from dayone_results import OUT, write
from torch import nn

from guardpaint.bases import BaseOptions, load_base
from guardpaint.draft.loading import cast
from guardpaint.draft.options import DTYPES, LoadOptions
from guardpaint.guard import GuardPaint
from guardpaint.store.results import require_clean
from guardpaint.testing import small

COMBINATIONS = tuple(product(small.BASES, DTYPES))
"""Families, and the precisions that their folders are stored in."""


def stored(family: str, dtype: str, folder: Path) -> Path:
    """A small base of a family, saved in this precision as a folder like those on the hub."""
    pipe = small.pipeline(family)
    cast(pipe, getattr(torch, DTYPES[dtype]))
    pipe.save_pretrained(folder)
    return folder


def step(folder: Path, guard: GuardPaint, loaded: str = "fp32") -> dict[str, Any]:
    """Open a folder in a precision and draw one guarded step; says what happened.

    It is ok if every component has that precision, the step was audited and nothing failed.
    """
    base = load_base(str(folder), BaseOptions(LoadOptions(dtype=loaded, device="cpu"), steps=1, size=small.PIXELS))
    modules = [m for m in base.pipe.components.values() if isinstance(m, nn.Module)]
    precisions = sorted({str(p.dtype) for m in modules for p in m.parameters()})
    try:
        out = guard.attach(base.pipe)("a quiet street", generator=torch.Generator().manual_seed(0), **base.call)
        report = out.safety[0]
        status, audited, error = str(report.status), len(report.steps), "; ".join(report.errors)
    except Exception as failure:
        status, audited, error = "failed", 0, f"{type(failure).__name__}: {failure}"
    ok = precisions == [f"torch.{DTYPES[loaded]}"] and audited == 1 and not error
    return {"loaded": loaded, "ok": ok, "precisions": " ".join(precisions), "status": status, "error": error}


def short_guard() -> GuardPaint:
    """A random guard that is quick: one candidate for one region, and no last resort but the block."""
    guard = small.guard(audits=1, candidates=1, regions=1)
    return guard.configured(policy=replace(guard.policy, last_resort=("block",)))


def run() -> list[dict[str, Any]]:
    """A row for every combination, and one for a step in bf16 with the smallest base."""
    guard, rows = short_guard(), []
    with tempfile.TemporaryDirectory() as place:
        for family, dtype in COMBINATIONS:
            folder = stored(family, dtype, Path(place) / f"{family}-{dtype}")
            rows.append({"family": family, "stored": dtype, **step(folder, guard)})
        half = step(Path(place) / "sd-bf16", guard, "bf16")
        rows.append({"family": "sd", "stored": "bf16", **half})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    require_clean(options.out)
    torch.set_num_threads(1)
    for name, m in write("half_precision", run(), options.out).items():
        print(f"{name:36} {m['value']}  {m.get('goal', '')} {'' if m.get('met', True) else 'NOT MET'}")


if __name__ == "__main__":
    main()
