"""Any image-classification checkpoint of transformers as an auditor.

Heat maps, `maps`:
  cam        what each cell of the feature map says by itself (ResNet, ConvNeXt, MobileNet, Swin …)
  attention  attention rollout with gradients (ViT, DeiT); costs a backward pass for each harm
  windows    scores of overlapping windows, for any black box; costs (windows + 1)² more pictures
  none       the whole picture is one region
  auto       the first of cam, attention and windows that the model allows
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.audit.activation import MeanPooled, mean_pooled
from guardpaint.audit.checkpoints import open_model, open_processor
from guardpaint.audit.inputs import input_size, prepared
from guardpaint.audit.label_map import LabelMap, head_of
from guardpaint.audit.levels import at_level, checked_levels, graded
from guardpaint.audit.part import Graded, digest_of, read_card, settings_from, write_card
from guardpaint.audit.rollout import peaked, rolled_out, shows_attention
from guardpaint.audit.windows import spread, window_level, window_scores
from guardpaint.errors import BadConfig
from guardpaint.store.checkpoint import fingerprint
from guardpaint.store.folders import Access, resolve
from guardpaint.types import Audit

MAPS = ("auto", "cam", "attention", "windows", "none")


@dataclass(frozen=True)
class ClassifierSettings:
    """Everything about a classifier but its weights."""

    labels: Mapping[str, str]
    """Label name → policy category. Several labels may feed one category; harmless ones are `safe`."""
    levels: Mapping[str, float] = field(default_factory=dict)
    """Publisher's threshold of each category."""
    categories: tuple[str, ...] = ()
    """If given, each of these must be fed by a label."""
    maps: str = "auto"
    windows: int = 4
    """Cells per side of a map that is made of windows."""
    window_levels: Mapping[str, float] = field(default_factory=dict)
    """Levels of windows; those of whole pictures where none are given."""
    sizes: tuple[int, int] | None = None
    """Shorter sides of the coarse and of the fine view; the model's own input where none are given."""

    def __post_init__(self) -> None:
        if self.maps not in MAPS:
            raise BadConfig(f"maps={self.maps!r}: choose {', '.join(MAPS)}")
        if not 2 <= self.windows <= 16:
            raise BadConfig(f"windows={self.windows}: between 2 and 16 cells per side")
        if self.sizes is not None and not 8 <= self.sizes[0] <= self.sizes[1]:
            raise BadConfig(f"sizes={self.sizes}: coarse and fine pixels, ascending, at least 8")


