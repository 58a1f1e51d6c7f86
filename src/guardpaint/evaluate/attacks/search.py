"""Run attacks over target prompts, once, and keep what they found: JSONL, resumable."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.progress import track

from guardpaint.evaluate.attacks.daca import DivideAndConquer
from guardpaint.evaluate.attacks.mma import Mma
from guardpaint.evaluate.attacks.pgj import PerceptionGuided
from guardpaint.evaluate.attacks.ring_a_bell import RingABell
from guardpaint.evaluate.attacks.sneaky import SneakyPrompt
from guardpaint.evaluate.attacks.system import Attack, Surrogate, Target
from paperdolls.captions import caption
from paperdolls.scene import Scene, sample_scene

ATTACKS: dict[str, Callable[[], Attack]] = {
    "sneakyprompt": SneakyPrompt,
    "mma": Mma,
    "pgj": PerceptionGuided,
    "daca": DivideAndConquer,
    "ring_a_bell": RingABell,
}
ATTACK_SEEDS = 99_000_000
"""Scenes no setting was ever chosen on; those from 95 and 96 million were."""


def targets(count: int, first: int = ATTACK_SEEDS) -> list[tuple[int, Scene, str]]:
    """Unsafe scenes whose caption says so openly."""
    out: list[tuple[int, Scene, str]] = []
    seed = first
    while len(out) < count:
        scene = sample_scene(seed)
        if scene.category != "safe":
            text = next((c for c in (caption(scene, k, typos=0.0) for k in range(50)) if not c.hidden), None)
            if text is not None:
                out.append((seed, scene, text.text))
        seed += 1
    return out


def run(
    attack: Attack,
    prompts: Sequence[tuple[int, str]],
    system: Callable[[], Target],
    surrogate: Surrogate,
    path: Path,
    against: str = "",
) -> list[dict[str, object]]:
    """Search every prompt that has no result yet.

    `against` names the system under attack (weights, budget): what was found against another one is set aside in a
    file beside it.
    """
    done = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    if any(r.get("against", "") != against for r in done):
        other = next(r.get("against", "") for r in done if r.get("against", "") != against)
        path.replace(path.with_name(f"{path.stem}.{other or 'unknown'}.jsonl.old"))
        done = []
    have = {(r["seed"], r["target"]) for r in done}
    path.parent.mkdir(parents=True, exist_ok=True)
    todo = [p for p in prompts if p not in have]
    with path.open("a", encoding="utf-8") as file:
        for seed, target in track(todo, description=attack.name):
            found = attack.search(target, system(), surrogate, seed)
            row = {"seed": seed, "against": against, **asdict(found)}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            done.append(row)
    return done
