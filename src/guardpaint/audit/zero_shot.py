"""CLIP or SigLIP as an auditor of any policy, by texts made from its definitions and exemptions.

Raw score of a category: r = sigmoid(logmeanexp over harm of s·cos(i, t) − logmeanexp over neutral of s·cos(i, t)),
with the model's own scale s; the level says from which r on it counts. Every category has a contrast of its own.
Faithfulness: F = sigmoid(f_slope · cos(i, prompt) + f_offset). Neither the levels nor F are calibrated as they come.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.audit.checkpoints import open_model, open_processor
from guardpaint.audit.contrast import Contrast, contrasts, places, texts
from guardpaint.audit.dual_encoder import DualEncoder
from guardpaint.audit.inputs import input_size
from guardpaint.audit.levels import checked_levels, graded, harm_scores
from guardpaint.audit.part import Graded, digest_of, read_card, settings_from, write_card
from guardpaint.audit.rollout import peaked
from guardpaint.audit.segmenter import Segmenter
from guardpaint.errors import BadConfig
from guardpaint.policy import Policy
from guardpaint.store.checkpoint import fingerprint
from guardpaint.store.folders import Access, resolve
from guardpaint.types import SAFE, Audit

SEGMENTER = "segmenter"
MAPS = ("auto", SEGMENTER, "patches", "none")


@dataclass(frozen=True)
class ZeroShotSettings:
    """Everything about the auditor but its weights."""

    prompts: Mapping[str, Any]
    """Category → {"harm": texts that describe it, "neutral": texts that describe what it is not}."""
    levels: Mapping[str, float] = field(default_factory=dict)
    f_slope: float = 20.0
    f_offset: float = -4.0
    """The default puts a cosine of 0.2 at F = 0.5, about where CLIP's matched and mismatched pairs meet."""
    maps: str = "auto"
    """segmenter (CLIPSeg), patches (similarity of single patches), none, or auto: the first that is there."""
    sizes: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.maps not in MAPS:
            raise BadConfig(f"maps={self.maps!r}: choose {', '.join(MAPS)}")
        if not self.prompts or SAFE in self.prompts:
            raise BadConfig(f"prompts for {list(self.prompts)}: one or more harms, without {SAFE!r}")
        if not (math.isfinite(self.f_slope) and math.isfinite(self.f_offset) and self.f_slope > 0):
            raise BadConfig(f"f_slope={self.f_slope}, f_offset={self.f_offset}: finite, the slope above 0")
        if self.sizes is not None and not 8 <= self.sizes[0] <= self.sizes[1]:
            raise BadConfig(f"sizes={self.sizes}: coarse and fine pixels, ascending, at least 8")


def prompts_of(policy: Policy) -> dict[str, Any]:
    """The option `prompts` for a policy."""
    return {name: {"harm": list(c.harm), "neutral": list(c.neutral)} for name, c in contrasts(policy).items()}


