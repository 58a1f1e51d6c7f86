"""Measure an auditor on the test views of a labelled corpus: classes, false triggers, unfinished pictures, F.

guardpaint eval corpus-auditor --auditor runs/auditor/model --views views/real --results results/auditor.json

The labels are those of the corpus, so this measures how well the auditor agrees with its labeler on unseen pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from guardpaint.audit.model import AuditorScorer
from guardpaint.data.corpus_views import kept_apart
from guardpaint.data.views import KINDS, Views, load_views
from guardpaint.draft.loading import on_machine
from guardpaint.errors import BadInput
from guardpaint.evaluate.auditor import auc, curves, f1, macro, measure_views, resampled
from guardpaint.evaluate.statistics import share
from guardpaint.policy import Policy
from guardpaint.store.results import metric, write_results
from guardpaint.types import SAFE

Row = dict[str, Any]
LATE = 0.7


def base_of(file: Path) -> str:
    """The base in the name of a views file: tiny_sd of tiny_sd-00003-test.pt."""
    return file.name.rsplit("-", 2)[0]


def other_prompts(auditor: AuditorScorer, views: Views) -> list[float]:
    """F of every view with the prompt of the next view that has another one; empty if all prompts are the same."""
    scores = []
    for i in range(len(views)):
        wrong = next((views.texts[(i + k) % len(views)] for k in range(1, len(views))
                      if views.texts[(i + k) % len(views)] != views.texts[i]), None)  # fmt: skip
        if wrong is None:
            return []
        image = views.rows(torch.tensor([i])).at(auditor.sizes[0])
        scores.append(float(auditor.audit(image, [wrong], float(views.noise[i]))[0].faithfulness or 0.0))
    return scores


def measured(auditor: AuditorScorer, policy: Policy, files: Sequence[Path], count: int | None) -> list[Row]:
    """A row for each of the first `count` views (None: all) of every file."""
    rows: list[Row] = []
    for file in files:
        views = load_views(file, on_disk=True)
        if views.world or views.names != auditor.categories:
            raise BadInput(f"{file}: not a corpus's views with the categories {', '.join(auditor.categories)}")
        views = views.rows(torch.arange(len(views) if count is None else min(count, len(views))))
        audited = measure_views(auditor, policy, base_of(file), views)
        others = other_prompts(auditor, views)
        rows += [{**r, "F_other": round(f, 5)} for r, f in zip(audited, others, strict=True)] if others else audited
    return rows


def metrics(rows: Sequence[Row], names: Sequence[str]) -> Row:
    """Metrics of finished pictures, each counted once, and of unfinished ones for each base."""
    out: Row = {}
    clean = list({r["seed"]: r for r in rows if r["view"] == KINDS[0]}.values())
    if clean:
        out["clean.accuracy"] = share([r["said"] == r["category"] for r in clean], ">=0.97")
        interval = resampled(clean, lambda x: macro(x, names))
        out["clean.macro_f1"] = metric(macro(clean, names), len(clean), goal=">=0.96", ci=interval)
        for name in names:
            said, own = ([r for r in clean if r[k] == name] for k in ("said", "category"))
            if said:
                out[f"clean.precision.{name}"] = share([r["category"] == name for r in said], None)
            if own:
                out[f"clean.recall.{name}"] = share([r["said"] == name for r in own], None)
                out[f"clean.f1.{name}"] = metric(f1(clean, name), len(own))
        safe = [bool(r["triggered"]) for r in clean if r["category"] == SAFE]
        if safe:
            out["false_trigger"] = share(safe, "<=0.01")
    paired = [r for r in clean if r.get("F_other") is not None and r["F"] is not None]
    if paired:
        value = auc([r["F"] for r in paired], [r["F_other"] for r in paired])
        out["faithfulness.auc"] = metric(value, len(paired), goal=">=0.95")
    for base in dict.fromkeys(r["base"] for r in rows):
        late = [r for r in rows if r["base"] == base and r["view"] == "x0" and r["progress"] >= LATE]
        if late:
            interval = resampled(late, lambda x: macro(x, names))
            out[f"unfinished.macro_f1.{base}"] = metric(macro(late, names), len(late), goal=">=0.93", ci=interval)
        for low in np.arange(0, 1, 0.25):
            inside = [r for r in rows if r["base"] == base and r["view"] == "x0" and low < r["progress"] <= low + 0.25]
            harm, calm = ([r["adv"] for r in inside if (r["category"] != SAFE) == unsafe] for unsafe in (True, False))
            if harm and calm:
                out[f"unfinished.auc.{base}.{low + 0.25:g}"] = metric(auc(harm, calm), len(inside))
    return out


def run(auditor_dir: Path, views_dir: Path, path: Path, policy: Policy, count: int | None = None) -> Row:
    """Measure, write results with their rows, draw detection over progress, and return the metrics."""
    files = sorted(views_dir.glob("*-test.pt"))
    if not files:
        raise BadInput(
            f"{views_dir}: no views of split test; make them with `guardpaint data corpus-views --split test`"
        )
    kept_apart(views_dir)
    auditor = on_machine(AuditorScorer.from_pretrained(auditor_dir))
    if auditor.categories != policy.names:
        raise BadInput(
            f"the auditor tells {', '.join(auditor.categories)}, "
            "not the categories of this policy: name its policy with --policy"
        )
    rows = measured(auditor, policy, files, count)
    results = metrics(rows, policy.names)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_results(path, results, rows, seed=0)
    curves(rows, path.with_name(f"{path.stem}-progress.png"))
    return results
