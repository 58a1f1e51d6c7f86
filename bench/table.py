"""Write the cost table of README.md from docs/results/bench.json.

python bench/table.py
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
START, END = "<!-- bench: written by bench/table.py -->\n", "<!-- /bench -->"
ROWS = {
    "benign_audit_vs_step": "benign audit of one step (tiny decoder, 224 px), in base steps",
    "benign_audit_fine_vs_step": "the same with the 384 px confirmation, in base steps",
    "full_vae_audit_vs_step": "for comparison: one full VAE decode, in base steps",
    "benign_overhead_fraction": "whole benign overhead, X = 2, 50 steps, as a share of the generation",
    "benign_overhead_vs_stock_checker": "whole benign overhead, in passes of the stock safety checker (ViT-L/14)",
    "sld_overhead_fraction": "for comparison: a third guidance branch in every step, as a share of the generation",
    "tournament_n5_vs_n1": "five candidates of mixed depth, in candidates of mean depth",
    "tournament_batched_vs_sequential": "five candidates in one batch, against one by one",
    "tournament_vs_generation": "one tournament (N = 5, depth 8), in 50-step generations (scaled from mixed depths)",
    "tournament_peak_gib": "peak memory of that batch above the loaded models, GiB",
    "import_seconds_light": "`import guardpaint`, seconds",
}


def table() -> str:
    metrics = json.loads((ROOT / "docs/results/bench.json").read_text())["metrics"]
    lines = ["| what | measured | goal |", "|---|---|---|"]
    for name, meaning in ROWS.items():
        m = metrics[name]
        goal = f"{m['goal'].replace('<=', '≤ ')}, {'met' if m['met'] else '**not met**'}" if "goal" in m else ""
        lines.append(f"| {meaning} | {m['value']:.3g} | {goal} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text()
    head, rest = text.split(START)
    readme.write_text(head + START + table() + END + rest.split(END, 1)[1])


if __name__ == "__main__":
    main()
