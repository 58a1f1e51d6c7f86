"""Repeat the paper's alignment experiments as short runs, and tabulate which failures occur.

guardpaint eval history --inpainter mini-inpaint --sft runs/sft/model --pairs runs/pairs
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from guardpaint.store.results import metric, write_results
from guardpaint.train import align
from guardpaint.train.engine import Run

CHAPTERS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "KTO, ε reward": ("kto", True, {"reward": "eps", "identity": "batch", "dropout": 0.3}),
    "KTO": ("kto", True, {"identity": "batch", "dropout": 0.3}),
    "BCO without SFT": ("bco", False, {}),
    "BCO, ε reward": ("bco", True, {"reward": "eps"}),
    "BCO, refreshed reference": ("bco", True, {"reference": "refresh", "refresh_every": 100}),
    "BCO, linear identity": ("bco", True, {"identity": "linear"}),
    "BCO, conv_in frozen": ("bco", True, {"freeze": "conv_in"}),
    "BCO, convolutions frozen": ("bco", True, {"freeze": "convs"}),
    "BCO, cap as printed": ("bco", True, {"cap": "printed"}),
    "BCO": ("bco", True, {}),
}
"""Name of a run → its method, whether it starts from the SFT model, and its options."""
SHOWN = ("h_safe", "h_unsafe", "gap_n", "saturated", "identity_gap", "detail", "outside", "refusal", "refusal_blind")


def run(inpainter: str, sft: str, pairs: Path, out: Path, results: Path, steps: int, rank: int = 16) -> str:
    """Run every chapter that is not finished yet, write rows and metrics, and return the table as Markdown."""
    rows: list[dict[str, Any]] = []
    for k, (name, (method, tuned, options)) in enumerate(CHAPTERS.items()):
        folder = out / f"{k:02d}"
        folder.mkdir(parents=True, exist_ok=True)
        model = {"method": method, "rank": rank, "unroll_every": 10 if method == "bco" else 0, **options}
        train = {"steps": steps, "batch_size": 16, "learning_rate": 2e-4, "warmup": 20, "ema": 0.99, "seed": 7}
        config = folder / "config.yaml"
        config.write_text(json.dumps({"model": model, "train": {**train, "validate_every": max(1, steps // 10)}}))
        if not (folder / "model").exists():
            print(f"{name} …", flush=True)
            align.run(Run(config, folder, quiet=True), method, sft if tuned else inpainter, pairs)
        with (folder / "watch.csv").open(newline="", encoding="utf-8") as file:
            rows += [{"chapter": name, **r} for r in csv.DictReader(file)]
    write_results(results, metrics(rows), rows, seed=7)
    table = markdown(rows)
    results.with_suffix(".md").write_text(table, encoding="utf-8")
    return table


def metrics(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The last measurement of every chapter."""
    out = {}
    for name in dict.fromkeys(r["chapter"] for r in rows):
        last = [r for r in rows if r["chapter"] == name][-1]
        for key in SHOWN:
            out[f"{name}.{key}"] = metric(float(last[key]), 1)
    return out


def markdown(rows: list[dict[str, Any]]) -> str:
    """The last measurement of every chapter, and its alarms with the step at which each was first raised."""
    lines = [f"| run | {' | '.join(SHOWN)} | seen |", f"|---|{'---|' * (len(SHOWN) + 1)}"]
    for name in dict.fromkeys(r["chapter"] for r in rows):
        own = [r for r in rows if r["chapter"] == name]
        first: dict[str, str] = {}
        for r in own:
            for alarm in filter(None, r["alarms"].split("; ")):
                first.setdefault(alarm.split(":")[0], r["step"])
        seen = ", ".join(f"{fault} (step {step})" for fault, step in first.items()) or "nothing"
        values = " | ".join(f"{float(own[-1][k]):.3f}" for k in SHOWN)
        lines.append(f"| {name} | {values} | {seen} |")
    return "\n".join(lines) + "\n"
