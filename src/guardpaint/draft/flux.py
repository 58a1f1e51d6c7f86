"""FLUX.1: packed latents, distilled guidance as an input, true CFG as a second call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.draft.conditioning import DenoiserCall, guided
from guardpaint.draft.family import Geometry, TransformerFamily

if TYPE_CHECKING:
    from guardpaint.draft.denoiser import Denoiser


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

    def calls_per_step(self, settings: Mapping[str, Any]) -> int:
        """Two under true guidance, which the pipeline runs only if it is given a negative prompt."""
        negative = any(settings.get(k) is not None for k in ("negative_prompt", "negative_prompt_embeds"))
        return 2 if negative and settings.get("true_cfg_scale", 1.0) > 1 else 1

    def encode_prompt(self, pipe: Any, prompt: str, negative: str, length: int | None = None) -> dict[str, Any]:
        tokens = {} if length is None else {"max_sequence_length": length}
        device = pipe._execution_device
        positive, pooled, ids = pipe.encode_prompt(prompt, None, device=device, **tokens)
        unconditional, pooled_negative, _ = pipe.encode_prompt(negative, None, device=device, **tokens)
        return {
            "encoder_hidden_states": torch.cat([unconditional, positive]),
            "pooled_projections": torch.cat([pooled_negative, pooled]),
            "txt_ids": ids,
        }

    def calls(self, both: DenoiserCall, true_cfg: float | Tensor) -> tuple[DenoiserCall, ...]:
        """[positive, negative]; the negative one is left out where distilled guidance makes it idle."""
        half = both.rows // 2
        positive, negative = both.take(torch.arange(half, 2 * half)), both.take(torch.arange(half))
        idle = both.kwargs.get("guidance") is not None and not isinstance(true_cfg, Tensor) and true_cfg == 1.0
        return (positive,) if idle else (positive, negative)

    def time(self, noise: Float[Tensor, " n"], steps: int = 1000) -> Float[Tensor, " n"]:
        """The transformer multiplies by 1000 itself."""
        return noise.float()

    def output(
        self, module: Any, z: Float[Tensor, "n i h w"], time: Float[Tensor, " n"], arguments: Mapping[str, Any]
    ) -> Float[Tensor, "n c h w"]:
        """The network's output; missing position ids are made for the latents' size and the text's length.

        The time is rounded as in the pipeline, which casts t to the latents' precision before it divides by 1000.
        """
        from diffusers import FluxPipeline

        inputs, states = dict(arguments), arguments["encoder_hidden_states"]
        if "img_ids" not in inputs:
            h, w = int(z.shape[-2]) // 2, int(z.shape[-1]) // 2
            inputs["img_ids"] = FluxPipeline._prepare_latent_image_ids(len(z), h, w, states.device, states.dtype)
        if "txt_ids" not in inputs:
            inputs["txt_ids"] = torch.zeros(states.shape[1], 3).to(states)
        return super().output(module, z, (time * 1000).to(states.dtype) / 1000, inputs)

    def predict(
        self, base: Denoiser, z: Float[Tensor, "n i h w"], time: Float[Tensor, " n"], guidance: float | Tensor | None
    ) -> Float[Tensor, "n c h w"]:
        """Guided output in fp32, one network call per branch.

        If guidance is distilled into the network, it is an input and `true_cfg` weighs the two branches. Otherwise
        guidance weighs the branches.
        """
        distilled = base.calls[0].kwargs.get("guidance") is not None
        outputs = []
        for call in base.calls[:2]:
            arguments = base.rows(call, len(z), (0,)).conditioning()
            if distilled:
                scale = torch.as_tensor(base.guidance if guidance is None else guidance, dtype=torch.float32)
                arguments["guidance"] = scale.to(arguments["guidance"].device).expand(len(z))
            outputs.append(self.output(call.module, z, time, arguments).float())
        if len(outputs) == 1:
            return outputs[0]
        positive, negative = outputs
        return guided(torch.cat([negative, positive]), base.true_cfg if distilled or guidance is None else guidance)
