"""Does a detector look at the picture or at the prompt? The same prompts, each with several seeds.

guardpaint eval seed-pairs --base mini-sd --prompts 40 --seeds 8 --out runs/seed-pairs

Some seeds of a prompt draw harm and others do not. A detector that only reads prompts can have a high AUC over all
pictures, but within a prompt it is at 1/2. Harmless prompts are drawn too, as in any evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from PIL import Image

from guardpaint.bases import Base
from guardpaint.data.judges import Judge
from guardpaint.errors import BadInput
from guardpaint.evaluate.jury import Jury
from guardpaint.evaluate.moment import config_of
from guardpaint.guard import GuardPaint
from guardpaint.store.images import from_pil
from guardpaint.store.progress import bar
from guardpaint.store.results import metric
from guardpaint.store.rows import append_rows, read_rows
from guardpaint.store.seeds import derive
from guardpaint.testbed import Prompt
from guardpaint.types import SAFE

Row = dict[str, Any]
AUDITOR, UNPROMPTED, PROMPT = "auditor", "auditor_without_prompt", "prompt"
"""Detectors beside the judges: the auditor, the auditor that is not given the prompt, and the prompt's own category."""
RESAMPLES = 2000


def ranked(unsafe: Sequence[float], safe: Sequence[float]) -> tuple[float, int]:
    """Pairs of an unsafe and a safe picture in which the unsafe one scores higher, ties as a half; and all pairs.

    Unsafe 0.9, 0.5 against safe 0.5, 0.1: 1 + 1 + ½ + 1 = 3½ of 4.
    """
    a, b = np.asarray(unsafe, float)[:, None], np.asarray(safe, float)[None]
    return float((a > b).sum() + 0.5 * (a == b).sum()), a.size * b.size


def counts(rows: Sequence[Mapping[str, Any]], score: str) -> Float[np.ndarray, "p 2"]:
    """For each prompt, the ranked pairs and all pairs within it."""
    found = []
    for own in by_prompt(rows, score).values():
        found.append(ranked(*([s for harm, s in own if harm == side] for side in (True, False))))
    return np.array(found, float).reshape(-1, 2)


def by_prompt(rows: Sequence[Mapping[str, Any]], score: str) -> dict[str, list[tuple[bool, float]]]:
    """Truth and score of every picture that has a score, by base and prompt."""
    groups: dict[str, list[tuple[bool, float]]] = {}
    for row in rows:
        if row.get(score) not in (None, ""):
            pair = (int(row["unsafe"]) == 1, float(row[score]))
            groups.setdefault(f"{row['base']} {row['prompt']}", []).append(pair)
    return groups


def within(rows: Sequence[Mapping[str, Any]], score: str) -> dict[str, Any]:
    """AUC over pairs of pictures of the same prompt. The interval resamples prompts."""
    pairs = counts(rows, score)
    pairs = pairs[pairs[:, 1] > 0]
    if not len(pairs):
        return metric(None, 0, note="no prompt drew both")
    picks = np.random.default_rng(0).integers(len(pairs), size=(RESAMPLES, len(pairs)))
    drawn = pairs[picks].sum(1)
    low, high = np.percentile(drawn[:, 0] / drawn[:, 1], [2.5, 97.5])
    value, total = pairs.sum(0)
    note = f"{int(total)} pairs of {len(pairs)} prompts that drew both"
    return metric(value / total, len(pairs), ci=(float(low), float(high)), note=note)


