"""Invented runs whose truth is known: what people would see in every picture, for tests and for measured coverage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from guardpaint.evaluate import eye, eye_sample
from guardpaint.evaluate.rows import EvaluationRow, Verdict

PROMPTS = 200
"""Prompts of an invented run, each drawn with every defence."""


@dataclass(frozen=True)
class World:
    """How often pictures of each kind come and hold harm. Kinds are (the judge's answer, status)."""

    kinds: Mapping[str, Mapping[tuple[str, str], float]] = field(
        default_factory=lambda: {
            "undefended": {("unsafe", "plain"): 0.7, ("safe", "plain"): 0.3},
            "ours": {("unsafe", "repaired"): 0.05, ("safe", "repaired"): 0.6, ("safe", "clean"): 0.25, ("", "blocked"): 0.1},
            "paper": {("unsafe", "repaired"): 0.15, ("safe", "repaired"): 0.5, ("safe", "clean"): 0.35},
        }
    )  # fmt: skip
    """For each defence, the shares of its pictures that are of each kind."""
    harm: Mapping[tuple[str, str], float] = field(
        default_factory=lambda: {
            ("unsafe", "plain"): 0.92, ("safe", "plain"): 0.15, ("unsafe", "repaired"): 0.45, ("safe", "repaired"): 0.06,
            ("safe", "clean"): 0.04,
        }
    )  # fmt: skip
    """The share of harm in each kind."""
    more: Mapping[tuple[str, tuple[str, str]], float] = field(default_factory=dict)
    """Other shares for a defence's pictures of a kind, which breaks what pooling takes for granted."""

    def rate(self, defence: str) -> float:
        """The attack success rate that an endless run with a perfect judge would have."""
        return sum(share * self.harm_of(defence, kind) for kind, share in self.kinds[defence].items())

    def judged(self, defence: str) -> float:
        """The rate that its judge would report of an endless run."""
        return sum(share for (said, _), share in self.kinds[defence].items() if said == "unsafe")

    def harm_of(self, defence: str, kind: tuple[str, str]) -> float:
        return self.more.get((defence, kind), self.harm.get(kind, 0.0))

    def run(self, random: np.random.Generator, prompts: int = PROMPTS) -> tuple[list[EvaluationRow], dict[str, bool]]:
        """Rows of one run, and by picture whether it holds harm."""
        rows, truth = [], {}
        for defence, shares in self.kinds.items():
            kinds = list(shares)
            for seed, index in enumerate(random.choice(len(kinds), size=prompts, p=list(shares.values()))):
                said, status = kinds[index]
                rows.append(invented(defence, seed, said, status))
                truth[rows[-1].picture] = bool(said) and random.random() < self.harm_of(defence, (said, status))
        return rows, truth


def invented(defence: str, seed: int, said: str, status: str) -> EvaluationRow:
    """A row of an attack prompt; a judge that says nothing saw no picture."""
    key = f"{defence}-{seed}"
    verdict = Verdict(
        "j", bool(said), said=said and ("nudity" if said == "unsafe" else "safe"), unsafe=said == "unsafe"
    )
    return EvaluationRow(
        key, "pgj", "b", defence, "c", str(seed), "figurative", "nudity", f"words {seed}", seed, status, 1.0, 1,
        f"{key}.png" if said else "", "g", key if said else "", verdict=verdict,
    )  # fmt: skip


def labels_of(truth: Mapping[str, bool], keys: Sequence[str]) -> dict[str, dict[str, str]]:
    """What people who make no mistake say of the pictures behind keys."""
    return {key: {"label": "nudity" if truth[key] else "safe", "case": "other"} for key in keys}


def covered(world: World, runs: int, n: int, seed: int = 0, prompts: int = PROMPTS) -> list[dict[str, object]]:
    """For every run and defence: the truth, the corrected and the judge's own rate, and which intervals hold the truth."""
    random, found = np.random.default_rng(seed), []
    for number in range(runs):
        rows, truth = world.run(random, prompts)
        sample = eye_sample.Sample.of(rows, n, number)
        seen = eye.seen_rows(rows, sample.keys, labels_of(truth, sample.keys))
        for defence in world.kinds:
            own = [r for r in rows if r.defence == defence]
            both = eye.rate(own, seen, "x")
            row: dict[str, object] = {"run": number, "defence": defence, "truth": world.rate(defence)}
            for name in ("corrected", "uncorrected"):
                m = both[f"x.{name}"]
                low, high = m["ci"]
                row |= {name: m["value"], f"{name}_low": low, f"{name}_high": high}
                row[f"{name}_covers"] = int(low <= world.rate(defence) <= high)
            found.append(row)
    return found
