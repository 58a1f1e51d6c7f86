"""The inpainter A_g: a 9-channel UNet over (z_t, mask, masked latent), conditioned on the user's or the safe prompt."""

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
from guardpaint.draft.loading import LORA, fuse, load_tiny, move, without_bars
from guardpaint.draft.schedule import level_at
from guardpaint.errors import BadCheckpoint, BadConfig, UnsupportedPipeline
from guardpaint.repair.crop import cut, pasted, window
from guardpaint.repair.denoise import Descent, begin, denoise, first_steps, in_batches
from guardpaint.repair.folders import CHECKERS, merge_unless, quiet_loading, save_pipeline, weights_digest
from guardpaint.repair.options import DETERMINISTIC, RENOISING, RepairOptions
from guardpaint.repair.traits import check_unguarded
from guardpaint.store.folders import resolve
from guardpaint.store.seeds import generator
from guardpaint.types import JsonDict, Level, RepairRequest

SAMPLERS = ("LCMScheduler", *DETERMINISTIC)
"""The adapters' schedulers that the inpainter's own loop follows."""


class Inpainter:
    """Repairs with a StableDiffusionInpaintPipeline's parts. Implements the `Repairer` protocol.

    `options` are the fields of `RepairOptions`. An aligned model is given the user's prompt; a stock one needs
    `prompt="safe"`. An `adapter` must be merged into the pipeline already; `from_pretrained` does it.
    """

    kind: ClassVar[str] = "inpainter"
    name = kind

    def __init__(self, pipe: Any, tiny: Any | None = None, **options: Any) -> None:
        channels = pipe.components["unet"].config.in_channels if "unet" in pipe.components else 0
        if channels != 2 * pipe.vae.config.latent_channels + 1:
            raise BadCheckpoint(
                f"the inpainter's UNet takes {channels} channels; an inpainting UNet takes latent + mask + "
                f"masked latent = {2 * pipe.vae.config.latent_channels + 1}"
            )
        if family_of(pipe).name != "sd":
            raise UnsupportedPipeline(
                f"{type(pipe).__name__}: Inpainter is for SD 1.5 and 2; use PipelineRepairer(pipe)"
            )
        check_unguarded(pipe)
        self.settings = RepairOptions.read("user", options)
        adapter, rungs = self.settings.adapter, self.settings.rungs
        if adapter is not None and adapter.scheduler not in SAMPLERS:
            raise BadConfig(f"adapter scheduler={adapter.scheduler!r}: Inpainter samples as {', '.join(SAMPLERS)}")
        self.renoises = adapter is not None and adapter.scheduler in RENOISING
        self.pipe, self.tiny = pipe, tiny
        self.factor: int = pipe.vae_scale_factor
        self.native = self.settings.size or int(pipe.unet.config.sample_size) * self.factor
        self.ladder = [level_at(pipe.scheduler, d / rungs) for d in range(rungs + 1)]

    @classmethod
    def from_pretrained(cls, directory: str | Path, **options: Any) -> Inpainter:
        """A StableDiffusionInpaintPipeline's folder, in fp32; a LoRA and a tiny decoder beside it are used if there."""
        from diffusers import StableDiffusionInpaintPipeline

        settings = RepairOptions.read("user", options)
        directory = resolve(directory)
        try:
            with without_bars(), quiet_loading():
                pipe = StableDiffusionInpaintPipeline.from_pretrained(
                    directory,
                    dtype=torch.float32,
                    use_safetensors=True,
                    local_files_only=True,
                    **CHECKERS,
                )
                if (directory / LORA).exists():
                    fuse(pipe, directory)
            tiny_dir = directory / "tiny_decoder"
            tiny = load_tiny(tiny_dir) if tiny_dir.is_dir() else None
        except Exception as error:
            raise BadCheckpoint(f"{directory}: not a StableDiffusionInpaintPipeline ({error})") from error
        merge_unless(pipe, directory, settings.adapter)
        return cls(pipe, tiny, **options)

    def save_pretrained(self, directory: str | Path) -> None:
        """Save the whole pipeline; a LoRA that was loaded beside it is merged into its weights."""
        save_pipeline(self.pipe, directory, self.settings.adapter)
        if self.tiny is not None:
            self.tiny.save_pretrained(Path(directory) / "tiny_decoder")

    def options(self) -> JsonDict:
        """Everything but the weights, as `from_pretrained` takes it."""
        return self.settings.to_dict()

    def digest(self) -> str:
        """SHA-256 over the UNet's weights and the options."""
        return weights_digest(self.kind, self.pipe.unet, self.options())

    def to(self, device: str | torch.device) -> Inpainter:
        """Move the pipeline, unless it is offloaded, and the tiny decoder to a device."""
        move(self.pipe, device)
        if self.tiny is not None:
            self.tiny.to(device)
        return self

    @property
    def device(self) -> torch.device:
        return self.pipe._execution_device

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

    def _paint(
        self, request: RepairRequest, descent: Descent
    ) -> tuple[Float[Tensor, "n 3 h w"], Float[Tensor, "n c u v"]]:
        """The candidates, or their previews, and their latents, which are those of the crop where there is one."""
        if self.settings.crop is None:
            return self._paint_whole(request, descent)
        tile = window(request, self.settings.crop)
        images, latents = self._paint_whole(cut(request, tile), descent)
        return pasted(request.view, tile, images), latents

    @torch.no_grad()
    def _paint_whole(
        self, request: RepairRequest, descent: Descent
    ) -> tuple[Float[Tensor, "n 3 h w"], Float[Tensor, "n c u v"]]:
        size = self.native_size(*request.view.shape[-2:])
        device = self.device
        view = resize(request.view[None], size)[0].to(device)
        masks = resize(request.masks[:, None], size)[:, 0].to(device)
        denoiser = self._denoiser(*self.settings.words(request))
        z_view = vae_encode(self.pipe.vae, view[None], device)[0]
        decoder = ViewDecoder(self.tiny, self.pipe.vae, self.factor, device)
        images, latents = [], []
        for part in in_batches(len(masks), request.batch):
            shown, z = self._denoise(view, z_view, masks[part], request, part, denoiser, descent)
            images.append(decoder.full(shown))
            latents.append(z)
        return torch.cat(images).cpu(), torch.cat(latents)

    def _denoiser(self, prompt: str, negative: str) -> Denoiser:
        """The model conditioned on this prompt, which is encoded once per tournament; one branch if guidance is off."""
        states = family_of(self.pipe).encode_prompt(self.pipe, prompt, negative)
        if self.settings.fixed_guidance == 1.0:
            states = {name: rows[1:] for name, rows in states.items()}
        return Denoiser.from_states(self.pipe, states)

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
        knobs, fixed = request.knobs[part], self.settings.fixed_guidance
        guidance = torch.tensor([k.cfg if fixed is None else fixed for k in knobs], device=view.device)
        extra = torch.cat([channel, z_masked], dim=1)

        def estimate(z: Tensor, level: Level, active: Tensor) -> tuple[Tensor, Tensor]:
            x0, eps = denoiser.estimate(z, level, guidance[active], extra[active])
            return x0, fresh_noise(x0, request, part, level, active) if self.renoises else eps

        return descent(*begin(z_view, small, request, part, self.ladder), self.ladder, estimate)


def fresh_noise(
    x0: Float[Tensor, "n c h w"], request: RepairRequest, part: slice, level: Level, active: Tensor
) -> Float[Tensor, "n c h w"]:
    """The noise that consistency sampling (LCM) adds after a step, of each candidate's own seed."""
    offsets = [k.seed_offset for k in request.knobs[part]]
    drawn = [
        torch.randn(x0.shape[1:], generator=generator(request.seed, offsets[i], f"renoise {level.noise:.4f}"))
        for i in active.tolist()
    ]
    return torch.stack(drawn).to(x0)
