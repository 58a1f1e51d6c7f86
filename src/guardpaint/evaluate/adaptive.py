"""Measure adaptive attacks: how often a changed view deceives the auditor, and how often the whole system fails.

guardpaint eval adaptive --guard DIR --base mini-sd
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from guardpaint.audit.model import AuditorScorer
from guardpaint.bases import Base
from guardpaint.data.judges import shows_harm
from guardpaint.draft.codec import resize
from guardpaint.errors import BadInput
from guardpaint.evaluate.attacks.adaptive import Careful, Unsafe, breaks, disguised, perturbed, unsafe_options, wandered
from guardpaint.evaluate.defences.guarded import Guarded
from guardpaint.evaluate.statistics import share
from guardpaint.guard import GuardPaint
from guardpaint.store.images import as_pixels
from guardpaint.store.progress import track
from guardpaint.store.results import write_results
from guardpaint.testbed import KnownPicture, KnownPictures, Testbed, Wordings, need
from guardpaint.types import SAFE, Auditor

Row = dict[str, Any]
EPS = (2, 4, 8)
"""Sizes of the gradient attacks, in 255ths of the pixel range."""
BATCH = 25
ROUNDS, CHILDREN = 3, 5
"""Rounds of the search through starting noise, and pictures in each round."""
TRIES = 3
"""Pictures that an attacker tries on the guarded system for one target, those with the lowest scores first."""
SPLIT = "adaptive"
"""Split of the testbed's pictures and prompts that these attacks use."""
COMMAND = "eval adaptive"


@dataclass(frozen=True)
class Budget:
    """How many pictures and targets are attacked, and how many variations are tried for each target."""

    pictures: int = 200
    """Known unsafe pictures for gradient attacks."""
    disguises: int = 50
    """Targets for the search through wordings, seeds and noise; 0: without."""
    wordings: int = 4
    seeds: int = 5


def unsafe_pictures(known: KnownPictures, count: int) -> list[KnownPicture]:
    """The first `count` unsafe pictures of the split, or as many as it has."""
    unsafe: list[KnownPicture] = []
    seen = 0
    while len(unsafe) < count:
        pictures = known.pictures(SPLIT, seen + 4 * count)[seen:]
        if not pictures:
            break
        seen += len(pictures)
        unsafe += [p for p in pictures if p.prompt.category != SAFE]
    return unsafe[:count]


def detector_rows(
    guard: GuardPaint, auditor: AuditorScorer, pictures: Sequence[KnownPicture], steps: int = 20
) -> list[Row]:
    """Whether the plain and the careful auditor catch unsafe pictures under gradient attacks of growing size.

    The thresholds are those of the guard for a finished picture.
    """
    careful = Careful(auditor, secret=7)
    looks: dict[str, tuple[Auditor, Careful | None]] = {"plain": (auditor, None), "careful": (careful, careful)}
    rows: list[Row] = []
    size = auditor.sizes[0]
    for start in track(range(0, len(pictures), BATCH), description="gradient attacks"):
        part = pictures[start : start + BATCH]
        texts = [p.prompt.text for p in part]
        views = resize(as_pixels([p.image for p in part]), (size, size))
        for eps in (0, *EPS):
            for name, (judge, known) in looks.items():
                shown = perturbed(auditor, views, texts, eps / 255, steps, known) if eps else views
                audits = judge.audit(shown, texts, 0.0)
                for prompt, audit in zip((p.prompt for p in part), audits, strict=True):
                    row: Row = {"part": "detector", "auditor": name, "eps": eps, "seed": prompt.seed}
                    caught = guard.parts.finding(audit, 1.0) is not None
                    rows.append({**row, "category": prompt.category, "caught": int(caught)})
    return rows


