"""The inpainter A_g: a 9-channel UNet over (z_t, mask, masked latent), conditioned on the user's or the safe prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from guardpaint.repair.denoise import Descent, Levels, denoise, first_steps, in_batches, starting_latent
from guardpaint.repair.folders import CHECKERS, merge_unless, quiet_loading, save_pipeline, weights_digest
from guardpaint.repair.ladder import own_ladder
from guardpaint.repair.once import digest_of, in_pieces, recalled
from guardpaint.repair.options import DETERMINISTIC, RENOISING, RepairOptions
from guardpaint.repair.traits import check_unguarded
from guardpaint.store.folders import Access, resolve
from guardpaint.store.seeds import generator
from guardpaint.types import JsonDict, Knobs, Level, RepairRequest

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
        adapter = self.settings.adapter
        if adapter is not None and adapter.scheduler not in SAMPLERS:
            raise BadConfig(f"adapter scheduler={adapter.scheduler!r}: Inpainter samples as {', '.join(SAMPLERS)}")
        self.renoises = adapter is not None and adapter.scheduler in RENOISING
        self.pipe, self.tiny = pipe, tiny
        self.factor: int = pipe.vae_scale_factor
        self.native = self.settings.size or int(pipe.unet.config.sample_size) * self.factor

    @classmethod
    def from_pretrained(cls, directory: str | Path, *, token: str | None = None, **options: Any) -> Inpainter:
        """A StableDiffusionInpaintPipeline's folder, in fp32; a LoRA and a tiny decoder beside it are used if there."""
        from diffusers import StableDiffusionInpaintPipeline

        settings = RepairOptions.read("user", options)
        directory = resolve(directory, access=Access(token=token))
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
        merge_unless(pipe, directory, settings.adapter, token)
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
        return self.together([request])[0]

    def together(self, requests: Sequence[RepairRequest]) -> list[Float[Tensor, "n 3 h w"]]:
        """The candidates of several requests, such as other regions or other pictures, in shared passes."""
        return [images for images, _ in self._paint(requests, denoise)]

    def preview(self, request: RepairRequest) -> tuple[Float[Tensor, "n 3 h w"], Float[Tensor, "n c u v"]]:
        return self._paint([request], first_steps)[0]

    def _paint(self, requests: Sequence[RepairRequest], descent: Descent) -> list[tuple[Tensor, Tensor]]:
        """For each request its candidates, or their previews, and their latents, which are those of a crop if there is
        one. Requests whose pictures are painted at the same size share passes."""
        tiles = [None if self.settings.crop is None else window(r, self.settings.crop) for r in requests]
        device = self.device  # asking a pipeline for it is slow
        sheets = [Sheet(self, r if t is None else cut(r, t), device) for r, t in zip(requests, tiles, strict=True)]
        for size in dict.fromkeys(sheet.size for sheet in sheets):
            self._paint_sheets([sheet for sheet in sheets if sheet.size == size], descent)
        found = []
        for request, tile, sheet in zip(requests, tiles, sheets, strict=True):
            images, latents = torch.cat(sheet.images), torch.cat(sheet.latents)
            found.append((images if tile is None else pasted(request.view, tile, images), latents))
        return found

    @torch.no_grad()
    def _paint_sheets(self, sheets: Sequence[Sheet], descent: Descent) -> None:
        """Paint sheets of one size, as many rows at a time as the requests allow."""
        rows = [Row(sheet, i) for sheet in sheets for i in range(len(sheet.masks))]
        decoder = ViewDecoder(self.tiny, self.pipe.vae, self.factor, sheets[0].device)
        for part in in_batches(len(rows), min(sheet.request.batch for sheet in sheets)):
            some = rows[part]
            shown, z = self._denoise(some, descent)
            images = in_pieces(decoder.full, shown, self.factor**2).cpu()
            for k, row in enumerate(some):
                row.sheet.images.append(images[k : k + 1])
                row.sheet.latents.append(z[k : k + 1])

    def encoded(self, pictures: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n c u v"]:
        """Latents of pictures at the model's size."""
        return in_pieces(lambda some: vae_encode(self.pipe.vae, some, some.device), pictures)

    def text(self, request: RepairRequest) -> dict[str, Any]:
        """Encoded words of a request: [negative, positive], or the positive branch alone if guidance is off."""
        words = self.settings.words(request)

        def encode() -> dict[str, Any]:
            states = family_of(self.pipe).encode_prompt(self.pipe, *words)
            if self.settings.fixed_guidance == 1.0:
                return {name: rows[1:] for name, rows in states.items()}
            return dict(states)

        return recalled(request.memo, ("text", *words), encode)

    def _denoise(self, rows: Sequence[Row], descent: Descent) -> tuple[Tensor, Tensor]:
        """Clean latents to show and latents to go on from, for rows of any sheets of one size."""
        sheets = list(dict.fromkeys(row.sheet for row in rows))
        for sheet in sheets:
            sheet.prepare([row.index for row in rows if row.sheet is sheet])
        knobs, fixed = [row.knobs for row in rows], self.settings.fixed_guidance
        guidance = torch.tensor([k.cfg if fixed is None else fixed for k in knobs], device=rows[0].sheet.device)
        extra = torch.stack([row.sheet.extra[row.index] for row in rows])
        ladders = [own_ladder(k.depth, self.settings.rungs, self.level) for k in knobs]
        z = torch.stack([row.start(ladder[0]) for row, ladder in zip(rows, ladders, strict=True)])
        begun = [row.sheet.request.begun is not None for row in rows]
        ladders = [ladder[1:] if b else ladder for ladder, b in zip(ladders, begun, strict=True)]

        def estimate(z: Tensor, level: Levels, active: Tensor) -> tuple[Tensor, Tensor]:
            some = [rows[i] for i in active.tolist()]
            x0, eps = self._denoiser(some).estimate(z, level, guidance[active], extra[active])
            return x0, fresh_noise(x0, some, level) if self.renoises else eps

        return descent(z, ladders, estimate)

    def _denoiser(self, rows: Sequence[Row]) -> Denoiser:
        """The model under the prompts of these rows."""
        sheets = list(dict.fromkeys(row.sheet for row in rows))
        if len(sheets) == 1:
            return Denoiser.from_states(self.pipe, self.text(sheets[0].request))
        texts = [self.text(row.sheet.request) for row in rows]
        branches = range(len(next(iter(texts[0].values()))))
        states = {name: torch.cat([t[name][b : b + 1] for b in branches for t in texts]) for name in texts[0]}
        return Denoiser.from_states(self.pipe, states, len(rows))

    def level(self, noise: float) -> Level:
        """The level of a noise time on the model's own training schedule."""
        return level_at(self.pipe.scheduler, noise)


class Sheet:
    """One request at the size that it is painted at, with what its candidates share."""

    def __init__(self, inpainter: Inpainter, request: RepairRequest, device: torch.device) -> None:
        self.inpainter, self.request, self.device = inpainter, request, device
        self.size = inpainter.native_size(int(request.view.shape[-2]), int(request.view.shape[-1]))
        self.view = resize(request.view[None], self.size)[0].to(device)
        self.masks = resize(request.masks[:, None], self.size)[:, 0].to(device)
        self.extra: dict[int, Tensor] = {}
        """By candidate: the mask's channel and the latents of the masked picture."""
        self.images: list[Tensor] = []
        self.latents: list[Tensor] = []
        self.key = digest_of(self.view)

    @property
    def z_view(self) -> Float[Tensor, "c u v"]:
        return recalled(self.request.memo, ("view", self.key), lambda: self.inpainter.encoded(self.view[None])[0])

    @torch.no_grad()
    def prepare(self, rows: Sequence[int]) -> None:
        """Encode the masked pictures of some candidates; equal ones once, also over waves."""
        memo, view = self.request.memo, self.view
        hard, which = torch.unique(self.masks[list(rows)] > 0.5, dim=0, return_inverse=True)
        keys = [("hole", self.key, digest_of(m)) for m in hard]
        new = [k for k, key in enumerate(keys) if key not in memo]
        if new:
            masked = torch.where(hard[new][:, None], torch.full_like(view, 0.5), view)
            for k, z in zip(new, self.inpainter.encoded(masked), strict=True):
                memo[keys[k]] = z
        grid = (int(self.z_view.shape[-2]), int(self.z_view.shape[-1]))
        channel = torch.nn.functional.interpolate(hard[:, None].to(self.z_view.dtype), grid)  # as in training
        small = torch.stack([latent_mask(m, grid) for m in hard.float()])
        self.small = {row: small[k] for row, k in zip(rows, which.tolist(), strict=True)}
        for row, k in zip(rows, which.tolist(), strict=True):
            self.extra[row] = torch.cat([channel[k], memo[keys[k]]])


@dataclass(frozen=True)
class Row:
    """One candidate of a sheet."""

    sheet: Sheet
    index: int

    @property
    def knobs(self) -> Knobs:
        return self.sheet.request.knobs[self.index]

    def start(self, level: Level) -> Float[Tensor, "c u v"]:
        """The latent that it starts from: noised to its depth, or as its preview has left it."""
        request = self.sheet.request
        if request.begun is not None:
            return request.begun[self.index]
        return starting_latent(self.sheet.z_view, self.sheet.small[self.index], self.knobs, level, request.seed)


def fresh_noise(x0: Float[Tensor, "n c h w"], rows: Sequence[Row], level: Levels) -> Float[Tensor, "n c h w"]:
    """The noise that consistency sampling (LCM) adds after a step, of each candidate's own seed."""
    levels = [level] * len(rows) if isinstance(level, Level) else level
    drawn = [
        torch.randn(
            x0.shape[1:], generator=generator(row.sheet.request.seed, row.knobs.seed_offset, f"renoise {a.noise:.4f}")
        )
        for row, a in zip(rows, levels, strict=True)
    ]
    return torch.stack(drawn).to(x0)
