"""Repairs with any inpainting pipeline of diffusers, by a call of the pipeline itself."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.draft.codec import cast_lock, casts, resize
from guardpaint.draft.loading import move
from guardpaint.repair.crop import cut, pasted, window
from guardpaint.repair.denoise import in_batches
from guardpaint.repair.folders import (
    denoiser_of,
    merge_unless,
    open_inpainting,
    sampler,
    save_pipeline,
    weights_digest,
)
from guardpaint.repair.ladder import DEPTHS
from guardpaint.repair.options import RepairOptions
from guardpaint.repair.traits import traits_of
from guardpaint.store.folders import Access, resolve
from guardpaint.store.seeds import generator
from guardpaint.types import JsonDict, Knobs, RepairRequest


class PipelineRepairer:
    """Repairs with a diffusers inpainting pipeline: SD, SDXL, SD 3, FLUX Fill, … Implements `Repairer`.

    `options` are the fields of `RepairOptions`. Stock models have no safety training, so the prompt is the policy's
    safe prompt unless `prompt="user"`. An `adapter` must be merged into the pipeline already, as `from_pretrained`
    does it.
    """

    kind: ClassVar[str] = "pipeline"
    name = kind

    def __init__(self, pipe: Any, **options: Any) -> None:
        self.settings = RepairOptions.read("safe", options)
        self.pipe, self.traits = pipe, traits_of(pipe, self.settings.size)
        self.scheduler = sampler(pipe.scheduler, self.settings.adapter)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        variant: str | None = None,
        token: str | None = None,
        **options: Any,
    ) -> PipelineRepairer:
        """Open a folder or `hub:owner/name`: an inpainting pipeline, or a model that diffusers has one for."""
        settings = RepairOptions.read("safe", options)
        folder = resolve(folder, access=Access(token=token))
        pipe = open_inpainting(folder, dtype, variant)
        traits_of(pipe, settings.size)
        merge_unless(pipe, folder, settings.adapter, token)
        return cls(pipe, **options)

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the whole pipeline."""
        save_pipeline(self.pipe, folder, self.settings.adapter)

    def options(self) -> JsonDict:
        """Everything but the weights, as `from_pretrained` takes it."""
        return self.settings.to_dict()

    def digest(self) -> str:
        """SHA-256 over the denoiser's weights and the options."""
        return weights_digest(self.kind, denoiser_of(self.pipe), {"class": type(self.pipe).__name__, **self.options()})

    def to(self, device: str | torch.device) -> PipelineRepairer:
        """Move the pipeline to a device, unless it is offloaded."""
        move(self.pipe, device)
        return self

    @property
    def device(self) -> torch.device:
        return self.pipe._execution_device

    def native_size(self, height: int, width: int) -> tuple[int, int]:
        """The size that a view of this size is repaired at."""
        return self.traits.native_size(height, width)

    def candidates(self, request: RepairRequest) -> Float[Tensor, "n 3 h w"]:
        if self.settings.crop is None:
            return self._paint(request)
        tile = window(request, self.settings.crop)
        return pasted(request.view, tile, self._paint(cut(request, tile)))

    def _paint(self, request: RepairRequest) -> Float[Tensor, "n 3 h w"]:
        size = self.native_size(*request.view.shape[-2:])
        view = resize(request.view[None], size)[0].float().cpu()
        masks = (resize(request.masks[:, None], size) > 0.5).float().cpu()
        painted: dict[int, Tensor] = {}
        for same in self._alike(request.knobs):
            for part in in_batches(len(same), request.batch if self.traits.batched else 1):
                rows = same[part]
                pictures = torch.stack([self._jittered(view, masks[i], request, i) for i in rows])
                images = self._call(pictures, masks[rows], request, rows)
                painted |= dict(zip(rows, resize(images.float().cpu(), size).clamp(0, 1), strict=True))
        return torch.stack([painted[i] for i in range(len(request.knobs))])

    def _jittered(
        self, view: Float[Tensor, "3 h w"], mask: Float[Tensor, "1 h w"], request: RepairRequest, row: int
    ) -> Float[Tensor, "3 h w"]:
        """The picture that a candidate starts from: the view with noise inside the mask."""
        knobs = request.knobs[row]
        noise = torch.randn(view.shape, generator=generator(request.seed, knobs.seed_offset, "jitter"))
        return (view + knobs.jitter * mask * noise).clamp(0, 1)

    def _call(
        self,
        pictures: Float[Tensor, "k 3 h w"],
        masks: Float[Tensor, "k 1 h w"],
        request: RepairRequest,
        rows: list[int],
    ) -> Float[Tensor, "k 3 h w"]:
        """One call of the pipeline, for candidates with the same depth and guidance."""
        generators = [generator(request.seed, request.knobs[i].seed_offset) for i in rows]
        prompt, avoid = self.settings.words(request)
        several = {
            "prompt": [prompt] * len(rows),
            **({"negative_prompt": [avoid] * len(rows)} if self.traits.negative else {}),
        }
        arguments = {
            **several,
            **self.call_arguments(request.knobs[rows[0]]),
            "image": pictures,
            "mask_image": masks,
            "height": int(pictures.shape[-2]),
            "width": int(pictures.shape[-1]),
            "generator": generators,
            "output_type": "pt",
        }
        if not self.traits.batched:
            arguments |= {name: texts[0] for name, texts in several.items()} | {"generator": generators[0]}
        twin = self._twin(arguments["generator"])
        vae = twin.vae
        with cast_lock(vae) if casts(vae) else contextlib.nullcontext():
            images: Tensor = twin(**{k: v for k, v in arguments.items() if k in self.traits.arguments})[0]
        return images

    def call_arguments(self, knobs: Knobs) -> JsonDict:
        """What the knobs set: guidance, and strength where the class takes it.

        Depth d of 10 is strength d/10, so the class runs d tenths of the steps, but at least one.
        """
        steps = self.settings.rungs
        arguments: JsonDict = {"num_inference_steps": steps, "strength": max(knobs.depth / DEPTHS, 1 / steps)}
        if self.traits.guidance is not None:
            arguments[self.traits.guidance] = self._guidance(knobs)
        return arguments

    def _alike(self, knobs: Sequence[Knobs]) -> list[list[int]]:
        """The candidates that may share a call: those with the same arguments."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for i, k in enumerate(knobs):
            groups.setdefault(tuple(self.call_arguments(k).values()), []).append(i)
        return list(groups.values())

    def _guidance(self, knobs: Knobs) -> float:
        fixed = self.settings.guidance if self.traits.embedded else self.settings.fixed_guidance
        return knobs.cfg * self.traits.guidance_unit if fixed is None else fixed

    def _twin(self, generators: Any) -> Any:
        """The pipeline as one call uses it: own scheduler, nothing drawn globally, no second judge, no progress bar."""
        twin = copy.copy(self.pipe)
        parts = vars(twin)
        parts["scheduler"] = drawing_from(copy.deepcopy(self.scheduler), generators)
        parts.update({name: None for name in ("safety_checker", "watermark") if name in parts})
        parts["_progress_bar_config"] = {"disable": True}
        return twin


def drawing_from(scheduler: Any, generators: Any) -> Any:
    """A scheduler whose steps draw from these generators even where its pipeline forgets to pass them."""
    if "generator" in inspect.signature(scheduler.step).parameters:
        scheduler.step = functools.partial(scheduler.step, generator=generators)
    return scheduler
