"""Losses of the inpainter's two stages: refusal SFT, then KTO or BCO against a frozen reference.

The functions are pure: running statistics are passed in and returned. A sample is desired (safe) or not. Its reward is
the reference's error on the sample's clean latent inside the mask, minus the policy's. What a loss needs of the whole
batch of a step (`BatchMeans`) is passed in too, so a batch can be worked off in parts, on one process or on several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

Latent = Float[Tensor, "b c h w"]
Mask = Float[Tensor, "b 1 h w"]
PerSample = Float[Tensor, " b"]

HINGE = 0.02
"""Identity gap up to which the identity loss is zero."""


@dataclass(frozen=True)
class Preference:
    """Constants of one preference loss."""

    beta: float
    keep: float
    """Share of the old shift in its moving average."""
    low: float
    high: float
    """The shift is clamped to [low, high]."""


BCO = Preference(beta=50.0, keep=0.999, low=-0.03, high=0.03)
KTO = Preference(beta=7.0, keep=0.99, low=-0.02, high=0.05)


def clean_estimate(z: Latent, eps: Latent, alpha: PerSample) -> Latent:
    """ẑ0 = (z_t − √(1−ᾱ) ε)/√ᾱ."""
    a = alpha.view(-1, 1, 1, 1)
    return (z - (1 - a).sqrt() * eps) / a.sqrt()


def offset_noise(eps: Latent, offset: Float[Tensor, "b c 1 1"], strength: float = 0.05) -> Latent:
    """ε + 0.05 ε₀, where ε₀ has one number per channel."""
    return eps + strength * offset


def min_snr_weight(alpha: PerSample, gamma: float) -> PerSample:
    """min(SNR, γ)/SNR for ε-prediction, from ᾱ."""
    snr = alpha / (1 - alpha)
    return snr.clamp(max=gamma) / snr


def sft_loss(eps_hat: Latent, eps: Latent, weight: PerSample) -> Float[Tensor, ""]:
    """Mean square noise error, weighted per sample."""
    return (weight * ((eps_hat - eps) ** 2).mean((1, 2, 3))).mean()


def masked_error(estimate: Latent, clean: Latent, mask: Mask) -> PerSample:
    """ℓ = Σ (1 + ½ m)(ẑ0 − z0)² m / Σ m per sample."""
    weighted = (1 + 0.5 * mask) * (estimate - clean) ** 2 * mask
    return weighted.sum((1, 2, 3)) / mask.sum((1, 2, 3)).clamp_min(1e-6)


@dataclass(frozen=True)
class BatchMeans:
    """Means over the whole batch of a step; NaN for a kind of samples that it does not have."""

    safe: Float[Tensor, ""]
    """Mean of the preference signal over safe samples: BCO's gain g = ℓ_ref − ℓ_θ, KTO's gap g = ℓ_θ − ℓ_ref."""
    unsafe: Float[Tensor, ""]
    """The same over unsafe samples."""
    identity: Float[Tensor, ""]
    """Mean identity gap over all samples."""


def batch_means(
    signal: PerSample, gap: PerSample, desired: Bool[Tensor, " b"], total: Callable[[Tensor], Tensor] = lambda x: x
) -> BatchMeans:
    """Means over a batch from its signals and identity gaps; `total` adds up sums and counts of all processes."""
    signal, gap = signal.detach().float(), gap.detach().float()
    groups = (signal[desired], signal[~desired], gap)
    sums = torch.stack([torch.stack([g.sum(), g.new_tensor(float(len(g)))]) for g in groups])
    return BatchMeans(*(part / count for part, count in total(sums)))


def capped(
    gain: PerSample, desired: Bool[Tensor, " b"], unsafe_mean: Float[Tensor, ""], reading: str = "exploit_side"
) -> PerSample:
    """Bound the gain of unsafe samples by their mean over the whole batch.

    exploit_side: g ← max(g, −c) with c = max(1.5·|mean g_unsafe|, 0.03), so ruining the masked area does not pay.
    printed: the paper's g ← min(g, 1.5·|mean g_unsafe|).
    """
    limit = 1.5 * unsafe_mean.detach().nan_to_num().abs()
    if reading == "exploit_side":
        bounded = torch.maximum(gain, -limit.clamp_min(0.03))
    elif reading == "printed":
        bounded = torch.minimum(gain, limit)
    else:
        raise ValueError(f"cap={reading!r}: choose exploit_side or printed")
    return torch.where(desired, gain, bounded)


def signs(desired: Bool[Tensor, " b"]) -> PerSample:
    """+1 for desired samples, −1 for the others."""
    return desired.float() * 2 - 1


def shifted(delta: Float[Tensor, ""], raw: Float[Tensor, ""], rule: Preference) -> Float[Tensor, ""]:
    """The shift's new moving average, clamped; unchanged if `raw` is NaN, because the batch lacks a kind of samples."""
    moved = (rule.keep * delta + (1 - rule.keep) * raw.detach()).clamp(rule.low, rule.high)
    return torch.where(raw.isnan(), delta, moved)


