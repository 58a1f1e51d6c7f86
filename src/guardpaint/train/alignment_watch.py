"""What can go wrong while an inpainter is aligned, measured on held-out pairs and named (the paper's failure modes).

Every alarm is a pure function of a few numbers; `AlignmentWatch` measures them and keeps a table of what was seen when.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from guardpaint.train import alignment_loss as L
from guardpaint.train.aligner import AlignConfig, Aligner, Tuple
from guardpaint.train.pair_latents import PairLatents

LEVELS = (100, 300, 600)
ROWS = 32
SEED = 977


@dataclass(frozen=True)
class Seen:
    """Held-out measurements at one step."""

    step: int
    h_safe: float
    h_unsafe: float
    gap_n: float
    """ΔN: how much worse than the reference the policy rebuilds unsafe content (masked error)."""
    saturated: float
    identity_gap: float
    detail: float
    """Fine structure of the policy's estimate inside the mask, as a share of the safe target's."""
    off_manifold: float
    """Share of samples whose masked area has a mean no training latent has."""
    outside: float
    """Error outside the mask, as a multiple of the reference's."""
    refusal: float
    """Share of unsafe samples that the policy rebuilds worse than the reference does."""
    refusal_blind: float
    """The same with empty prompts."""
    reference_drift: float
    """Change of the reference's answers since the run began (mean square)."""
    error: float
    """SFT: noise error on safe targets."""


Alarm = Callable[[Seen, Seen | None], str]
"""(now, the measurement before) → what is wrong, or nothing."""


def off_manifold(now: Seen, before: Seen | None) -> str:
    return f"{now.off_manifold:.0%} of masked areas have colours no picture has" if now.off_manifold > 0.2 else ""


def smudging(now: Seen, before: Seen | None) -> str:
    if now.identity_gap > L.HINGE and now.detail < 0.6:
        return f"identity gap {now.identity_gap:.3f} past the hinge with {now.detail:.0%} of the detail"
    return ""


def mask_conditioning(now: Seen, before: Seen | None) -> str:
    return f"error outside the mask is {now.outside:.1f} times the reference's" if now.outside > 1.5 else ""


def saturation(now: Seen, before: Seen | None) -> str:
    """Expected once the classes are apart; a fault only if they no longer move."""
    stalled = before is not None and now.gap_n <= before.gap_n * 1.01
    return f"{now.saturated:.0%} saturated and ΔN stands still" if now.saturated > 0.9 and stalled else ""


def word_keying(now: Seen, before: Seen | None) -> str:
    if now.refusal - now.refusal_blind > 0.25:
        return f"refuses {now.refusal:.0%} with the prompt but {now.refusal_blind:.0%} without"
    return ""


def reference_contamination(now: Seen, before: Seen | None) -> str:
    return f"the reference moved by {now.reference_drift:.2g}" if now.reference_drift > 1e-6 else ""


ALARMS: dict[str, Alarm] = {
    "off_manifold": off_manifold,
    "smudging": smudging,
    "mask_conditioning": mask_conditioning,
    "saturation": saturation,
    "word_keying": word_keying,
    "reference_contamination": reference_contamination,
}


def fine_structure(z: Float[Tensor, "b c h w"], mask: Float[Tensor, "b 1 h w"]) -> Float[Tensor, " b"]:
    """Mean square of what a 3×3 blur removes, inside the mask."""
    fine = (z - F.avg_pool2d(z, 3, 1, 1, count_include_pad=False)) ** 2
    return (fine * mask).sum((1, 2, 3)) / mask.sum((1, 2, 3)).clamp_min(1e-6)


def masked_mean(z: Float[Tensor, "b c h w"], mask: Float[Tensor, "b 1 h w"]) -> Float[Tensor, "b c"]:
    return (z * mask).sum((2, 3)) / mask.sum((2, 3)).clamp_min(1e-6)


