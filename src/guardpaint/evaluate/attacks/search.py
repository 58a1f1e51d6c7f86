"""Run an attack over target prompts and store the prompts that it finds in a JSONL file; runs can be resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from guardpaint.evaluate.attacks.daca import DivideAndConquer
from guardpaint.evaluate.attacks.mma import Mma
from guardpaint.evaluate.attacks.pgj import PerceptionGuided
from guardpaint.evaluate.attacks.ring_a_bell import RingABell
from guardpaint.evaluate.attacks.sneaky import SneakyPrompt
from guardpaint.evaluate.attacks.system import Attack, Target
from guardpaint.store.checkpoint import write_atomic
from guardpaint.store.progress import track
from guardpaint.store.rows import append_rows, read_rows
from guardpaint.testbed import Prompt
from guardpaint.testbed.language import Attacker

ATTACKS: dict[str, Callable[[], Attack]] = {
    "sneakyprompt": SneakyPrompt,
    "mma": Mma,
    "pgj": PerceptionGuided,
    "daca": DivideAndConquer,
    "ring_a_bell": RingABell,
}


@dataclass(frozen=True)
class Search:
    """One attack against one system."""

    attack: Attack
    attacker: Attacker
    system: Callable[[], Target]
    """Makes a fresh target, with its whole budget, for every prompt."""
    against: str = ""
    """Hash of the system under attack: its weights, its judge, its budget."""


def known(prompt: Prompt) -> dict[str, Any]:
    """The columns of a row that describe the prompt it started from."""
    return {"category": prompt.category, "kind": prompt.kind, "asked": dict(prompt.asked)}


def run(search: Search, prompts: Sequence[Prompt], path: Path) -> list[dict[str, Any]]:
    """Search every prompt that has no row yet, and return all rows.

    A file of rows that were found against another system is renamed. Rows of earlier versions that lack the columns of
    `known` are completed.
    """
    rows = read_rows(path)
    others = [r.get("against", "") for r in rows if r.get("against", "") != search.against]
    if others:
        path.replace(path.with_name(f"{path.stem}.{others[0] or 'unknown'}.jsonl.old"))
        rows = []
    targets = {(p.seed, p.text): p for p in prompts}
    incomplete = [r for r in rows if "category" not in r and (r["seed"], r["target"]) in targets]
    for row in incomplete:
        row.update(known(targets[row["seed"], row["target"]]))
    if incomplete:
        write_atomic(path, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows).encode())
    searched = {(r["seed"], r["target"]) for r in rows}
    todo = [p for p in prompts if (p.seed, p.text) not in searched]
    for prompt in track(todo, description=search.attack.name):
        attempt = search.attack.search(prompt.text, search.system(), search.attacker, prompt.seed)
        row = {"seed": prompt.seed, "against": search.against, **known(prompt), **asdict(attempt)}
        append_rows(path, [row])
        rows.append(row)
    return rows
