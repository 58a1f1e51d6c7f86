"""What every defence costs, one picture at a time, all of them side by side in one run: docs/results/defences.json.

    python bench/defences.py [--attacks runs/attacks] [--prompts 10] [--base mini-sd --base mini-flux]

Each prompt goes through every defence before the next one does, in an order drawn anew each time, so that whatever
else the machine does meets all of them alike. Ratios are to the undefended base on the same prompts.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from guardpaint.evaluate import harness, run
from guardpaint.evaluate.statistics import mean, ratio_interval
from guardpaint.store.results import REVISION, metric, require_clean, write_results
from guardpaint.guard import GuardPaint

MORE = ("ours:keep=3", "ours:audits=1,audit_start=1.0")
"""Settings of ours that are worth knowing the cost of: with the ranker, and at the last step alone."""


def cases(attacks: Path, count: int) -> dict[str, list[run.Case]]:
    """As many attack prompts as benign ones, each of another scene, the attacks taking turns."""
    files = [attacks / f"{a}-{harness.SEARCHED}.jsonl" for a in harness.ATTACKS]
    suites = [run.attack_suite(file, count) for file in files]
    return {"attack": [suites[k % len(suites)][k] for k in range(count)], "benign": run.benign_suite(count)}


def measure(base: str, prompts: dict[str, list[run.Case]], guard: GuardPaint, names: list[str]) -> list[dict[str, Any]]:
    opened = harness.open_base(base)
    made = {name: harness.open_defence(name, guard)[0] for name in names}
    made = {name: defence for name, defence in made.items() if not defence.applies(opened)}
    for defence in made.values():  # warm-up
        defence.generate(opened, [prompts["attack"][0].prompt], [prompts["attack"][0].seed])
    rows, lot = [], random.Random(0)
    turns = [(kind, case) for kind, some in prompts.items() for case in some]
    for kind, case in track(turns, description=base):
        for name in lot.sample(list(made), len(made)):
            began = time.perf_counter()
            done = made[name].generate(opened, [case.prompt], [case.seed])[0]
            spent = time.perf_counter() - began
            rows.append({"base": base, "kind": kind, "defence": name, "prompt": case.prompt, "seed": case.seed})
            rows[-1] |= {"status": done.status, "seconds": round(spent, 4), "git": REVISION}
    return rows


def metrics(rows: list[dict[str, Any]]) -> dict[str, Any]:
    out = {}
    plain = {(r["base"], r["seed"], r["prompt"]): r["seconds"] for r in rows if r["defence"] == "undefended"}
    for name in dict.fromkeys(r["defence"] for r in rows):
        for kind in ("attack", "benign"):
            own = [r for r in rows if (r["defence"], r["kind"]) == (name, kind)]
            spent = [r["seconds"] for r in own]
            then = [plain[r["base"], r["seed"], r["prompt"]] for r in own]
            scenes = [r["seed"] for r in own]
            note = "on " + ", ".join(dict.fromkeys(r["base"] for r in own))
            out[f"{name}.{kind}.seconds"] = {**mean(spent, None, scenes), "note": note}
            interval = ratio_interval(spent, then, groups=scenes)
            out[f"{name}.{kind}.ratio"] = metric(sum(spent) / sum(then), len(own), ci=interval, note=note)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", type=Path, default=Path("runs/attacks"), help="folder of `guardpaint eval attack`")
    parser.add_argument("--prompts", type=int, default=10, help="attack prompts, and as many benign ones")
    parser.add_argument("--base", action="append", help="base model; repeat (default: mini-sd, mini-flux)")
    parser.add_argument("--out", type=Path, default=Path("docs/results/defences.json"))
    args = parser.parse_args()
    require_clean(args.out)
    torch.set_num_threads(1)
    guard = GuardPaint.embedded()
    rows: list[dict[str, Any]] = []
    for base in args.base or ["mini-sd", "mini-flux"]:
        rows += measure(base, cases(args.attacks, args.prompts), guard, [*harness.DEFENCES, *MORE])
        write_results(args.out, metrics(rows), rows, seed=0)
    for name, m in metrics(rows).items():
        if name.endswith("ratio"):
            print(f"{name:50} {m['value']:.2f}")


if __name__ == "__main__":
    main()
