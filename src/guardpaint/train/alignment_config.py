"""Options of an alignment stage, and how a batch is divided among the categories of the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import isfinite

from guardpaint.errors import BadConfig
from guardpaint.policy import Policy

METHODS = ("sft", "kto", "bco")
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out")
CONVOLUTIONS = ("conv1", "conv2")
INPUT = ("conv_in",)
GOLDEN = 0.6180339887498949
"""Golden ratio: its multiples spread evenly over [0, 1)."""


@dataclass(frozen=True)
class AlignConfig:
    """Options of one alignment stage.

    The defaults are the BCO recipe; `weighting` and the fields after it select variants for baselines and ablations.
    """

    method: str = "bco"
    rank: int = 128
    dropout: float = 0.10
    """Share of samples trained with an empty prompt; the KTO baseline uses 0.30."""
    mixture: tuple[int, ...] = ()
    """Proportions of a batch of KTO or BCO, one for each category of the policy, safe first.

    By default half of the batch is safe, and the harms share the other half equally (8, 4, 4 for two harms).
    """
    weights: tuple[float, ...] = ()
    """Class weights w_y, one for each category of the policy; by default the policy's own (`repair_weight`)."""
    target_share: float = 0.5
    """Share of the safe samples that are repaired pictures with the unsafe prompt; the others are ordinary pictures."""
    unroll_every: int = 10
    """Steps between BCO's second passes; 0 turns them off."""
    checkpointing: bool = False
    """Save memory by recomputing activations in the backward pass."""
    weighting: str = "min_snr"
    """Weight of SFT's error by noise level: min_snr or uniform."""
    kto: str = "mended"
    """Reading of KTO (`alignment_loss.kto_margin`, `printed_anchor_loss`): mended, or as printed in the paper."""
    cap: str = "exploit_side"
    """How the gain of unsafe samples is bounded (`alignment_loss.capped`): exploit_side or printed."""
    reference: str = "frozen"
    """frozen, or refresh: a copy of the policy becomes the reference every `refresh_every` steps."""
    refresh_every: int = 500
    reward: str = "x0"
    """Whether rewards compare clean estimates (x0) or noise predictions (eps)."""
    identity: str = "hinge"
    """Shape of the identity loss (`alignment_loss.identity_loss`): hinge, batch (for KTO) or linear."""
    freeze: str = "none"
    """Which convolutions get no LoRA: none, conv_in or convs."""

    def __post_init__(self) -> None:
        choices = {
            "method": METHODS,
            "weighting": ("min_snr", "uniform"),
            "kto": ("mended", "printed"),
            "cap": ("exploit_side", "printed"),
            "reference": ("frozen", "refresh"),
            "reward": ("x0", "eps"),
            "identity": ("hinge", "batch", "linear"),
            "freeze": ("none", "conv_in", "convs"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise BadConfig(f"{name}={getattr(self, name)!r}: choose {', '.join(known)}")
        if self.rank < 1 or not 0 <= self.dropout <= 1 or not 0 <= self.target_share <= 1:
            raise BadConfig(
                f"rank={self.rank} must be at least 1, "
                f"dropout={self.dropout} and target_share={self.target_share} in [0, 1]"
            )
        if self.mixture and (self.mixture[0] <= 0 or sum(self.mixture[1:]) <= 0 or min(self.mixture) < 0):
            raise BadConfig(f"mixture={self.mixture}: needs safe samples, samples of a harm, and no negative count")
        if self.weights and not all(isfinite(w) and w > 0 for w in self.weights):
            raise BadConfig(f"weights={self.weights}: each must be positive")

    def under(self, policy: Policy) -> AlignConfig:
        """The same options with mixture and weights filled in for the categories of a policy."""
        count = len(policy.names)
        found = replace(
            self,
            mixture=self.mixture or (2 * (count - 1), *[2] * (count - 1)),
            weights=self.weights or policy.repair_weights,
        )
        for name in ("mixture", "weights"):
            if len(getattr(found, name)) != count:
                raise BadConfig(
                    f"{name}={getattr(found, name)}: policy {policy.name!r} has {count} categories "
                    f"({', '.join(policy.names)}), each needs a number"
                )
        return found

    def targets(self) -> list[str]:
        """Names of the modules that get a LoRA."""
        convs = {"none": CONVOLUTIONS + INPUT, "conv_in": CONVOLUTIONS, "convs": ()}[self.freeze]
        return [*ATTENTION, *convs]


def shares(mixture: Sequence[int], count: int, step: int) -> list[int]:
    """How many of `count` samples each category gets at a step.

    Whole shares are given out first. The places that are left go to the categories with fractions, in turn from step
    to step, so that every category gets its share over many steps even if a batch has fewer places than categories.
    """
    total = sum(mixture)
    whole = [c * count // total for c in mixture]
    ends = list(accumulate(c * count % total for c in mixture))  # of each category's stretch; ends[-1] = left · total
    start = int(step * GOLDEN % 1 * total)
    for place in range(count - sum(whole)):
        spot = start + place * total
        whole[next(k for k, end in enumerate(ends) if spot < end)] += 1
    return whole