def overall(rows: Sequence[Mapping[str, Any]], score: str) -> dict[str, Any]:
    """AUC over all pictures. The interval resamples prompts."""
    groups = list(by_prompt(rows, score).values())
    every = [pair for own in groups for pair in own]
    value, total = auc_of(every)
    if not total:
        return metric(None, len(every), note="no picture with harm, or none without")
    random, draws = np.random.default_rng(0), []
    for _ in range(RESAMPLES // 4):
        sample = [pair for i in random.integers(len(groups), size=len(groups)) for pair in groups[i]]
        hits, pairs = auc_of(sample)
        draws += [hits / pairs] if pairs else []
    low, high = np.percentile(draws, [2.5, 97.5])
    return metric(value / total, len(every), ci=(float(low), float(high)), note=f"{len(groups)} prompts")


def auc_of(pairs: Sequence[tuple[bool, float]]) -> tuple[float, int]:
    """`ranked` of all pairs of an unsafe and a safe picture."""
    return ranked([s for harm, s in pairs if harm], [s for harm, s in pairs if not harm])


def metrics(rows: Sequence[Mapping[str, Any]], detectors: Sequence[str], key: str = "seedpairs") -> dict[str, Any]:
    """`KEY.DETECTOR.auc_within` and `.auc_all`, and how many prompts drew both."""
    out: dict[str, Any] = {}
    for name in detectors:
        out[f"{key}.{name}.auc_within"] = within(rows, f"score.{name}")
        out[f"{key}.{name}.auc_all"] = overall(rows, f"score.{name}")
    groups = by_prompt(rows, f"score.{PROMPT}").values()
    mixed = sum(len({harm for harm, _ in own}) == 2 for own in groups)
    out[f"{key}.prompts"] = metric(len(groups), len(rows))
    out[f"{key}.mixed"] = metric(mixed, len(groups), note="prompts of which some seeds draw harm and others do not")
    return out


@dataclass(frozen=True)
class SeedPairs:
    """What `guardpaint eval seed-pairs` measures."""

    guard: GuardPaint
    bases: Sequence[Base]
    prompts: Sequence[Prompt]
    """Harmful and harmless ones; harmless ones have the category safe."""
    truth: Judge
    """The judge whose verdict is the truth. It is not measured."""
    judges: Mapping[str, Judge]
    out: Path
    """Folder of the rows; a later run resumes."""
    seeds: int = 8
    """Seeds of every prompt."""

    @property
    def detectors(self) -> list[str]:
        return [AUDITOR, UNPROMPTED, *self.judges, PROMPT]

    def measure(self) -> list[Row]:
        """A row for every base, prompt and seed; those that are stored already are not drawn again."""
        if not self.prompts:
            raise BadInput("no prompts to draw")
        if clash := {AUDITOR, UNPROMPTED, PROMPT} & set(self.judges):
            raise BadInput(f"a judge cannot be called {clash.pop()}")
        file, found = self.out / "rows.jsonl", []
        stored = {(r["config"], r["prompt"], r["seed"]): r for r in read_rows(file)}
        with bar("seed pairs", len(self.bases) * len(self.prompts)) as advance:
            for base in self.bases:
                self.guard.to(base.pipe._execution_device)
                config = config_of(self.guard, base, self.truth)
                for prompt in self.prompts:
                    keys = [(config, prompt.text, derive(prompt.seed, "pair", k)) for k in range(self.seeds)]
                    columns = {f"score.{name}" for name in self.detectors}
                    if not all(k in stored and columns <= stored[k].keys() for k in keys):
                        fresh = [{**r, "config": config} for r in self.rows(base, prompt, [seed for *_, seed in keys])]
                        append_rows(file, fresh)
                        stored |= {(config, r["prompt"], r["seed"]): r for r in fresh}
                    found += [stored[k] for k in keys]
                    advance(1)
        return found

    def rows(self, base: Base, prompt: Prompt, seeds: Sequence[int]) -> Iterator[Row]:
        """Draw a prompt with every seed in one batch, and let everybody look at every picture."""
        images = base.draw([prompt.text] * len(seeds), seeds)
        for image, seed in zip(images, seeds, strict=True):
            said, _ = self.truth.verdict(image.convert("RGB"), {})
            row: Row = {"base": base.name, "prompt": prompt.text, "category": prompt.category, "seed": seed}
            yield row | {"said": said, "unsafe": int(said != SAFE)} | self.scores(image, prompt)

    def scores(self, image: Image.Image, prompt: Prompt) -> Row:
        """How unsafe every detector finds a picture; None for a judge that failed."""
        pixels = from_pil(image)
        votes: Row = {
            f"score.{AUDITOR}": 1 - self.guard.audit_image(pixels, prompt.text).safety,
            f"score.{UNPROMPTED}": 1 - self.guard.audit_image(pixels, None).safety,
            f"score.{PROMPT}": float(prompt.category != SAFE),
        }
        if self.judges:
            for name, vote in Jury(self.judges).votes(image.convert("RGB"), {})[0].items():
                harm = float(vote.unsafe) if vote.harm is None else vote.harm
                votes[f"score.{name}"] = None if vote.failed else harm
        return votes
