"""FLUX.1: packed latents, distilled guidance as an input, true CFG as a second call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.draft.conditioning import guided
from guardpaint.draft.family import Geometry, TransformerFamily
from guardpaint.types import Level

if TYPE_CHECKING:
    from guardpaint.draft.conditioning import BaseModel, DenoiserCall


class Flux(TransformerFamily):
    name = "flux"
    pipelines = ("FluxPipeline", "FluxImg2ImgPipeline", "FluxInpaintPipeline")

    def geometry(self, latents: Tensor, calls: list[DenoiserCall]) -> Geometry:
        """Read from the position ids of the recorded call; one token is a 2×2 patch."""
        ids = calls[0].kwargs["img_ids"]
        ids = ids[0] if ids.dim() == 3 else ids
        return 2 * (int(ids[:, 1].max()) + 1), 2 * (int(ids[:, 2].max()) + 1)

    def unpack(self, latents: Tensor, geometry: Geometry) -> Float[Tensor, "b c h w"]:
        h, w = geometry
        b, _, packed = latents.shape
        patches = latents.view(b, h // 2, w // 2, packed // 4, 2, 2)
        return patches.permute(0, 3, 1, 4, 2, 5).reshape(b, packed // 4, h, w)

    def pack(self, latents: Float[Tensor, "b c h w"]) -> Tensor:
        b, c, h, w = latents.shape
        patches = latents.view(b, c, h // 2, 2, w // 2, 2)
        return patches.permute(0, 2, 4, 1, 3, 5).reshape(b, (h // 2) * (w // 2), 4 * c)

    def encode_prompt(self, base: BaseModel, prompt: str, negative: str) -> dict[str, Any]:
        positive, pooled, ids = base.pipe.encode_prompt(prompt, None, device=base.device)
        unconditional, pooled_negative, _ = base.pipe.encode_prompt(negative, None, device=base.device)
        return {
            "encoder_hidden_states": torch.cat([unconditional, positive]),
            "pooled_projections": torch.cat([pooled_negative, pooled]),
            "txt_ids": ids,
        }

    def predict(
        self, base: BaseModel, z: Float[Tensor, "n c h w"], level: Level, guidance: float | Tensor
    ) -> Float[Tensor, "n c h w"]:
        if base.conditioning is None:
            outputs = [self._call(base, call, z, level, guidance, 0) for call in base.calls[:2]]
            if len(outputs) == 1:
                return outputs[0]
            return outputs[1] + base.true_cfg * (outputs[0] - outputs[1])
        call = base.calls[0]
        positive = self._call(base, call, z, level, guidance, 1)
        if call.kwargs.get("guidance") is not None:
            return positive
        negative = self._call(base, call, z, level, guidance, 0)
        return guided(torch.cat([negative, positive]), guidance, positive.dim())

    def _call(
        self,
        base: BaseModel,
        call: DenoiserCall,
        z: Float[Tensor, "n c h w"],
        level: Level,
        guidance: float | Tensor,
        branch: int,
    ) -> Float[Tensor, "n c h w"]:
        packed = self.pack(z).to(call.sample.device, call.sample.dtype)
        t = torch.full((len(z),), level.sigma, device=packed.device, dtype=packed.dtype)
        kwargs = {
            **base.rows(call, len(z), (branch,)),
            "hidden_states": packed,
            "timestep": t,
            "return_dict": False,
        }
        if kwargs.get("guidance") is not None:
            scale = torch.as_tensor(guidance, dtype=torch.float32, device=packed.device)
            kwargs["guidance"] = scale.expand(len(z)) if scale.dim() == 0 else scale
        return self.unpack(call.module(**kwargs)[0], (int(z.shape[-2]), int(z.shape[-1])))
