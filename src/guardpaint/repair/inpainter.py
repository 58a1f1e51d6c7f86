"""The inpainter A_g: a 9-channel UNet over (z_t, mask, masked latent), conditioned on the user's prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.audit.regions import latent_mask
from guardpaint.draft.codec import ViewDecoder, resize, vae_encode
from guardpaint.draft.denoiser import Denoiser
from guardpaint.draft.families import family_of
from guardpaint.draft.loading import LORA, fuse, load_tiny, without_bars
from guardpaint.draft.schedule import level_at
from guardpaint.errors import BadCheckpoint
from guardpaint.repair.denoise import DEPTHS, Descent, begin, denoise, first_steps, in_batches
from guardpaint.store.checkpoint import fingerprint
from guardpaint.store.folders import resolve
from guardpaint.types import JsonDict, Level, RepairRequest


class Inpainter:
    """Repairs with a StableDiffusionInpaintPipeline's parts. Implements the `Repairer` protocol."""

    name = "inpainter"
    kind: ClassVar[str] = "inpainter"

    def __init__(self, pipe: Any, tiny: Any | None = None) -> None:
        channels = pipe.unet.config.in_channels
        if channels != 2 * pipe.vae.config.latent_channels + 1:
            raise BadCheckpoint(
                f"the inpainter's UNet takes {channels} channels; an inpainting UNet takes latent + mask + "
                f"masked latent = {2 * pipe.vae.config.latent_channels + 1}"
            )
        self.pipe, self.tiny = pipe, tiny
        self.factor: int = pipe.vae_scale_factor
        self.native = int(pipe.unet.config.sample_size) * self.factor
        self.ladder = [level_at(pipe.scheduler, d / DEPTHS) for d in range(DEPTHS + 1)]

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> Inpainter:
        """A StableDiffusionInpaintPipeline's folder, in fp32; a LoRA and a tiny decoder beside it are used if there."""
        from diffusers import StableDiffusionInpaintPipeline

        directory = resolve(directory)
        try:
            with without_bars():
                pipe = StableDiffusionInpaintPipeline.from_pretrained(
                    directory,
                    safety_checker=None,
                    requires_safety_checker=False,
                    dtype=torch.float32,
                    use_safetensors=True,
                    local_files_only=True,
                )
                if (directory / LORA).exists():
                    fuse(pipe, directory)
            tiny_dir = directory / "tiny_decoder"
            tiny = load_tiny(tiny_dir) if tiny_dir.is_dir() else None
        except Exception as error:
            raise BadCheckpoint(f"{directory}: not a StableDiffusionInpaintPipeline ({error})") from error
        return cls(pipe, tiny)

    def options(self) -> JsonDict:
        return {}

    def digest(self) -> str:
        return fingerprint(self.pipe.unet)

    def save_pretrained(self, directory: str | Path) -> None:
        """Save the whole pipeline; a LoRA that was loaded beside it is merged into its weights."""
        linked = [p.name for p in Path(directory).glob("*") if p.is_symlink()]
        if linked:
            raise BadCheckpoint(f"{directory}: {', '.join(linked)} are links; save to another folder")
        (Path(directory) / LORA).unlink(missing_ok=True)
        self.pipe.save_pretrained(directory)
        if self.tiny is not None:
            self.tiny.save_pretrained(Path(directory) / "tiny_decoder")

    @property
    def device(self) -> torch.device:
        return self.pipe._execution_device

    def to(self, device: str | torch.device) -> Inpainter:
        """Move the pipeline, unless it is offloaded, and the tiny decoder."""
        if not any(hasattr(m, "_hf_hook") for m in self.pipe.components.values()):
            self.pipe.to(device)
        if self.tiny is not None:
            self.tiny.to(device)
        return self

    def native_size(self, height: int, width: int) -> tuple[int, int]:
        """The view's shape with its shorter side at the model's own resolution, whole latents of 8."""
        unit = 8 * self.factor
        scale = self.native / min(height, width)
        return (
            max(unit, round(height * scale / unit) * unit),
            max(unit, round(width * scale / unit) * unit),
        )

    def candidates(self, request: RepairRequest) -> Float[Tensor, "n 3 h w"]:
        return self._paint(request, denoise)[0]

    def preview(self, request: RepairRequest) -> tuple[Float[Tensor, "n 3 h w"], Float[Tensor, "n c u v"]]:
        return self._paint(request, first_steps)

    @torch.no_grad()
    def _paint(
        self, request: RepairRequest, descent: Descent
    ) -> tuple[Float[Tensor, "n 3 h w"], Float[Tensor, "n c u v"]]:
        size = self.native_size(*request.view.shape[-2:])
        device = self.device
        view = resize(request.view[None], size)[0].to(device)
        masks = resize(request.masks[:, None], size)[:, 0].to(device)
        denoiser = self._denoiser(request.prompt)
        z_view = vae_encode(self.pipe.vae, view[None], device)[0]
        decoder = ViewDecoder(self.tiny, self.pipe.vae, self.factor, device)
        images, latents = [], []
        for part in in_batches(len(masks), request.batch):
            shown, z = self._denoise(view, z_view, masks[part], request, part, denoiser, descent)
            images.append(decoder.full(shown))
            latents.append(z)
        return torch.cat(images).cpu(), torch.cat(latents)

    def _denoiser(self, prompt: str) -> Denoiser:
        """The model conditioned on this prompt, which is encoded once per tournament."""
        family = family_of(self.pipe)
        return Denoiser.from_states(self.pipe, family.encode_prompt(self.pipe, prompt, ""))

    def _denoise(
        self,
        view: Float[Tensor, "3 h w"],
        z_view: Float[Tensor, "c u v"],
        masks: Float[Tensor, "n h w"],
        request: RepairRequest,
        part: slice,
        denoiser: Denoiser,
        descent: Descent,
    ) -> tuple[Float[Tensor, "n c u v"], Float[Tensor, "n c u v"]]:
        hard, which = torch.unique(masks > 0.5, dim=0, return_inverse=True)
        masked = torch.where(hard[:, None], torch.full_like(view, 0.5), view)
        z_masked = vae_encode(self.pipe.vae, masked, view.device)[which]
        grid = (int(z_view.shape[-2]), int(z_view.shape[-1]))
        small = torch.stack([latent_mask(m, grid) for m in hard.float()])[which]
        channel = torch.nn.functional.interpolate(hard[:, None].to(z_view.dtype), grid)[which]  # as in training
        guidance = torch.tensor([k.cfg for k in request.knobs[part]], device=view.device)
        extra = torch.cat([channel, z_masked], dim=1)

        def estimate(z: Tensor, level: Level, active: Tensor) -> tuple[Tensor, Tensor]:
            return denoiser.estimate(z, level, guidance[active], extra[active])

        return descent(*begin(z_view, small, request, part, self.ladder), self.ladder, estimate)
