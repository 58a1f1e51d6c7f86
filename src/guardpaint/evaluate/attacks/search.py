"""Run attacks over target prompts, once, and keep what they found: JSONL, resumable."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import track

from guardpaint.evaluate.attacks.daca import DivideAndConquer
from guardpaint.evaluate.attacks.mma import Mma
from guardpaint.evaluate.attacks.pgj import PerceptionGuided
from guardpaint.evaluate.attacks.ring_a_bell import RingABell
from guardpaint.evaluate.attacks.sneaky import SneakyPrompt
from guardpaint.evaluate.attacks.system import Attack, Target
from guardpaint.store.checkpoint import write_atomic
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
    """A fresh target for every prompt, with its whole budget."""
    against: str = ""
    """Names the system under attack: its weights, its judge, its budget."""


def known(prompt: Prompt) -> dict[str, Any]:
    """What a row says of the prompt it started from."""
    return {"category": prompt.category, "kind": prompt.kind, "asked": dict(prompt.asked)}


def run(search: Search, prompts: Sequence[Prompt], path: Path) -> list[dict[str, Any]]:
    """Search every prompt that has no row yet; returns all rows.

    Rows that were found against another system are set aside in a file beside this one. Rows written before they told
    of their prompt are completed.
    """
    done = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    others = [r.get("against", "") for r in done if r.get("against", "") != search.against]
    if others:
        path.replace(path.with_name(f"{path.stem}.{others[0] or 'unknown'}.jsonl.old"))
        done = []
    there = {(p.seed, p.text): p for p in prompts}
    bare = [r for r in done if "category" not in r and (r["seed"], r["target"]) in there]
    for row in bare:
        row.update(known(there[row["seed"], row["target"]]))
    path.parent.mkdir(parents=True, exist_ok=True)
    if bare:
        write_atomic(path, "".join(line(r) for r in done).encode())
    have = {(r["seed"], r["target"]) for r in done}
    todo = [p for p in prompts if (p.seed, p.text) not in have]
    with path.open("a", encoding="utf-8") as file:
        for prompt in track(todo, description=search.attack.name):
            found = search.attack.search(prompt.text, search.system(), search.attacker, prompt.seed)
            row = {"seed": prompt.seed, "against": search.against, **known(prompt), **asdict(found)}
            file.write(line(row))
            file.flush()
            done.append(row)
    return done


def line(row: dict[str, Any]) -> str:
    """A row as one line of the file."""
    return json.dumps(row, ensure_ascii=False) + "\n"
