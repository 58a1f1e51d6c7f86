"""The auditor's losses, as pure functions of its scores.

Safety losses read the visual side alone, so they give no gradient to the text encoder or the faithfulness head;
InfoNCE trains those and the shared backbone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from guardpaint.audit.model import Scores


@dataclass(frozen=True)
class LossWeights:
    """L_adv + 0.5 L_class + 0.4 L_rel + 0.3 L_seam + 0.5 L_InfoNCE (+ L_map where masks are known)."""

    adv: float = 1.0
    category: float = 0.5
    strength: float = 0.4
    seam: float = 0.3
    match: float = 0.5
    maps: float = 0.0
    """Weight of L_map; 0 in the paper's config, where no loss sees a mask."""
    seam_maps: float = 0.0
    """Weight of the seam maps' loss; 0 in the paper's config, where P learns how strong artefacts are but not where."""


@dataclass(frozen=True)
class Targets:
    """Target scores of a batch of views."""

    category: Int[Tensor, " b"]
    strength: Float[Tensor, " b"]
    quality: Float[Tensor, " b"]
    mask: Float[Tensor, "b u v"] | None
    judged: Float[Tensor, " b"]
    """1 where the safety label is known, 0 where a composite may have changed it."""
    artefact: Float[Tensor, "b h w"] | None = None
    """Squared change that composites made, in units of a full artefact's."""
    rated: Float[Tensor, " b"] | None = None
    """1 where the quality is known, 0 where a partial repair left unrated edges; None: known everywhere."""
    located: Float[Tensor, " b"] | None = None
    """1 where the mask is known, 0 where only the label is; None: known everywhere."""
    labels: Float[Tensor, "b c"] | None = None
    """1 for each category of a view, where views may have several; None: each has only `category`."""


def adversarial(logit: Float[Tensor, " b"], category: Int[Tensor, " b"], judged: Float[Tensor, " b"]) -> Tensor:
    """L_adv: binary cross-entropy of "not safe"."""
    each = F.binary_cross_entropy_with_logits(logit, (category != 0).float(), reduction="none")
    return (judged * each).sum() / judged.sum().clamp(min=1)


def categorical(
    logits: Float[Tensor, "b c"],
    category: Int[Tensor, " b"],
    weights: Float[Tensor, " c"],
    judged: Float[Tensor, " b"],
    labels: Float[Tensor, "b c"] | None = None,
) -> Tensor:
    """L_class: cross-entropy with class weights, divided by the sum of the weights used.

    A view with several labels has a target that gives each of them the same probability, and their mean weight.
    """
    if labels is None:
        labels = F.one_hot(category, logits.shape[1]).to(logits.dtype)
    target = labels / labels.sum(1, keepdim=True)
    each = F.cross_entropy(logits, target, reduction="none")
    used = judged * (target * weights).sum(1)
    return (used * each).sum() / used.sum().clamp(min=1e-6)


def regression(predicted: Float[Tensor, " b"], target: Float[Tensor, " b"], known: Float[Tensor, " b"]) -> Tensor:
    """L_rel and L_seam: mean square error where the target is known."""
    return (known * (predicted - target) ** 2).sum() / known.sum().clamp(min=1)


def info_nce(cosines: Float[Tensor, "b b"], log_temperature: Tensor) -> Tensor:
    """L_InfoNCE: cross-entropy of finding each image's prompt in the batch, and each prompt's image, averaged."""
    logits = cosines / log_temperature.exp()
    target = torch.arange(len(cosines), device=cosines.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def map_loss(
    adv_map: Float[Tensor, "b u v"],
    class_maps: Float[Tensor, "b c u v"],
    category: Int[Tensor, " b"],
    mask: Float[Tensor, "b h w"],
    judged: Float[Tensor, " b"],
) -> Tensor:
    """L_map: BCE and Dice of r_adv, and cross-entropy of the class maps, against the mask at map size."""
    wanted = F.adaptive_avg_pool2d(mask[:, None], (adv_map.shape[-2], adv_map.shape[-1]))[:, 0]
    inside = adv_map.sigmoid()
    bce = F.binary_cross_entropy_with_logits(adv_map, wanted, reduction="none").mean((1, 2))
    overlap = 2 * (inside * wanted).sum((1, 2)) + 1
    dice = 1 - overlap / (inside.sum((1, 2)) + wanted.sum((1, 2)) + 1)
    logs = class_maps.log_softmax(1)
    harm = logs.gather(1, category.view(-1, 1, 1, 1).expand(-1, 1, *logs.shape[-2:]))[:, 0]
    classes = -(wanted * harm + (1 - wanted) * logs[:, 0]).mean((1, 2))
    return (judged * (bce + dice + classes)).sum() / judged.sum().clamp(min=1)


def seam_map_loss(
    seam_map: Float[Tensor, "b u v"], artefact: Float[Tensor, "b h w"], rated: Float[Tensor, " b"] | None = None
) -> Tensor:
    """Binary cross-entropy of each cell's quality; cells with and without an artefact have equal total weight."""
    change = F.adaptive_avg_pool2d(artefact[:, None], (seam_map.shape[-2], seam_map.shape[-1]))[:, 0]
    wanted = 1 - change.sqrt().clamp(max=1)
    each = F.binary_cross_entropy_with_logits(seam_map, wanted, reduction="none")
    known = torch.ones_like(each) if rated is None else rated.view(-1, 1, 1).expand_as(each)
    touched = (wanted < 1).float() * known
    whole = (wanted == 1).float() * known
    return ((touched * each).sum() / touched.sum().clamp(min=1) + (whole * each).sum() / whole.sum().clamp(min=1)) / 2


def total(
    scores: Scores,
    cosines: Float[Tensor, "p p"],
    log_temperature: Tensor,
    want: Targets,
    class_weights: Float[Tensor, " c"],
    weights: LossWeights,
) -> dict[str, Tensor]:
    """All losses by name; `loss` is their weighted sum."""
    parts = {
        "adv": adversarial(scores.adv_logit, want.category, want.judged),
        "category": categorical(scores.class_logits, want.category, class_weights, want.judged, want.labels),
        "strength": regression(scores.strength, want.strength, want.judged),
        "seam": regression(
            scores.quality, want.quality, torch.ones_like(want.judged) if want.rated is None else want.rated
        ),
        "match": info_nce(cosines, log_temperature),
    }
    if weights.maps and want.mask is not None:
        known = want.judged if want.located is None else want.judged * want.located
        parts["maps"] = map_loss(scores.adv_map, scores.class_maps, want.category, want.mask, known)
    if weights.seam_maps and want.artefact is not None:
        parts["seam_maps"] = seam_map_loss(scores.seam_map, want.artefact, want.rated)
    loss = sum((getattr(weights, name) * value for name, value in parts.items()), torch.zeros(()))
    return {"loss": loss, **parts}