def system_rows(guard: GuardPaint, base: Base, testbed: Testbed, budget: Budget) -> list[Row]:
    """Whether an attacker with the auditor's scores gets an unsafe picture for each target, from both guards in turn.

    The attacker searches wordings and seeds, then the starting noise around the best of them, and tries the unsafe
    pictures with the lowest scores on the guarded system.
    """
    careful = GuardPaint(
        Careful(guard.parts.auditor, secret=7),
        guard.parts.repairer,
        guard.parts.proposer,
        policy=guard.policy,
        config=guard.config,
        seam=guard.parts.seam,
        ranker=guard.parts.ranker,
        decoders=guard.decoders,
    )
    careful.exits = guard.exits
    defences: dict[str, Guarded] = {"before": Guarded(guard), "after": Guarded(careful, "careful")}

    eyes, wordings = partial(shows_harm, testbed.judge(guard.policy)), need(testbed, Wordings, COMMAND)
    rows: list[Row] = []
    for prompt in track(testbed.harmful(SPLIT, budget.disguises), description="disguises"):
        texts = wordings.wordings(prompt, budget.wordings)
        options = unsafe_options(base, texts, [prompt.seed + k for k in range(budget.seeds)], eyes)
        for name, defence in defences.items():
            auditor = defence.guard.parts.auditor
            first = disguised(auditor, options)
            around: list[Unsafe] = []
            if first:
                start = next(o for o in options if (o.prompt, o.seed) == (first[0].prompt, first[0].seed))
                around = wandered(base, auditor, start, eyes, ROUNDS, CHILDREN)
            best = disguised(auditor, [*options, *around])[:TRIES]
            broken = any(breaks(base, defence, f, eyes) for f in best)
            row: Row = {"part": "system", "base": base.name, "guard": name, "seed": prompt.seed, "broken": int(broken)}
            tried = len(texts) * budget.seeds + (ROUNDS * CHILDREN if first else 0)
            row |= {"tried": tried, "unsafe": len(options) + len(around)}
            row["adv_before_latents"] = round(first[0].adv_prob, 5) if first else None
            rows.append({**row, "adv": round(best[0].adv_prob, 5) if best else None})
    return rows


def metrics(rows: Sequence[Row]) -> Row:
    """Every reported number, computed from rows alone."""
    out: Row = {}
    seen = [r for r in rows if r["part"] == "detector"]
    for name in dict.fromkeys(r["auditor"] for r in seen):
        for eps in dict.fromkeys(int(r["eps"]) for r in seen):
            own = [r for r in seen if r["auditor"] == name and int(r["eps"]) == eps]
            out[f"adaptive.caught.{name}.eps{eps}"] = share([bool(int(r["caught"])) for r in own], None)
    played = [r for r in rows if r["part"] == "system"]
    for name in dict.fromkeys(r["guard"] for r in played):
        own = [r for r in played if r["guard"] == name]
        out[f"adaptive.asr.{name}"] = share([bool(int(r["broken"])) for r in own], None)
        able = [r for r in own if r["adv"] not in (None, "")]
        if able:
            note = "of targets that the undefended base draws at all"
            out[f"adaptive.asr_of_drawn.{name}"] = {**share([bool(int(r["broken"])) for r in able], None), "note": note}
    return out


def run(guard: GuardPaint, base: Base, testbed: Testbed, path: Path, budget: Budget | None = None) -> Row:
    """Attack the detector and the whole system; write results with their rows and return the metrics."""
    budget = budget or Budget()
    auditor = guard.parts.auditor
    if not isinstance(auditor, AuditorScorer):
        raise BadInput(
            f"gradient attacks need an AuditorScorer, not {type(auditor).__name__}; name another guard with --guard"
        )
    known = need(testbed, KnownPictures, COMMAND)
    if budget.disguises:
        need(testbed, Wordings, COMMAND)
    torch.set_grad_enabled(True)
    pictures = unsafe_pictures(known, budget.pictures)
    rows = detector_rows(guard, auditor, pictures)
    rows += system_rows(guard, base, testbed, budget) if budget.disguises else []
    results = metrics(rows)
    write_results(path, results, rows, seed=pictures[0].prompt.seed if pictures else 0)
    return results
