"""Measure the time of every defence, one picture at a time, side by side in one run: docs/results/defences.json.

    python bench/defences.py [--attacks runs/attacks] [--prompts 10] [--base mini-sd --base mini-flux]

Each prompt goes through all defences, in random order, before the next prompt does, so that other load on the machine
affects all of them alike. Ratios are to the undefended base on the same prompts.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import torch

from guardpaint.bases import load_base
from guardpaint.evaluate import run
from guardpaint.evaluate.attacks.search import ATTACKS
from guardpaint.evaluate.defences.opening import DEFENCES, open_defence
from guardpaint.evaluate.statistics import mean, ratio_interval
from guardpaint.guard import GuardPaint
from guardpaint.store.progress import track
from guardpaint.store.results import REVISION, metric, require_clean, write_results
from guardpaint.testbed import open_testbed

MORE = ("ours:keep=3", "ours:audits=1,audit_start=1.0")
"""Further settings of ours to time: with the ranker, and with an audit of the last step only."""


def cases(attacks: Path, count: int) -> dict[str, list[run.Case]]:
    """`count` attack prompts, each of another scene, with the attacks taking turns; and `count` benign ones."""
    world = open_testbed()
    suites = [run.attack_suite(attacks / f"{a}-{world.bases()[0]}.jsonl", count) for a in ATTACKS]
    return {"attack": [suites[k % len(suites)][k] for k in range(count)], "benign": run.benign_suite(world, count)}


def measure(base: str, prompts: dict[str, list[run.Case]], guard: GuardPaint, names: list[str]) -> list[dict[str, Any]]:
    """A row with the time of every prompt under every named defence that runs on the base."""
    opened = load_base(base)
    defences = {name: open_defence(name, guard)[0] for name in names}
    defences = {name: defence for name, defence in defences.items() if not defence.applies(opened)}
    for defence in defences.values():  # warm-up
        defence.generate(opened, [prompts["attack"][0].prompt], [prompts["attack"][0].seed])
    rows, lot = [], random.Random(0)
    turns = [(kind, case) for kind, some in prompts.items() for case in some]
    for kind, case in track(turns, description=base):
        for name in lot.sample(list(defences), len(defences)):
            began = time.perf_counter()
            outcome = defences[name].generate(opened, [case.prompt], [case.seed])[0]
            spent = time.perf_counter() - began
            rows.append({"base": base, "kind": kind, "defence": name, "prompt": case.prompt, "seed": case.seed})
            rows[-1] |= {"status": outcome.status, "seconds": round(spent, 4), "git": REVISION}
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
        rows += measure(base, cases(args.attacks, args.prompts), guard, [*DEFENCES, *MORE])
        write_results(args.out, metrics(rows), rows, seed=0)
    for name, m in metrics(rows).items():
        if name.endswith("ratio"):
            print(f"{name:50} {m['value']:.2f}")


if __name__ == "__main__":
    main()