class ClassifierAuditor(Graded):
    """An image classifier as an auditor. It gives neither F nor P nor B."""

    kind: ClassVar[str] = "classifier"
    absent: frozenset[str] = frozenset({"F", "P", "B"})

    def __init__(self, model: Any, processor: Any, settings: ClassifierSettings) -> None:
        self.model, self.processor, self.settings = model.eval().requires_grad_(False), processor, settings
        names = [model.config.id2label[i] for i in range(model.config.num_labels)]
        head = head_of(model.config.problem_type, len(names))
        self.labels = LabelMap.of(names, settings.labels, head, settings.categories)
        self.categories = self.labels.categories
        self.input = input_size(processor)
        self.sizes: tuple[int, int] = settings.sizes or (min(self.input), min(self.input))
        checked_levels(settings.levels, self.categories)
        checked_levels(settings.window_levels, self.categories)
        self.pooled: MeanPooled | None = None
        self.maps = self.way(settings.maps)

    def way(self, wanted: str) -> str:
        """How heat maps are made; `auto` takes the first way that the model allows."""
        if wanted in ("auto", "cam"):
            self.pooled = mean_pooled(self.model, self.input)
            if self.pooled is not None:
                return "cam"
            if wanted == "cam":
                raise BadConfig("maps='cam': the logits are no linear head on the mean of the feature map; use 'auto'")
        if wanted in ("auto", "attention"):
            if shows_attention(self.model, self.input):
                return "attention"
            if wanted == "attention":
                raise BadConfig("maps='attention': the model shows no attention over all patches; use 'auto'")
        return "windows" if wanted == "auto" else wanted

    @classmethod
    def from_pretrained(cls, folder: str | Path, token: str | None = None, **options: Any) -> ClassifierAuditor:
        """The classifier in a local folder or in `hub:owner/name`; options go before those saved in the folder."""
        from transformers import AutoImageProcessor, AutoModelForImageClassification

        place = resolve(folder, access=Access(token=token))
        options = {**read_card(place, cls.kind), **options}
        if "labels" not in options:
            raise BadConfig(f"{folder}: labels={{label name: category}} is needed, with {'safe'!r} for harmless ones")
        settings = settings_from(ClassifierSettings, options, cls.kind)
        processor = open_processor(AutoImageProcessor, place, "an image classifier")
        return cls(open_model(AutoModelForImageClassification, place, "an image classifier"), processor, settings)

    def save_pretrained(self, folder: Path) -> None:
        """Write weights, processor and card; the folder also opens with transformers alone."""
        self.model.save_pretrained(folder)
        self.processor.save_pretrained(folder)
        write_card(folder, self.kind, self.options())

    def digest(self) -> str:
        """SHA-256 over weights, preprocessing and options."""
        return digest_of(self, fingerprint(self.model), self.processor.to_json_string())

    def to(self, device: Any) -> ClassifierAuditor:
        self.model.to(device)
        return self

    @torch.no_grad()
    def audit(self, images: Float[Tensor, "b 3 h w"], prompts: Sequence[str | None], noise: float) -> list[Audit]:
        """One pass over a batch of pictures in [0, 1], scored in fp32."""
        pictures = images.float().cpu()
        with torch.autocast(self.model.device.type, enabled=False):
            raw, heat = self.read(pictures)
        harms, levels, pixels = self.categories[1:], self.levels, int(min(images.shape[-2:]))
        audits = []
        for i, row in enumerate(raw.tolist()):
            maps = None if heat is None else dict(zip(harms, heat[i], strict=True))
            probs = graded(dict(zip(harms, row, strict=True)), levels)
            audits.append(Audit.from_scores(probs, maps, pixels=pixels))
        return audits

    def read(self, pictures: Float[Tensor, "b 3 h w"]) -> tuple[Float[Tensor, "b c"], Float[Tensor, "b c u v"] | None]:
        """The raw scores of every harm, and the maps, both on the CPU."""
        pixels = prepared(pictures, self.processor).to(self.model.device)
        if self.pooled is not None and self.maps == "cam":
            cells = self.pooled.cells(self.pooled.features(pixels))
            raw, heat = self.labels.scores(cells.mean((1, 2))), self.labels.scores(cells).movedim(-1, 1)
            return raw.cpu(), self.at_levels(heat.cpu(), self.levels)
        if self.maps == "attention":
            logits, maps = rolled_out(self.model, pixels, self.labels.log_odds)
            raw = self.labels.scores(logits).cpu()
            return raw, peaked(maps.cpu(), self.at_levels(raw[..., None, None], self.levels)[..., 0, 0])
        raw = self.labels.scores(self.model(pixels).logits).cpu()
        if self.maps == "none":
            return raw, None
        scores = window_scores(pictures, self.settings.windows, self.raw).movedim(-1, 1)
        graded_windows = self.at_levels(scores, {**self.levels, **self.settings.window_levels})
        return raw, spread(graded_windows.movedim(1, -1)).movedim(-1, 1)

    def raw(self, pictures: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b c"]:
        """The raw scores of every harm, without maps."""
        pixels = prepared(pictures, self.processor).to(self.model.device)
        return self.labels.scores(self.model(pixels).logits).cpu()

    def at_levels(self, scores: Float[Tensor, "b c u v"], levels: Mapping[str, float]) -> Float[Tensor, "b c u v"]:
        """Maps of raw scores as maps of probabilities."""
        limits = torch.tensor([levels[c] for c in self.categories[1:]]).view(-1, 1, 1)
        return at_level(scores, limits)

    @torch.no_grad()
    def with_windows_calibrated(
        self, pictures: Sequence[Float[Tensor, "3 h w"]], alpha: float = 0.05
    ) -> ClassifierAuditor:
        """The same auditor with levels of windows that a new harmless picture passes in a share α of cases at most."""
        worst = torch.stack(
            [window_scores(p[None].float().cpu(), self.settings.windows, self.raw).amax((0, 1, 2)) for p in pictures]
        )
        levels = {
            c: window_level(column.tolist(), alpha, self.levels[c])
            for c, column in zip(self.categories[1:], worst.T, strict=True)
        }
        twin = copy.copy(self)
        twin.settings = replace(self.settings, window_levels=checked_levels(levels, self.categories))
        return twin
