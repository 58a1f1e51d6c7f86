"""Native repair: the base pipeline's own model denoises the masked region again, under a safe prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.audit.regions import latent_mask
from guardpaint.draft.codec import resize, vae_decode
from guardpaint.errors import BadConfig, BadInput
from guardpaint.repair.denoise import Descent, Levels, denoise, first_steps, in_batches, starting_latent
from guardpaint.repair.folders import weights_digest
from guardpaint.repair.ladder import DEPTHS, own_ladder
from guardpaint.repair.once import digest_of, in_pieces, recalled
from guardpaint.types import JsonDict, RepairRequest


class NativeRepairer:
    """Repairs with the base itself, of any family. Implements `Repairer`.

    The base has no safety training, so its prompt is the policy's safe prompt for the category, and its negative prompt
    the category's definition.
    """

    kind: ClassVar[str] = "native"
    name = kind

    @classmethod
    def from_pretrained(cls, folder: str | Path | None = None, **options: Any) -> NativeRepairer:
        """A native repairer; it has no weights and no options, so nothing is read."""
        if options:
            raise BadConfig(f"repairer option {min(options)!r}: native repair has none")
        return cls()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write nothing: the base that a guard is attached to brings the weights."""

    def options(self) -> JsonDict:
        return {}

    def digest(self) -> str:
        """SHA-256 over the kind alone."""
        return weights_digest(self.kind, None, self.options())

    def candidates(self, request: RepairRequest) -> Float[Tensor, "n 3 h w"]:
        return self._paint(request, denoise)[0]

    def preview(self, request: RepairRequest) -> tuple[Float[Tensor, "n 3 h w"], Float[Tensor, "n c u v"]]:
        return self._paint(request, first_steps)

    @torch.no_grad()
    def _paint(
        self, request: RepairRequest, descent: Descent
    ) -> tuple[Float[Tensor, "n 3 h w"], Float[Tensor, "n c u v"]]:
        base = request.base
        if base is None or not base.calls:
            raise BadInput("native repair needs the base's denoiser, and no call of it was recorded")
        words, memo = (request.safe_prompt, request.avoid), request.memo
        text = recalled(memo, ("base text", *words), lambda: base.family.encode_prompt(base.pipe, *words))
        denoiser = base.with_prompt(*words, text=text)
        view = ("base view", digest_of(request.view), request.latent_size)
        z_view = recalled(memo, view, lambda: base.encode(request.view, request.latent_size))
        masks = torch.stack([latent_mask(m, request.latent_size) for m in request.masks]).to(z_view.device)
        ladders = [own_ladder(k.depth, DEPTHS, base.level) for k in request.knobs]
        images, latents = [], []
        for part in in_batches(len(masks), request.batch):
            inside = masks[part][:, None]
            guidance = torch.tensor([k.cfg for k in request.knobs[part]], device=z_view.device)

            def estimate(
                z: Tensor,
                level: Levels,
                active: Tensor,
                inside: Tensor = inside,
                guidance: Tensor = guidance,
            ) -> tuple[Tensor, Tensor]:
                x0, eps = denoiser.estimate(z, level, guidance[active])
                return torch.lerp(z_view.expand_as(x0), x0, inside[active]), eps

            if request.begun is not None:
                shown, z = descent(request.begun[part], [ladder[1:] for ladder in ladders[part]], estimate)
            else:
                rows = zip(masks[part], request.knobs[part], ladders[part], strict=True)
                z = torch.stack([starting_latent(z_view, m, k, own[0], request.seed) for m, k, own in rows])
                shown, z = descent(z, ladders[part], estimate)
            pixels = request.view[0].numel() // shown[0, 0].numel()
            images.append(in_pieces(lambda some: vae_decode(base.vae, some, base.device), shown, pixels))
            latents.append(z)
        size = (int(request.view.shape[-2]), int(request.view.shape[-1]))
        return resize(torch.cat(images), size).cpu(), torch.cat(latents)
