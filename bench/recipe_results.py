"""docs/results/recipe.json, which several scripts write, each keeping the rows of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from guardpaint.errors import BadInput
from guardpaint.store.results import REVISION, metric, read_rows, write_results

OUT = Path("docs/results/recipe.json")
Row = dict[str, Any]
RESAMPLES = 2000


def interval(statistic: Callable[[np.ndarray], float], items: int) -> tuple[float, float]:
    """The 95 % bootstrap interval of a statistic of item numbers; draws that have no value are left out."""
    rng = np.random.default_rng(0)
    draws = [statistic(rng.integers(items, size=items)) for _ in range(RESAMPLES)]
    low, high = np.nanpercentile(draws, [2.5, 97.5])
    return float(low), float(high)


def column(rows: Sequence[Row], name: str) -> np.ndarray:
    """A column of numbers, which are text once they were read from a file."""
    return np.array([float(r[name]) for r in rows])


def seam(rows: Sequence[Row]) -> dict[str, Any]:
    """Spearman correlation of the trained auditor's seam metric, and of LPIPS-Alex, with LPIPS-VGG."""
    found = {}
    for name, key in (("backbone", "spearman_trained"), ("lpips_alex", "spearman_alex")):
        for pictures in ("photographs", "dolls"):
            own = [r for r in rows if r["pictures"] == pictures]
            if not own:
                continue
            ours, reference = column(own, name), column(own, "lpips_vgg")

            def rho(of: np.ndarray, a: np.ndarray = ours, b: np.ndarray = reference) -> float:
                return float(spearmanr(a[of], b[of]).statistic)

            note = f"rank correlation with LPIPS-VGG over composites of {pictures}"
            suffix = "" if pictures == "photographs" else f".{pictures}"
            value = rho(np.arange(len(own)))
            found[f"seam.{key}{suffix}"] = metric(value, len(own), ci=interval(rho, len(own)), goal=">=0.8", note=note)
    return found


def nulltext(rows: Sequence[Row]) -> dict[str, Any]:
    """What one embedding for each remaining step changes against a single one, on the same scenes and repairs."""
    found: dict[str, Any] = {}
    bases = list(dict.fromkeys(r["base"] for r in rows))
    for base in ("", *bases):
        own = [r for r in rows if base in ("", r["base"])]
        pairs: dict[tuple[str, str], dict[str, Row]] = {}
        for r in own:
            pairs.setdefault((r["base"], str(r["seed"])), {})[r["rule"]] = r
        both = [p for p in pairs.values() if {"null_text", "null_text_single"} <= set(p)]
        if not both:
            continue
        many, one = ([p[rule] for p in both] for rule in ("null_text", "null_text_single"))
        end = f".{base}" if base else ""

        def ratio(name: str, a: Sequence[Row] = many, b: Sequence[Row] = one) -> Callable[[np.ndarray], float]:
            over, under = column(a, name), column(b, name)
            return lambda of: float(over[of].sum() / under[of].sum())

        def gain(name: str, a: Sequence[Row] = many, b: Sequence[Row] = one) -> Callable[[np.ndarray], float]:
            difference = column(a, name) - column(b, name)
            return lambda of: float(difference[of].mean())

        for key, statistic, note in (
            ("per_step_over_single", ratio("inside"),
             "latent error inside the mask against the repair: mean with an embedding per step / with one"),
            ("outside_ratio", ratio("outside"), "the same for the change outside the mask against no repair"),
            ("psnr_outside_gain", gain("psnr_outside"), "dB outside the mask against the picture without a repair"),
            ("psnr_inside_gain", gain("psnr_inside"), "dB inside the mask against the decoded repair"),
            ("seconds_ratio", ratio("seconds"), "time of the steps from the repair on"),
        ):  # fmt: skip
            whole = np.arange(len(both))
            found[f"nulltext.{key}{end}"] = metric(
                statistic(whole), len(both), ci=interval(statistic, len(both)), note=note
            )
    return found


MAKERS: dict[str, Callable[[Sequence[Row]], dict[str, Any]]] = {"seam": seam, "nulltext": nulltext}
"""Metrics of each part from its rows, which are text once they were read from the file."""


def write(part: str, rows: Sequence[Row], out: Path = OUT) -> dict[str, Any]:
    """Replace the rows of one part, write the file and return its metrics. Rows name their own revision."""
    if part not in MAKERS:
        raise BadInput(f"part {part!r}: the parts are {', '.join(MAKERS)}; add its metrics to bench/recipe_results.py")
    kept = [r for r in read_rows(out) if r["part"] != part]
    both = [*kept, *({"part": part, "git": REVISION, **r} for r in rows)]
    both.sort(key=lambda r: r["part"])
    found = metrics(both)
    write_results(out, found, both, seed=0)
    return found


def metrics(rows: Sequence[Row]) -> dict[str, Any]:
    """All metrics that the rows allow."""
    parts = {part: [r for r in rows if r["part"] == part] for part in MAKERS}
    return {name: m for part, some in parts.items() if some for name, m in MAKERS[part](some).items()}