class ZeroShotAuditor(Graded):
    """An image–text encoder as an auditor. It gives F, but neither P nor B."""

    kind: ClassVar[str] = "zero-shot"
    absent: frozenset[str] = frozenset({"P", "B"})

    def __init__(
        self, model: Any, processor: Any, settings: ZeroShotSettings, segmenter: Segmenter | None = None
    ) -> None:
        self.encoder, self.settings, self.segmenter = DualEncoder(model, processor), settings, segmenter
        self.contrasts = {name: Contrast.from_json(value) for name, value in settings.prompts.items()}
        self.categories: tuple[str, ...] = (SAFE, *self.contrasts)
        checked_levels(settings.levels, self.categories)
        own = min(input_size(processor.image_processor))
        self.sizes: tuple[int, int] = settings.sizes or (own, own)
        self.lines = texts(self.contrasts)
        self.places = places(self.contrasts, self.lines)
        if settings.maps == SEGMENTER and segmenter is None:
            raise BadConfig("maps='segmenter': name a CLIPSeg checkpoint, segmenter='hub:CIDAS/clipseg-rd64-refined'")
        self.maps = settings.maps
        if self.maps == "auto":
            self.maps = "patches" if segmenter is None else SEGMENTER

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        policy: Policy | Mapping[str, Any] | None = None,
        segmenter: str | Path | None = None,
        token: str | None = None,
        **options: Any,
    ) -> ZeroShotAuditor:
        """The encoder in a folder or on the hub, with prompts from a policy, from options or from the saved card."""
        from transformers import AutoModel, AutoProcessor

        place = resolve(folder, access=Access(token=token))
        options = {**read_card(place, cls.kind), **options}
        if policy is not None:
            options["prompts"] = prompts_of(policy if isinstance(policy, Policy) else Policy.from_dict(policy))
        if "prompts" not in options:
            raise BadConfig(f"{folder}: name the policy whose categories are looked for, or prompts for each of them")
        settings = settings_from(ZeroShotSettings, options, cls.kind)
        if segmenter is None and (place / SEGMENTER).is_dir():
            segmenter = place / SEGMENTER
        seen = None if segmenter is None else Segmenter.from_pretrained(segmenter, token)
        processor = open_processor(AutoProcessor, place, "an image-text encoder")
        return cls(open_model(AutoModel, place, "an image-text encoder"), processor, settings, seen)

    def save_pretrained(self, folder: Path) -> None:
        """Write weights, processor and card, and the segmenter into a subfolder."""
        self.encoder.model.save_pretrained(folder)
        self.encoder.processor.save_pretrained(folder)
        if self.segmenter is not None:
            self.segmenter.save_pretrained(folder / SEGMENTER)
        write_card(folder, self.kind, self.options())

    def digest(self) -> str:
        """SHA-256 over the weights of encoder and segmenter, and the options."""
        own = [] if self.segmenter is None else [self.segmenter.fingerprint()]
        return digest_of(self, fingerprint(self.encoder.model), *own)

    def to(self, device: Any) -> ZeroShotAuditor:
        self.encoder.to(device)
        if self.segmenter is not None:
            self.segmenter.model.to(device)
        return self

    @torch.no_grad()
    def audit(self, images: Float[Tensor, "b 3 h w"], prompts: Sequence[str | None], noise: float) -> list[Audit]:
        """One pass over a batch of pictures in [0, 1], scored in fp32."""
        pictures, encoder = images.float().cpu(), self.encoder
        with torch.autocast(encoder.model.device.type, enabled=False):
            pixels = encoder.pixels(pictures)
            embeds = encoder.images(pixels)
            raw = self.raw(embeds).cpu()
            heat = self.heat(pictures, pixels)
            faith = [None if p is None else self.faithfulness(e, p) for e, p in zip(embeds, prompts, strict=True)]
        size = int(min(images.shape[-2:]))
        audits = []
        for i, row in enumerate(raw.tolist()):
            scores = graded(dict(zip(self.contrasts, row, strict=True)), self.levels)
            audits.append(
                Audit.from_scores(
                    scores,
                    None if heat is None else self.maps_of(heat[i], scores),
                    pixels=size,
                    faithfulness=faith[i],
                    image_embed=embeds[i].cpu(),
                )
            )
        return audits

    def raw(self, embeds: Float[Tensor, "*n d"]) -> Float[Tensor, "*n c"]:
        """The raw score of every category for embeddings of pictures or patches."""
        similar = self.encoder.scale * embeds @ self.encoder.texts(self.lines).T
        found = [log_mean_exp(similar[..., harm]) - log_mean_exp(similar[..., no]) for harm, no in self.places.values()]
        return torch.stack(found, dim=-1).sigmoid()

    def faithfulness(self, embed: Float[Tensor, " d"], prompt: str) -> float:
        """F of one picture and its prompt."""
        cosine = float(embed @ self.encoder.texts([prompt])[0])
        return 1 / (1 + math.exp(-(self.settings.f_slope * cosine + self.settings.f_offset)))

    def heat(
        self, pictures: Float[Tensor, "b 3 h w"], pixels: Float[Tensor, "b 3 u v"]
    ) -> Float[Tensor, "b c g k"] | None:
        """Where each category would be, on a scale of its own."""
        if self.maps == SEGMENTER and self.segmenter is not None:
            return self.segmenter.maps(pictures, [c.harm[0] for c in self.contrasts.values()])
        if self.maps == "patches":
            return self.raw(self.encoder.patches(pixels)).movedim(-1, 1).cpu()
        return None

    def maps_of(self, heat: Float[Tensor, "c g k"], scores: Mapping[str, float]) -> dict[str, Tensor]:
        """Maps from 0 to the probability of each category; they say where, the scores say whether."""
        peaks = torch.tensor(list(harm_scores(scores).values()))
        low = heat.amin((-2, -1), keepdim=True)
        return dict(zip(self.contrasts, peaked(heat - low, peaks), strict=True))


def log_mean_exp(values: Float[Tensor, "*n t"]) -> Float[Tensor, "*n"]:
    """A smooth maximum that does not grow with the number of texts."""
    return values.logsumexp(-1) - math.log(values.shape[-1])
