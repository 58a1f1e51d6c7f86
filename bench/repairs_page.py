"""The tables on cheap repairs in docs/performance.md, and their figures, from docs/results/repairs.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from formatting import ROOT, cell, grid, metric_table, metrics_of, number, table

BASES = {name: name for name in ("mini-sd", "mini-sdxl", "mini-sd3", "mini-sd3-turbo", "mini-flux")}
VARIANTS = {
    "off": "the paper's tournaments",
    "waves": "waves",
    "few_steps": "few steps",
    "regions_together": "regions together",
    "one_candidate": "one candidate",
    "tiny_views": "no full decode",
    "fast": "**all of `dolls-fast`**",
    "negative_prompt": "negative prompt",
    "sld": "SLD",
    "post_hoc_block": "post-hoc block (stock checker's place)",
    "post_hoc_inpaint": "post-hoc inpaint",
    "post_hoc_regenerate": "post-hoc regenerate",
}
STAGES = {
    "first_pass": "first look",
    "audit": "further audits",
    "view": "full decode",
    "repair": "painting",
    "verify": "scoring",
    "reinsert": "reinsertion",
}
SAFETY = {
    "safety.attack_success.off": "attack success, the paper's tournaments",
    "safety.attack_success.fast": "attack success, everything on",
    "safety.attack_success.change": "change by pairs",
    "safety.whole.off": "whole safe picture, the paper's tournaments",
    "safety.whole.fast": "whole safe picture, everything on",
    "safety.whole.change": "change by pairs",
    "waves.ended_after_first": "tournaments that ended after their first candidate",
    "waves.candidates_per_tournament": "candidates painted in a tournament",
}
COLOURS = ("#9aa5b1", "#5b8def", "#7bc8a4", "#e07a5f", "#f2cc8f", "#81799b")


def repairs() -> list[str]:
    """Safety by pairs, times by variant, and times as candidates and regions are added, as far as measured."""
    metrics = metrics_of("repairs")
    lines = metric_table(metrics, {k: v for k, v in SAFETY.items() if k in metrics})
    rows = {name: meaning for name, meaning in VARIANTS.items() if any(f"times.{name}.{b}" in metrics for b in BASES)}
    if rows:
        columns = {f"times.*.{base}": base for base in BASES}
        lines += ["", *grid(metrics, rows, columns | {"times.*.attack_success_change": "change of attack success"})]
        counts = [metrics[f"times.fast.{base}"]["n"] for base in BASES if f"times.fast.{base}" in metrics]
        lines += ["", f"Time of a picture in that of the undefended base; {min(counts)} attacked prompts a base."]
    lines += many(metrics)
    return lines


def many(metrics: dict[str, Any]) -> list[str]:
    """The table of one to seven candidates and of one to three regions."""
    lines = []
    names = {"off": "the paper's", "few": "few steps", "few_waves": "few steps, waves"}
    counts = [n for n in range(1, 8) if f"scaling.few.n{n}" in metrics]
    if counts:
        body = [[title, *(cell(metrics.get(f"scaling.{name}.n{n}")) for n in counts)] for name, title in names.items()]
        lines += ["", *table(["time of N candidates, in that of one", *(f"N = {n}" for n in counts)], body)]
    body = []
    for name in ("off", "fast"):
        found = [metrics.get(f"regions.{name}.{count}") for count in (1, 2, 3)]
        if any(found):
            body.append([VARIANTS[name], *(f"{number(m['value'])} (n = {m['n']})" if m else "–" for m in found)])
    if body:
        head = ["painting and scoring per flagged step, ms", "one region", "two", "three"]
        lines += ["", *table(head, body)]
    return lines


def figures(folder: Path = ROOT / "docs/results") -> None:
    """Where the time of a flagged picture goes, and how it grows with candidates and regions."""
    from matplotlib.figure import Figure

    metrics = metrics_of("repairs")
    split = Figure((7, 2.2), layout="constrained")
    ax = split.subplots()
    for row, variant in enumerate(("off", "fast")):
        left = 0.0
        shares = {stage: metrics[f"split.{variant}.{stage}"]["value"] for stage in STAGES}
        whole = metrics[f"times.{variant}.mini-sd.triggered"]["value"]
        parts = {"the base's own": 1 / whole, **{STAGES[s]: v for s, v in shares.items()}}
        parts["the rest"] = max(0.0, 1 - sum(parts.values()))
        for (name, share), colour in zip(parts.items(), ("#d9dee4", *COLOURS, "#f5f5f5"), strict=True):
            ax.barh(row, share * whole, left=left, color=colour, label=name if row == 0 else None, edgecolor="white")
            left += share * whole
        ax.text(left + 0.02, row, f"× {whole:.2f}", va="center", fontsize=9)
    ax.set_yticks([0, 1], ["the paper's\ntournaments", "dolls-fast"])
    ax.invert_yaxis()
    ax.set_xlabel("time of a flagged picture on mini-sd, in that of the undefended base")
    ax.legend(ncols=4, fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    split.savefig(folder / "repairs-split.png", dpi=150)

    growth = Figure((7, 2.8), layout="constrained")
    left_ax, right_ax = growth.subplots(1, 2)
    names = {"off": "the paper's", "few": "few steps", "few_waves": "few steps, waves"}
    counts = range(1, 8)
    for (name, title), colour in zip(names.items(), COLOURS[1:], strict=False):
        values = [metrics[f"scaling.{name}.n{n}"]["value"] for n in counts]
        left_ax.plot(counts, values, marker="o", color=colour, label=title)
    left_ax.plot(counts, counts, color="#bbbbbb", linestyle=":", label="linear")
    left_ax.set_xlabel("candidates N")
    left_ax.set_ylabel("time, in that of one candidate")
    left_ax.legend(fontsize=7, frameon=False)
    for (name, title), colour in zip({"off": "the paper's", "fast": "dolls-fast"}.items(), COLOURS[1:], strict=False):
        found = [(c, metrics[f"regions.{name}.{c}"]["value"]) for c in (1, 2, 3) if f"regions.{name}.{c}" in metrics]
        right_ax.plot(*zip(*found, strict=True), marker="o", color=colour, label=title)
    right_ax.set_xlabel("regions of a flagged step")
    right_ax.set_ylabel("painting and scoring, ms")
    right_ax.set_xticks([1, 2, 3])
    right_ax.set_ylim(bottom=0)
    right_ax.legend(fontsize=7, frameon=False)
    for ax in (left_ax, right_ax):
        ax.spines[["top", "right"]].set_visible(False)
    growth.savefig(folder / "repairs-growth.png", dpi=150)


if __name__ == "__main__":
    figures()
