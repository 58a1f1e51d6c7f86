"""Compare labelers on a reference of hand labels: the paper's table, with the numbers behind it.

guardpaint data compare corpora/real --labels FILE --labels FILE --reference hand-labels.jsonl --out tables/labelers

Every labeler decides at its own thresholds. They are fitted on four fifths of the reference and used on the last
fifth, five times, so that no picture is decided by thresholds that have seen its label.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool

from guardpaint.data.hand_labels import PLUS, categories_of, kappa, kappa_interval
from guardpaint.data.labelling import Thresholds, calibrate
from guardpaint.errors import BadInput
from guardpaint.policy import Policy
from guardpaint.store.checkpoint import sha256_hex, write_atomic, write_json
from guardpaint.store.intervals import wilson
from guardpaint.types import SAFE

Row = dict[str, Any]
Reference = Mapping[str, Mapping[str, str]]
FOLDS = 5
UNREADABLE, ABSTAINED = "unreadable", "abstained"
DRAWS = 2000


def compare(
    labelers: Mapping[str, Mapping[str, Mapping[str, Any]]],
    reference: Reference,
    policy: Policy,
    miss_cost: float = 1.0,
    margin: float = 0.1,
) -> list[Row]:
    """One row per labeler: precision, recall and F1, agreement with the reference, errors by hard case, time.

    All readable answers are decided. How many lie within `margin` of a threshold, and would be left out of a corpus,
    is counted as abstentions.
    """
    return [
        measured(name, {k: v for k, v in lines.items() if k in reference}, reference, policy, miss_cost, margin)
        for name, lines in labelers.items()
    ]


def measured(
    name: str,
    answers: Mapping[str, Mapping[str, Any]],
    reference: Reference,
    policy: Policy,
    miss_cost: float,
    margin: float,
) -> Row:
    """The row of one labeler; `failed` says why it has no numbers. An unreadable answer is always wrong."""
    scores = {k: v["scores"] for k, v in answers.items()}
    times = [float(v["seconds"]) for v in answers.values() if v.get("seconds") is not None]
    row: Row = {
        "labeler": name,
        "n": len(answers),
        "missing": len(reference) - len(answers),
        UNREADABLE: sum(s is None for s in scores.values()),
        "contradictions": sum("but scores" in v.get("problem", "") for v in answers.values()),
        "seconds": sum(times) / len(times) if times else None,
    }
    own = {k: reference[k] for k in answers}
    try:
        fitted = calibrate(scores, own, policy, miss_cost, 0.0)
    except BadInput as error:
        return {**row, "failed": str(error)}
    folds = fold_thresholds(scores, own, policy, miss_cost)
    several = any(PLUS in r["label"] for r in own.values())
    cuts = {k: folds.get(fold(k), fitted).harms for k in scores}
    said = {k: decided(s, cuts[k], policy, several) for k, s in scores.items()}
    row["thresholds"] = "cross-fitted" if folds else "fitted on the same pictures"
    row[ABSTAINED] = sum(s is not None and Thresholds(cuts[k], margin).decide(s) is None for k, s in scores.items())
    keys = list(answers)
    row |= rates(keys, said, own, policy)
    row |= sensitivity(scores, fitted)
    for case in dict.fromkeys(r["case"] for r in reference.values()):
        of_case = [k for k in keys if own[k]["case"] == case]
        row[f"wrong_{case}"] = sum(said[k] != own[k]["label"] for k in of_case) / max(1, len(of_case))
    return row


def fold(key: str) -> int:
    """The fifth of the reference that a picture belongs to."""
    return int(sha256_hex(key)[:8], 16) % FOLDS


def fold_thresholds(
    scores: Mapping[str, Mapping[str, float] | None], reference: Reference, policy: Policy, miss_cost: float
) -> dict[int, Thresholds]:
    """For each fifth the thresholds fitted on the others; none at all if one of them lacks examples of a harm."""
    out = {}
    for k in range(FOLDS):
        others = {key: s for key, s in scores.items() if fold(key) != k}
        try:
            out[k] = calibrate(others, reference, policy, miss_cost, 0.0)
        except BadInput:
            return {}
    return out


def decided(scores: Mapping[str, float] | None, cuts: Mapping[str, float], policy: Policy, several: bool) -> str:
    """The label that a labeler's scores mean, or that they are unreadable."""
    thresholds = Thresholds(cuts, 0.0)
    one = thresholds.decide(scores)
    if one is None:
        return UNREADABLE
    harms = thresholds.every(scores) or [] if several else []
    return PLUS.join(n for n in policy.names if n in harms) or one


def rates(keys: Sequence[str], said: Mapping[str, str], reference: Reference, policy: Policy) -> Row:
    """Precision, recall and F1 of every category and their means, false alarms and misses, κ; with intervals."""
    names = policy.names
    truth = marks([reference[k]["label"] for k in keys], names)
    claims = marks([said[k] for k in keys], names)
    row: Row = {}
    for c, name in enumerate(names):
        hits = int((truth[:, c] & claims[:, c]).sum())
        row[f"precision_{name}"], row[f"precision_{name}_ci"] = proportion(hits, int(claims[:, c].sum()))
        row[f"recall_{name}"], row[f"recall_{name}_ci"] = proportion(hits, int(truth[:, c].sum()))
        row[f"f1_{name}"] = float(scores_of(truth[None], claims[None])[0, c, 2])
    whole = scores_of(truth[None], claims[None])[0].mean(0)
    picks = np.random.default_rng(0).integers(len(keys), size=(DRAWS, len(keys)))
    drawn = np.concatenate([scores_of(truth[p], claims[p]).mean(1) for p in np.array_split(picks, 40)])
    for m, measure in enumerate(("precision", "recall", "f1")):
        low, high = np.percentile(drawn[:, m], [2.5, 97.5])
        if low == high:  # resampling a faultless table shows nothing but itself
            low, high = wilson(float(whole[m]) * len(keys), len(keys))
        row[measure], row[f"{measure}_ci"] = float(whole[m]), (float(low), float(high))
    safe = [k for k in keys if reference[k]["label"] == SAFE]
    harm = [k for k in keys if reference[k]["label"] != SAFE]
    quiet = (SAFE, UNREADABLE)
    row["fp"], row["fp_ci"] = proportion(sum(said[k] not in quiet for k in safe), len(safe))
    row["fn"], row["fn_ci"] = proportion(sum(said[k] in quiet for k in harm), len(harm))
    first, second = [reference[k]["label"] for k in keys], [said[k] for k in keys]
    row["kappa"], row["kappa_ci"] = kappa(first, second), kappa_interval(first, second)
    return row


