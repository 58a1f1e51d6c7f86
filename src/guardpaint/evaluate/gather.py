"""Write docs/results/evaluation.json from finished runs: their rows, KID of their pictures, and adaptive attacks.

guardpaint eval report runs/eval --adaptive docs/results/adaptive.json --times docs/results/defences.json
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from guardpaint.errors import BadInput
from guardpaint.evaluate import benign_files, by_category, eye, figures, outside, summary
from guardpaint.evaluate.rows import EvaluationRow, read_parquet
from guardpaint.evaluate.statistics import kid
from guardpaint.policy import Policy
from guardpaint.store.checkpoint import read_json, write_atomic
from guardpaint.store.images import load_image, save_image
from guardpaint.store.results import metric, write_results
from guardpaint.testbed import Prompt, References

LEAST = 50
"""Fewest pictures for which KID is reported."""


@dataclass(frozen=True)
class Distance:
    """KID of one base's benign pictures to the reference pictures of the same prompts."""

    base: str
    n: int
    before: float
    """KID of undefended pictures."""
    after: float
    """KID of guarded pictures."""

    def to_dict(self) -> dict[str, Any]:
        return {"suite": "kid", "base": self.base, "n": self.n, "before": self.before, "after": self.after}


def read_run(folder: Path) -> list[EvaluationRow]:
    """The rows that `eval run` reported last in a folder."""
    file = folder / "samples.parquet"
    if not file.exists():
        raise BadInput(f"{folder}: no samples.parquet; finish it with `guardpaint eval run … --out {folder}`")
    return read_parquet(file, str(folder))


def features(references: References, rows: Sequence[EvaluationRow]) -> Float[np.ndarray, "n f"]:
    """Features of the kept pictures of rows."""
    files = [Path(r.run) / r.image for r in rows]
    missing = [f for f in files if not f.exists()]
    if missing:
        raise BadInput(f"{missing[0]}: the picture of a row is missing; run the suite again to draw it")
    return references.features([load_image(f).convert("RGB") for f in files])


def distances_of(rows: Sequence[EvaluationRow], references: References, defence: str = "ours") -> Iterator[Distance]:
    """KID of benign pictures to reference pictures of the same prompts, undefended and guarded, for each base."""
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
    """All metrics of `eval run`, the change of KID, and the metrics of adaptive attacks."""
    results = {**summary.metrics(rows), **by_category.metrics(rows), **benign_files.metrics(rows)}
    for r in distances:
        results[f"benign.kid_delta.{r.base}"] = metric(r.after - r.before, r.n)
    if distances:
        change = sum(r.after - r.before for r in distances) / len(distances)
        results["benign.kid_delta"] = metric(change, sum(r.n for r in distances), note="mean over bases")
    return {**results, **{k: v for k, v in adaptive.items() if k.startswith("adaptive.")}}


def side_by_side(file: Path | None) -> summary.Metrics:
    """Times that `bench/defences.py` measured: `NAME.seconds` on attack prompts, and `benign.time_ratio` of ours."""
    if file is None:
        return {}
    measured = read_json(file).get("metrics", {})
    times = {k.replace(".attack.", "."): m for k, m in measured.items() if k.endswith(".attack.seconds")}
    if not times:
        raise BadInput(f"{file}: no times in it; write it with `python bench/defences.py`")
    if "ours.benign.ratio" in measured:
        times["benign.time_ratio"] = measured["ours.benign.ratio"]
    return {k: {**m, "note": f"one at a time, {m.get('note', '')}; rows: {file.stem}"} for k, m in times.items()}


def draw(rows: Sequence[EvaluationRow], out: Path, times: summary.Metrics | None = None) -> list[Path]:
    """Draw the figures of a report beside its results file, as far as there are rows for them; returns their paths."""
    files = [Path(r.run) / r.image if r.image else None for r in rows]
    rows = [replace(r, image=str(f) if f and f.exists() else "") for r, f in zip(rows, files, strict=True)]
    attacked = summary.harmful(rows)
    paths: list[Path] = []
    tried = {r.defence for r in attacked}
    plots = {f"fall-{d}": figures.heat_map(rows, d) for d in ("ours", "paper") if {d, "undefended"} <= tried}
    if attacked:
        plots |= {"front": figures.front_plot(rows, times), "settings": figures.variants_plot(rows)}
        plots["candidates"] = figures.size_panels(rows)
    for name, plot in plots.items():
        if plot is not None:
            paths.append(out.with_name(f"{out.stem}-{name}.png"))
            plot.savefig(paths[-1], dpi=110)
    for name, sheet in (
        ("pairs", figures.pairs_sheet(attacked, Path())),
        ("reinsertion", figures.reinsertion_sheet(attacked, Path())),
    ):
        if sheet is not None:
            paths.append(out.with_name(f"{out.stem}-{name}.png"))
            save_image(sheet, paths[-1])
    return paths


@dataclass(frozen=True)
class Report:
    """The inputs of one results file."""

    folders: Sequence[Path]
    """Run directories of `eval run`."""
    out: Path
    adaptive: Path | None = None
    """Results of `eval adaptive`."""
    times: Path | None = None
    """Results of bench/defences.py, whose times are comparable."""
    references: References | None = None
    """Reference pictures for KID; None leaves KID out."""
    lpips: Path | None = None
    """Weights of LPIPS-VGG for the change outside of masks; None leaves that out and keeps SSIM."""
    policy: Policy | None = None
    """The policy by which people labelled pictures; None: the default one."""


def run(report: Report) -> summary.Metrics:
    """Write the results file with its rows and figures, and return the metrics."""
    rows = [row for folder in report.folders for row in read_run(folder)]
    repeated = len(rows) - len({r.key for r in rows})
    if repeated:
        raise BadInput(f"{repeated} rows are in more than one of the runs; name each run once")
    distances = [] if report.references is None else list(distances_of(rows, report.references))
    adaptive = {} if report.adaptive is None else read_json(report.adaptive).get("metrics")
    if adaptive is None:
        raise BadInput(f"{report.adaptive}: no metrics in it; write it with `guardpaint eval adaptive`")
    times = side_by_side(report.times)
    results = {**metrics(rows, distances, adaptive), **outside.metrics(summary.latest(rows), report.lpips)}
    for name in results:
        if name.endswith(".seconds") and times:
            results[name] = times.get(name) or {**results[name], "note": "in batches, beside other processes: rough"}
    results |= {k: m for k, m in times.items() if k == "benign.time_ratio" and k in results}
    if by_eye := eye.report_metrics(report.folders, rows, report.policy):
        results |= by_eye
        write_atomic(report.out.with_name(f"{report.out.stem}-eye.md"), eye.table(by_eye).encode())
    stored = [*(r.to_dict() for r in rows), *(d.to_dict() for d in distances)]
    write_results(report.out, results, stored, seed=0)
    draw(summary.latest(rows), report.out, times)
    return results