def bco_shift(delta: Float[Tensor, ""], means: BatchMeans) -> Float[Tensor, ""]:
    """The new shift, from the midpoint of both kinds' mean uncapped gains."""
    return shifted(delta, 0.5 * (means.safe + means.unsafe), BCO)


def kto_shift(delta: Float[Tensor, ""], means: BatchMeans) -> Float[Tensor, ""]:
    """The new shift, from the mean gap of safe samples."""
    return shifted(delta, means.safe, KTO)


def bco_margin(gain: PerSample, delta: Float[Tensor, ""], desired: Bool[Tensor, " b"]) -> PerSample:
    """sgn·50·(g − δ), which is positive if the sample is on the right side of δ."""
    return signs(desired) * BCO.beta * (gain - delta)


def kto_margin(
    gap: PerSample, delta: Float[Tensor, ""], desired: Bool[Tensor, " b"], reading: str = "mended"
) -> PerSample:
    """The argument of KTO's σ, with the gap g = ℓ_θ − ℓ_ref.

    mended: sgn·7·(δ − g), positive if the sample is on the right side of δ, as in BCO.
    printed: the paper's sgn·7·(g − δ), which rewards a safe sample that the policy reconstructs worse than the
    reference, and an unsafe one that it reconstructs better.
    """
    right = signs(desired) * KTO.beta * (delta - gap)
    if reading not in ("mended", "printed"):
        raise ValueError(f"kto={reading!r}: choose mended or printed")
    return right if reading == "mended" else -right


def bco_loss(margin: PerSample, weight: PerSample) -> Float[Tensor, ""]:
    """E[w_y softplus(−margin)]."""
    return (weight * F.softplus(-margin)).mean()


def kto_loss(margin: PerSample, weight: PerSample) -> Float[Tensor, ""]:
    """E[w_y (1 − σ(margin))]."""
    return (weight * (1 - torch.sigmoid(margin))).mean()


def class_weight(category: Int[Tensor, " b"], weights: Sequence[float]) -> PerSample:
    """w_y of every sample."""
    return torch.tensor(weights, device=category.device)[category]


def identity_gap(policy: Latent, reference: Latent) -> PerSample:
    """mean ‖ẑ0^θ − ẑ0^ref‖² per sample."""
    return ((policy - reference) ** 2).mean((1, 2, 3))


def identity_loss(
    gap: PerSample, desired: Bool[Tensor, " b"], mean: Float[Tensor, ""], shape: str = "hinge"
) -> Float[Tensor, ""]:
    """Penalty on the identity gap, by `shape`; `mean` is the mean gap of the whole batch.

    hinge: quadratic above HINGE per sample, weighted 30 safe and 5 unsafe. batch: quadratic above HINGE of the mean
    gap, unweighted (KTO). linear: the weighted gap itself.
    """
    weight = torch.where(desired, 30.0, 5.0)
    if shape == "hinge":
        return (weight * (gap - HINGE).clamp_min(0) ** 2).mean()
    if shape == "batch":
        pivot = mean.detach() + gap.mean() - gap.mean().detach()  # the whole batch's value, these samples' gradient
        return (pivot - HINGE).clamp_min(0) ** 2
    if shape == "linear":
        return (weight * gap).mean()
    raise ValueError(f"identity={shape!r}: choose hinge, batch or linear")


def anchor_loss(eps_hat: Latent, eps: Latent, mask: Mask, desired: Bool[Tensor, " b"]) -> Float[Tensor, ""]:
    """Noise error outside the mask, averaged over safe samples (weights 200 safe, 0 unsafe, normalised)."""
    error = (((eps_hat - eps) * (1 - mask)) ** 2).mean((1, 2, 3))
    weight = torch.where(desired, 200.0, 0.0)
    return (weight * error).sum() / weight.sum().clamp_min(1e-6)


def printed_anchor_loss(eps_hat: Latent, eps: Latent, mask: Mask) -> Float[Tensor, ""]:
    """The paper's reconstruction loss of KTO: 200 times the mean noise error outside the mask, over all samples."""
    return 200.0 * (((eps_hat - eps) * (1 - mask)) ** 2).mean()


def saturation(margin: PerSample) -> Float[Tensor, ""]:
    """Share of samples whose σ(margin) is above 0.99 or below 0.01."""
    h = torch.sigmoid(margin)
    return ((h > 0.99) | (h < 0.01)).float().mean()


def ddim(z: Latent, eps: Latent, alpha: PerSample, following: PerSample) -> Latent:
    """One deterministic DDIM step from ᾱ to the next ᾱ."""
    a = following.view(-1, 1, 1, 1)
    return a.sqrt() * clean_estimate(z, eps, alpha) + (1 - a).sqrt() * eps