def marks(labels: Sequence[str], names: Sequence[str]) -> Bool[np.ndarray, "n c"]:
    """For every label, which categories it names."""
    return np.array([[name in categories_of(label) for name in names] for label in labels], dtype=bool)


def scores_of(truth: Any, claims: Any) -> Any:
    """Precision, recall and F1 of every category in each of many samples (sample × picture × category); 0 for 0/0."""
    hits, claimed, real = (truth & claims).sum(1), claims.sum(1), truth.sum(1)
    return np.stack(
        [hits / np.maximum(1, claimed), hits / np.maximum(1, real), 2 * hits / np.maximum(1, claimed + real)], -1
    )


def proportion(hits: int, n: int) -> tuple[float | None, tuple[float, float]]:
    """A proportion with its Wilson interval; None without examples."""
    return (hits / n if n else None), wilson(hits, n)


def sensitivity(scores: Mapping[str, Mapping[str, float] | None], thresholds: Thresholds) -> Row:
    """The share of pictures whose label a shift of a threshold by 0.05 could change."""
    near = sum(
        any(abs(s[h] - t) <= 0.05 for h, t in thresholds.harms.items()) for s in scores.values() if s is not None
    )
    return {"threshold_sensitivity": near / max(1, len(scores))}


def failure_modes(row: Row) -> str:
    """The failure modes that a row's numbers show, joined by semicolons."""
    modes = []
    if (row["fp"] or 0) > 0.2:
        modes.append("flags safe images")
    if (row["fn"] or 0) > 0.2:
        modes.append("misses unsafe images")
    if row[UNREADABLE] > 0.05 * max(1, row["n"]):
        modes.append("gives unreadable answers")
    if row["contradictions"] > 0.05 * max(1, row["n"]):
        modes.append("contradicts its own reasoning")
    if row["threshold_sensitivity"] > 0.25:
        modes.append("a small shift of the threshold changes many labels")
    worst = max((c for c in row if c.startswith("wrong_")), key=lambda c: row[c], default=None)
    if worst is not None and row[worst] > 0.25:
        modes.append(f"worst on {worst.removeprefix('wrong_')}")
    return "; ".join(modes) or "none above the limits"


COLUMNS = (
    ("P", "precision"),
    ("R", "recall"),
    ("F1", "f1"),
    ("κ", "kappa"),
    ("FP", "fp"),
    ("FN", "fn"),
    ("unreadable", UNREADABLE),
    ("abstained", ABSTAINED),
    ("contradictions", "contradictions"),
    ("s/picture", "seconds"),
)
"""Columns of the table between the model and its failure modes, and the numbers that fill them."""


def table(rows: Sequence[Row]) -> str:
    """The paper's table in Markdown: model, numbers with intervals, observed failure mode. The best F1 is bold."""
    heads = ["Model", "n", *(head for head, _ in COLUMNS), "Observed failure mode"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    best = max((r["f1"] for r in rows if "failed" not in r), default=None)
    for r in rows:
        failed = "failed" in r
        name = f"**{r['labeler']}**" if not failed and r["f1"] == best and len(rows) > 1 else r["labeler"]
        cells = [name, str(r["n"]), *(shown(r, key) for _, key in COLUMNS), r["failed"] if failed else failure_modes(r)]
        lines.append("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def shown(row: Row, key: str) -> str:
    """A number of a row as text, with its interval if it has one."""
    value, interval = row.get(key), row.get(f"{key}_ci")
    if value is None:
        return "–"
    text = str(value) if isinstance(value, int) else f"{value:.2f}"
    return text if interval is None else f"{text} [{interval[0]:.2f}, {interval[1]:.2f}]"


def write_table(rows: Sequence[Row], out: Path, about: Mapping[str, Any]) -> list[Path]:
    """Write the table as Markdown, CSV and JSON (OUT.md, OUT.csv, OUT.json); `about` goes into the JSON.

    OUT may be named with one of these endings.
    """
    kinds = ("md", "csv", "json")
    out = out.with_suffix("") if out.suffix.removeprefix(".") in kinds else out
    flat = [
        {
            k: value
            for key, found in r.items()
            for k, value in (
                ((f"{key[:-3]}_low", found[0]), (f"{key[:-3]}_high", found[1]))
                if key.endswith("_ci") and found is not None
                else ((key, found),)
            )
        }
        for r in rows
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(k for r in flat for k in r)), restval="")
    writer.writeheader()
    writer.writerows(flat)
    paths = [out.with_name(f"{out.name}.{kind}") for kind in kinds]
    write_atomic(paths[0], table(rows).encode())
    write_atomic(paths[1], text.getvalue().encode())
    write_json(paths[2], {**about, "labelers": list(rows)})
    return paths
