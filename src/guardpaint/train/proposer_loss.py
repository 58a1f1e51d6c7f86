"""Losses of the tournament proposer and of the ranker, as pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

PerCandidate = Float[Tensor, " n"]
Scalar = Float[Tensor, ""]

DIVERSITY = 0.01
"""Default weight of the distance between actions, and of the distance between their pictures."""
DEPTH = 4
"""Index of the depth among the continuous knobs."""
FIRST_DELTA, LEAST_DELTA, NULL_SAMPLES = 0.05, 0.01, 50
"""The safety margin δ before it is calibrated, its minimum, and the samples that calibrating it needs."""
RECALIBRATED = 100
"""Steps between two calibrations of δ."""


@dataclass(frozen=True)
class Weights:
    """Weights of the regularising terms in the proposer's loss."""

    entropy: float = 0.01
    seed_entropy: float = 0.005
    cost: float = 0.005
    distance: float = DIVERSITY


def advantages(utility: PerCandidate, bonus: PerCandidate | None = None) -> PerCandidate:
    """w = softmax(u/τ) − 1/N with τ = std(u), at least 1e-6, plus the centred bonus; without gradient."""
    u = utility.detach()
    tau = u.std(correction=0).clamp_min(1e-6)
    w = torch.softmax(u / tau, 0) - 1 / len(u)
    return w if bonus is None else w + (bonus - bonus.mean()).detach()


def embedding_bonus(embeds: Float[Tensor, "n d"], strength: float = DIVERSITY) -> PerCandidate:
    """`strength` times the mean distance of each candidate's image embedding to the others', without gradient."""
    n = len(embeds)
    if n < 2:
        return torch.zeros(n)
    return strength * torch.cdist(embeds, embeds).sum(1).detach() / (n - 1)


def policy_loss(log_prob: PerCandidate, advantage: PerCandidate, importance: PerCandidate | None = None) -> Scalar:
    """−Σ w log π(a|s); each term is weighted by its importance if another policy drew the actions."""
    weight = advantage if importance is None else advantage * importance.detach()
    return -(weight * log_prob).sum()


def gaussian_entropy(log_std: Float[Tensor, "1 k"]) -> Scalar:
    """Entropy of independent Gaussians: Σ (½ + ½ ln 2π + ln σ)."""
    return (0.5 + 0.5 * math.log(2 * math.pi) + log_std).sum()


def categorical_entropy(logits: Float[Tensor, "1 k"]) -> Scalar:
    """−Σ p ln p."""
    log_p = logits.log_softmax(1)
    return -(log_p.exp() * log_p).sum()


def cost(actions: Float[Tensor, "n 5"]) -> Scalar:
    """Mean normalised depth of reparameterised actions: deeper repairs take longer."""
    return actions[:, DEPTH].clamp(0, 1).mean()


def diversity(actions: Float[Tensor, "n 5"]) -> Scalar:
    """Mean distance between pairs of reparameterised actions, clipped to [0, 1] as they are when carried out."""
    actions = actions.clamp(0, 1)
    n = len(actions)
    if n < 2:
        return actions.sum() * 0
    pairs = torch.triu_indices(n, n, 1)
    gap = actions[pairs[0]] - actions[pairs[1]]
    return (gap.pow(2).sum(1) + 1e-12).sqrt().mean()


def proposer_loss(
    log_prob: PerCandidate,
    advantage: PerCandidate,
    actions: Float[Tensor, "n 5"],
    log_std: Float[Tensor, "1 5"],
    logits: Float[Tensor, "1 k"],
    importance: PerCandidate | None = None,
    weights: Weights = Weights(),  # noqa: B008
) -> dict[str, Tensor]:
    """L = −Σ w log π − 0.01 H_cont − 0.005 H_disc + 0.005 depth − 0.01 distance, with the default weights."""
    policy = policy_loss(log_prob, advantage, importance)
    entropy, seed_entropy = gaussian_entropy(log_std), categorical_entropy(logits)
    depth, distance = cost(actions), diversity(actions)
    total = policy - weights.entropy * entropy - weights.seed_entropy * seed_entropy
    total = total + weights.cost * depth - weights.distance * distance
    return {"loss": total, "policy": policy, "entropy": entropy, "cost": depth, "diversity": distance}


def importance(log_prob: PerCandidate, behaviour: PerCandidate, most: float = 5.0) -> PerCandidate:
    """Importance weights π/μ of the actions, at most `most`, without gradient."""
    return (log_prob.detach() - behaviour).exp().clamp(max=most)


def effective_samples(weights: Float[Tensor, " m"]) -> float:
    """(Σ ρ)² / Σ ρ²: how many on-policy samples the weighted ones are worth."""
    squares = float((weights**2).sum())
    return float(weights.sum()) ** 2 / squares if squares > 0 else 0.0


def recalibrated(delta: float, null_changes: Sequence[float]) -> float:
    """δ as the 95th percentile of |ΔS| under null edits, at least 0.01; with fewer than 50 of them, δ is unchanged."""
    if len(null_changes) < NULL_SAMPLES:
        return delta
    return max(LEAST_DELTA, float(torch.tensor(list(null_changes)).abs().quantile(0.95)))


def listnet(scores: Float[Tensor, "b n"], utility: Float[Tensor, "b n"]) -> Scalar:
    """Cross-entropy between the top-one distributions of utilities and of scores."""
    target = torch.softmax(utility / utility.std(1, correction=0, keepdim=True).clamp_min(1e-6), 1)
    return -(target * scores.log_softmax(1)).sum(1).mean()


def plackett_luce(scores: Float[Tensor, "b n"], utility: Float[Tensor, "b n"]) -> Scalar:
    """Negative log-likelihood of the order by utility, averaged over places."""
    order: Int[Tensor, "b n"] = utility.argsort(dim=1, descending=True, stable=True)
    sorted_scores = scores.gather(1, order)
    later = sorted_scores.flip(1).logcumsumexp(1).flip(1)
    return (later - sorted_scores).mean()


def ranker_loss(scores: Float[Tensor, "b n"], utility: Float[Tensor, "b n"]) -> dict[str, Tensor]:
    """ListNet + ½ Plackett–Luce; tournaments whose utilities are all equal have no order and are left out."""
    ordered = utility.std(1, correction=0) > 1e-6
    if not ordered.any():
        zero = scores.sum() * 0
        return {"loss": zero, "listnet": zero, "plackett_luce": zero}
    a, b = listnet(scores[ordered], utility[ordered]), plackett_luce(scores[ordered], utility[ordered])
    return {"loss": a + 0.5 * b, "listnet": a, "plackett_luce": b}
