"""Look at the finished picture only: block it, draw it again, blur it, or inpaint the flagged area once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from guardpaint.audit.regions import mine, soft_mask, union
from guardpaint.bases import Base
from guardpaint.draft.views import shrink
from guardpaint.evaluate.defences.base import Everywhere, Outcome
from guardpaint.loop.pictures import BLUR_CELLS, coarse
from guardpaint.policy import Finding
from guardpaint.repair.pipeline import PipelineRepairer
from guardpaint.store.images import from_pil, to_pil
from guardpaint.store.seeds import derive
from guardpaint.types import Audit, Knobs, RepairRequest
from guardpaint.verify.parts import Parts

ATTEMPTS = 5
WHOLE = Knobs(cfg=4.0, dilation=0.0, feather=0.0, jitter=0.0, depth=10, seed_offset=0)
"""A fill from full noise, with the guidance that the stock pipeline is called with."""


@dataclass(frozen=True)
class Checked:
    image: Image.Image
    audit: Audit
    finding: Finding | None


def check(parts: Parts, image: Image.Image, prompt: str) -> Checked:
    """The guard's own auditor and policy on a finished picture."""
    view = shrink(from_pil(image), parts.auditor.sizes[1])
    audit = parts.auditor.audit(view[None], [prompt], 0.0)[0]
    return Checked(image, audit, parts.finding(audit, 1.0))


@dataclass(frozen=True)
class PostHoc(Everywhere):
    """Draws, looks, and lets `mend` deal with what is flagged."""

    parts: Parts
    name: str = "post_hoc_block"

    def mend(self, base: Base, found: Checked, prompt: str, seed: int) -> tuple[Image.Image | None, str]:
        return None, "blocked"

    def generate(self, base: Base, prompts: Sequence[str], seeds: Sequence[int]) -> list[Outcome]:
        began = time.perf_counter()
        made = base.draw(prompts, seeds)
        shared = (time.perf_counter() - began) / len(prompts)
        out = []
        for image, prompt, seed in zip(made, prompts, seeds, strict=True):
            began = time.perf_counter()
            found = check(self.parts, image, prompt)
            result: tuple[Image.Image | None, str] = (image, "clean")
            if found.finding is not None:
                result = self.mend(base, found, prompt, seed)
            out.append(Outcome(*result, shared + time.perf_counter() - began))
        return out


@dataclass(frozen=True)
class PostHocRegenerate(PostHoc):
    """Another seed, up to five times, then blocked."""

    name: str = "post_hoc_regenerate"

    def mend(self, base: Base, found: Checked, prompt: str, seed: int) -> tuple[Image.Image | None, str]:
        for attempt in range(1, ATTEMPTS + 1):
            image = base.draw([prompt], [derive(seed, "again", attempt)])[0]
            if check(self.parts, image, prompt).finding is None:
                return image, "regenerated"
        return None, "blocked"


def flagged_mask(parts: Parts, found: Checked, dilation: float) -> torch.Tensor:
    """Where the heat map points; everything when it points nowhere."""
    size = (found.image.height, found.image.width)
    regions = mine(found.audit.adv_map, size, parts.config, 1.0)
    return soft_mask(union(regions).mask, dilation, 0.5) if regions else torch.ones(size)


@dataclass(frozen=True)
class PostHocBlur(PostHoc):
    """The flagged area blurred as widely as the guard's own last resort does; blocked if it is flagged still."""

    name: str = "post_hoc_blur"

    def mend(self, base: Base, found: Checked, prompt: str, seed: int) -> tuple[Image.Image | None, str]:
        image = from_pil(found.image)
        blurred = to_pil(torch.lerp(image, coarse(image, BLUR_CELLS), flagged_mask(self.parts, found, 1.0)))
        return (blurred, "blurred") if check(self.parts, blurred, prompt).finding is None else (None, "blocked")


@dataclass(frozen=True)
class PostHocInpaint(PostHoc):
    """One fill of the flagged area under the policy's safe prompt; blocked if it is flagged still.

    The fill is made by a repairer, or by an inpainting pipeline of SD's shape.
    """

    pipe: Any = None
    call: Any = None
    repairer: PipelineRepairer | None = None
    name: str = "post_hoc_inpaint"

    def mend(self, base: Base, found: Checked, prompt: str, seed: int) -> tuple[Image.Image | None, str]:
        assert found.finding is not None
        hole = Image.fromarray((flagged_mask(self.parts, found, 0.5).numpy() > 0.5).astype(np.uint8) * 255)
        fill = self.painted if self.repairer is None else self.repaired
        image = Image.composite(fill(base, found, hole, prompt, seed), found.image, hole)
        return (image, "repaired") if check(self.parts, image, prompt).finding is None else (None, "blocked")

    def repaired(self, base: Base, found: Checked, hole: Image.Image, prompt: str, seed: int) -> Image.Image:
        """The picture with its hole filled by the repairer, from full noise."""
        assert found.finding is not None and self.repairer is not None
        view, mask = from_pil(found.image), from_pil(hole.convert("RGB"))[0] > 0.5
        category = self.parts.policy.category(found.finding.category)
        request = RepairRequest(
            view=view,
            region=mask,
            masks=mask[None].float(),
            knobs=(WHOLE,),
            prompt=prompt,
            safe_prompt=self.parts.policy.safe_prompt(category.name),
            avoid=category.definition,
            seed=seed,
            base=None,
            latent_size=(view.shape[-2] // 8, view.shape[-1] // 8),
        )
        repairer = self.repairer.to(base.pipe._execution_device)
        return to_pil(repairer.candidates(request)[0]).resize(found.image.size)

    def painted(self, base: Base, found: Checked, hole: Image.Image, prompt: str, seed: int) -> Image.Image:
        """The picture with its hole filled by the pipeline."""
        assert found.finding is not None
        size = int(self.pipe.unet.config.sample_size) * self.pipe.vae_scale_factor
        made: Image.Image = self.pipe(
            self.parts.policy.safe_prompt(found.finding.category),
            image=found.image.resize((size, size)),
            mask_image=hole.resize((size, size)),
            height=size,
            width=size,
            generator=torch.Generator().manual_seed(seed),
            **(self.call or {"num_inference_steps": 25, "guidance_scale": 4.0}),
        ).images[0]
        return made.resize(found.image.size)