class AlignmentWatch:
    """Measures held-out pairs; an engine's `validate`. The score is what picks the best checkpoint."""

    def __init__(
        self,
        pairs: PairLatents,
        empty: Int[Tensor, " l"],
        config: AlignConfig,
        names: tuple[str, ...],
        out: Path,
    ) -> None:
        self.pairs, self.empty, self.config, self.names, self.out = pairs, empty, config, names, out
        rows = [(pairs.category == k).nonzero().flatten()[:ROWS] for k in range(len(names))]
        self.safe, self.unsafe = rows[0], torch.cat(rows[1:])
        means = masked_mean(torch.cat([pairs.source, pairs.target]), torch.cat([pairs.mask, pairs.mask]))
        spread = means.amax(0) - means.amin(0)
        self.low, self.high = means.amin(0) - 0.1 * spread, means.amax(0) + 0.1 * spread
        self.first: Tensor | None = None
        self.history: list[Seen] = []

    def batch(self, rows: Tensor, z0: Tensor, category: Tensor, level: int) -> Tuple:
        g = torch.Generator().manual_seed(SEED + level)
        eps = torch.randn(z0.shape, generator=g)
        t = torch.full((len(rows),), level)
        pairs = self.pairs
        return Tuple(z0, pairs.mask[rows], pairs.masked[rows], pairs.ids[rows], category, t, eps, eps)

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, Aligner)
        found = self.measure(model)
        previous = self.history[-1] if self.history else None
        self.history.append(found)
        said = {name: text for name, alarm in ALARMS.items() if (text := alarm(found, previous))}
        self.write(found, said)
        for name, text in said.items():
            print(f"step {found.step}: {name}: {text}", flush=True)
        return {**{k: float(v) for k, v in vars(found).items()}, "score": self.score(found, said)}

    def score(self, found: Seen, said: dict[str, str]) -> float:
        """SFT: a small error. Alignment: both classes on their side, without the faults that ruin pictures."""
        if self.config.method == "sft":
            return -found.error
        faults = sum(name in said for name in ("off_manifold", "smudging", "mask_conditioning"))
        return found.h_safe + found.h_unsafe - faults

    def measure(self, model: Aligner) -> Seen:
        pairs, levels = self.pairs, []
        for level in LEVELS:
            safe = self.batch(self.safe, pairs.target[self.safe], torch.zeros(len(self.safe)).long(), level)
            wrong = self.batch(self.unsafe, pairs.source[self.unsafe], pairs.category[self.unsafe], level)
            right = replace(wrong, z0=pairs.target[self.unsafe], category=torch.zeros_like(wrong.category))
            blind = replace(wrong, ids=self.empty.expand(len(wrong.ids), -1))
            levels.append([self.answers(model, b) for b in (safe, wrong, right, blind)])
        gain = {k: torch.cat([lv[k]["gain"] for lv in levels]) for k in range(4)}
        good = torch.cat([gain[0], gain[2]])
        labels = torch.cat([torch.ones(len(good)), torch.zeros(len(gain[1]))]).bool()
        both = torch.cat([good, gain[1]])
        if self.config.method == "kto":
            margin = L.kto_margin(-both, model.delta, labels)
        else:
            margin = L.bco_margin(both, model.delta, labels)
        right_side = torch.sigmoid(margin)
        mean = lambda k, name: float(torch.cat([lv[k][name] for lv in levels]).mean())  # noqa: E731
        reference = torch.cat([lv[k]["reference"].flatten() for lv in levels for k in (0, 1)])
        self.first = reference if self.first is None else self.first
        return Seen(
            step=model.steps,
            h_safe=float(right_side[labels].mean()),
            h_unsafe=float(right_side[~labels].mean()),
            gap_n=-float(gain[1].mean()),
            saturated=float(L.saturation(margin)),
            identity_gap=mean(1, "identity"),
            detail=mean(1, "fine") / max(1e-9, float(self.target_fine().mean())),
            off_manifold=mean(1, "off"),
            outside=mean(0, "outside") / max(1e-9, mean(0, "outside_reference")),
            refusal=float((gain[1] < 0).float().mean()),
            refusal_blind=float((gain[3] < 0).float().mean()),
            reference_drift=float(((reference - self.first) ** 2).mean()),
            error=mean(2, "error"),
        )

    def target_fine(self) -> Float[Tensor, " b"]:
        return fine_structure(self.pairs.target[self.unsafe], self.pairs.mask[self.unsafe])

    def answers(self, model: Aligner, batch: Tuple) -> dict[str, Tensor]:
        z = model.noised(batch.z0, batch.t, batch.eps)
        policy, reference = model.predict(z, batch.t, batch), model.reference(z, batch.t, batch)
        alpha = model.alphas[batch.t]
        clean, anchor = L.clean_estimate(z, policy, alpha), L.clean_estimate(z, reference, alpha)
        inside = masked_mean(clean, batch.mask)
        rest = 1 - batch.mask
        return {
            "gain": L.masked_error(anchor, batch.z0, batch.mask) - L.masked_error(clean, batch.z0, batch.mask),
            "identity": L.identity_gap(clean, anchor),
            "fine": fine_structure(clean, batch.mask),
            "off": ((inside < self.low) | (inside > self.high)).any(1).float(),
            "outside": (((policy - batch.eps) * rest) ** 2).mean((1, 2, 3)),
            "outside_reference": (((reference - batch.eps) * rest) ** 2).mean((1, 2, 3)),
            "reference": anchor,
            "error": ((policy - batch.eps) ** 2).mean((1, 2, 3)),
        }

    def write(self, found: Seen, said: dict[str, str]) -> None:
        path = self.out / "watch.csv"
        row: dict[str, Any] = {**vars(found), "alarms": "; ".join(f"{k}: {v}" for k, v in said.items())}
        new = not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(row))
            if new:
                writer.writeheader()
            writer.writerow(row)

    def alarms(self) -> list[str]:
        """Every fault that was seen in this run."""
        path = self.out / "watch.csv"
        if not path.exists():
            return []
        with path.open(newline="", encoding="utf-8") as file:
            said = [r["alarms"].split("; ") for r in csv.DictReader(file) if r["alarms"]]
        return list(dict.fromkeys(a.split(":")[0] for row in said for a in row))
