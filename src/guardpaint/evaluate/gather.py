"""docs/results/evaluation.json from finished runs: their rows as they are, KID from their pictures, adaptive attacks.

guardpaint eval report runs/eval --adaptive docs/results/adaptive.json --times docs/results/defences.json
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

from guardpaint.store.checkpoint import read_json
from guardpaint.errors import BadInput
from guardpaint.evaluate import figures, summary
from paperdolls.oracle import Oracle
from guardpaint.evaluate.statistics import kid
from guardpaint.store.results import metric, write_results
from paperdolls.render import render
from paperdolls.scene import sample_scene

Row = dict[str, Any]
LEAST = 50
"""Fewer pictures than this say nothing about a distribution."""


def read_run(folder: Path) -> list[Row]:
    """What `eval run` reported last, with types; values a row does not have are left out."""
    file = folder / "samples.parquet"
    if not file.exists():
        raise BadInput(f"{folder}: no samples.parquet; finish it with `guardpaint eval run … --out {folder}`")
    rows = pq.read_table(file).to_pylist()
    return [{**{k: v for k, v in r.items() if v is not None}, "run": str(folder)} for r in rows]


def features(oracle: Oracle, rows: Sequence[Row]) -> np.ndarray:
    """The oracle's features of kept pictures."""
    files = [Path(r["run"]) / r["image"] for r in rows]
    gone = [f for f in files if not f.exists()]
    if gone:
        raise BadInput(f"{gone[0]}: the picture of a row is gone; run the suite again to draw it")
    pictures = [Image.open(f).convert("RGB") for f in files]
    return oracle.look(pictures).features.numpy()


def kid_rows(rows: Sequence[Row], oracle: Oracle, defence: str = "ours") -> list[Row]:
    """Per base: distance of benign pictures to renders of the same scenes, undefended and guarded."""
    out: list[Row] = []
    benign = [r for r in rows if r["suite"] == "benign" and r.get("image")]
    for base in dict.fromkeys(r["base"] for r in benign):
        plain, ours = (
            {summary.same(r): r for r in benign if (r["base"], r["defence"]) == (base, d)}
            for d in ("undefended", defence)
        )
        both = sorted(plain.keys() & ours.keys())
        if len(both) < LEAST:
            continue
        scenes = [sample_scene(int(plain[k]["seed"]), plain[k]["kind"]) for k in both]
        real = oracle.look([Image.fromarray(render(s).image) for s in scenes]).features.numpy()
        before, after = (kid(features(oracle, [some[k] for k in both]), real) for some in (plain, ours))
        out.append({"suite": "kid", "base": base, "n": len(both), "before": before, "after": after})
    return out


def metrics(rows: Sequence[Row], distances: Sequence[Row], adaptive: Row) -> Row:
    """All that `eval run` reports, KID's change, and what adaptive attacks achieve."""
    found = summary.metrics(rows)
    for r in distances:
        found[f"benign.kid_delta.{r['base']}"] = metric(r["after"] - r["before"], r["n"])
    if distances:
        change = sum(r["after"] - r["before"] for r in distances) / len(distances)
        found["benign.kid_delta"] = metric(change, sum(r["n"] for r in distances), note="mean over bases")
    return {**found, **{k: v for k, v in adaptive.items() if k.startswith("adaptive.")}}


def side_by_side(file: Path | None) -> Row:
    """`NAME.seconds` of attack prompts, and what ours costs on benign ones, as `bench/defences.py` measured them."""
    if file is None:
        return {}
    told = read_json(file).get("metrics", {})
    found = {k.replace(".attack.", "."): m for k, m in told.items() if k.endswith(".attack.seconds")}
    if not found:
        raise BadInput(f"{file}: no times in it; write it with `python bench/defences.py`")
    if "ours.benign.ratio" in told:
        found["benign.time_ratio"] = told["ours.benign.ratio"]
    return {k: {**m, "note": f"one at a time, {m.get('note', '')}; rows: {file.stem}"} for k, m in found.items()}


def draw(rows: Sequence[Row], out: Path, times: Row | None = None) -> list[Path]:
    """The figures of a report beside its results file; what was not run has none."""
    files = [Path(r["run"]) / r["image"] if r.get("image") else None for r in rows]
    rows = [{**r, "image": str(f) if f and f.exists() else ""} for r, f in zip(rows, files, strict=True)]
    attacked = summary.harmful(rows)
    made: list[Path] = []
    told = {r["defence"] for r in attacked}
    plots = {f"fall-{d}": figures.heat_map(rows, d) for d in ("ours", "paper") if {d, "undefended"} <= told}
    if attacked:
        plots |= {"front": figures.front_plot(rows, times), "settings": figures.variants_plot(rows)}
        plots["candidates"] = figures.size_panels(rows)
    for name, plot in plots.items():
        if plot is not None:
            made.append(out.with_name(f"{out.stem}-{name}.png"))
            plot.savefig(made[-1], dpi=110)
    for name, sheet in (
        ("pairs", figures.pairs_sheet(attacked, Path())),
        ("reinsertion", figures.reinsertion_sheet(attacked, Path())),
    ):
        if sheet is not None:
            made.append(out.with_name(f"{out.stem}-{name}.png"))
            sheet.save(made[-1])
    return made


def run(folders: Sequence[Path], adaptive: Path | None, out: Path, timed: Path | None = None) -> Row:
    rows = [row for folder in folders for row in read_run(folder)]
    twice = len(rows) - len({r["key"] for r in rows})
    if twice:
        raise BadInput(f"{twice} rows are in more than one of the runs; name each run once")
    distances = kid_rows(rows, Oracle.load())
    told = {} if adaptive is None else read_json(adaptive).get("metrics")
    if told is None:
        raise BadInput(f"{adaptive}: no metrics in it; write it with `guardpaint eval adaptive`")
    times = side_by_side(timed)
    found = metrics(rows, distances, told)
    for name in found:
        if name.endswith(".seconds") and times:
            found[name] = times.get(name) or {**found[name], "note": "in batches, beside other processes: rough"}
    found |= {k: m for k, m in times.items() if k == "benign.time_ratio" and k in found}
    write_results(out, found, [*rows, *distances], seed=0)
    draw(summary.latest(rows), out, times)
    return found
