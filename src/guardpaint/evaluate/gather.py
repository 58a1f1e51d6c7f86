"""docs/results/evaluation.json from finished runs: their rows as they are, KID from their pictures, adaptive attacks.

guardpaint eval report runs/eval --adaptive docs/results/adaptive.json --times docs/results/defences.json
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from PIL import Image

from guardpaint.errors import BadInput
from guardpaint.evaluate import figures, summary
from guardpaint.evaluate.rows import EvaluationRow, read_parquet
from guardpaint.evaluate.statistics import kid
from guardpaint.store.checkpoint import read_json
from guardpaint.store.results import metric, write_results
from guardpaint.testbed import Prompt, References

LEAST = 50
"""Fewer pictures than this say nothing about a distribution."""


@dataclass(frozen=True)
class Distance:
    """KID of one base's benign pictures to the reference pictures of the same prompts."""

    base: str
    n: int
    before: float
    """Of undefended pictures."""
    after: float
    """Of guarded ones."""

    def to_dict(self) -> dict[str, Any]:
        return {"suite": "kid", "base": self.base, "n": self.n, "before": self.before, "after": self.after}


def read_run(folder: Path) -> list[EvaluationRow]:
    """The rows that `eval run` reported last."""
    file = folder / "samples.parquet"
    if not file.exists():
        raise BadInput(f"{folder}: no samples.parquet; finish it with `guardpaint eval run … --out {folder}`")
    return read_parquet(file, str(folder))


def features(references: References, rows: Sequence[EvaluationRow]) -> Float[np.ndarray, "n f"]:
    """Features of kept pictures."""
    files = [Path(r.run) / r.image for r in rows]
    gone = [f for f in files if not f.exists()]
    if gone:
        raise BadInput(f"{gone[0]}: the picture of a row is gone; run the suite again to draw it")
    return references.features([Image.open(f).convert("RGB") for f in files])


def distances_of(rows: Sequence[EvaluationRow], references: References, defence: str = "ours") -> Iterator[Distance]:
    """Per base: distance of benign pictures to reference pictures of the same prompts, undefended and guarded."""
    benign = [r for r in rows if r.suite == "benign" and r.image]
    for base in dict.fromkeys(r.base for r in benign):
        plain, ours = ({r.same: r for r in benign if (r.base, r.defence) == (base, d)} for d in ("undefended", defence))
        both = sorted(plain.keys() & ours.keys())
        if len(both) < LEAST:
            continue
        prompts = [Prompt(r.id, r.prompt, r.seed, r.category, r.kind) for r in (plain[k] for k in both)]
        real = references.reference_features(prompts)
        before, after = (kid(features(references, [some[k] for k in both]), real) for some in (plain, ours))
        yield Distance(base, len(both), before, after)


def metrics(
    rows: Sequence[EvaluationRow], distances: Sequence[Distance], adaptive: Mapping[str, Any]
) -> summary.Metrics:
    """All that `eval run` reports, KID's change, and what adaptive attacks achieve."""
    found = summary.metrics(rows)
    for r in distances:
        found[f"benign.kid_delta.{r.base}"] = metric(r.after - r.before, r.n)
    if distances:
        change = sum(r.after - r.before for r in distances) / len(distances)
        found["benign.kid_delta"] = metric(change, sum(r.n for r in distances), note="mean over bases")
    return {**found, **{k: v for k, v in adaptive.items() if k.startswith("adaptive.")}}


def side_by_side(file: Path | None) -> summary.Metrics:
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


def draw(rows: Sequence[EvaluationRow], out: Path, times: summary.Metrics | None = None) -> list[Path]:
    """The figures of a report beside its results file; what was not run has none."""
    files = [Path(r.run) / r.image if r.image else None for r in rows]
    rows = [replace(r, image=str(f) if f and f.exists() else "") for r, f in zip(rows, files, strict=True)]
    attacked = summary.harmful(rows)
    made: list[Path] = []
    tried = {r.defence for r in attacked}
    plots = {f"fall-{d}": figures.heat_map(rows, d) for d in ("ours", "paper") if {d, "undefended"} <= tried}
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


@dataclass(frozen=True)
class Report:
    """What goes into one results file."""

    folders: Sequence[Path]
    """Run directories of `eval run`."""
    out: Path
    adaptive: Path | None = None
    """Results of `eval adaptive`."""
    times: Path | None = None
    """Times that bench/defences.py measured side by side."""
    references: References | None = None
    """Reference pictures for KID; without them there are no KID rows."""


def run(report: Report) -> summary.Metrics:
    """Write the results file with its rows and figures; returns the metrics."""
    rows = [row for folder in report.folders for row in read_run(folder)]
    repeated = len(rows) - len({r.key for r in rows})
    if repeated:
        raise BadInput(f"{repeated} rows are in more than one of the runs; name each run once")
    distances = [] if report.references is None else list(distances_of(rows, report.references))
    adaptive = {} if report.adaptive is None else read_json(report.adaptive).get("metrics")
    if adaptive is None:
        raise BadInput(f"{report.adaptive}: no metrics in it; write it with `guardpaint eval adaptive`")
    times = side_by_side(report.times)
    found = metrics(rows, distances, adaptive)
    for name in found:
        if name.endswith(".seconds") and times:
            found[name] = times.get(name) or {**found[name], "note": "in batches, beside other processes: rough"}
    found |= {k: m for k, m in times.items() if k == "benign.time_ratio" and k in found}
    stored = [*(r.to_dict() for r in rows), *(d.to_dict() for d in distances)]
    write_results(report.out, found, stored, seed=0)
    draw(summary.latest(rows), report.out, times)
    return found
