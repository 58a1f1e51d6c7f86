"""What one inpainting pipeline takes and needs, read from its class and configuration before it is used."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from guardpaint.errors import BadCheckpoint, BadInput, UnsupportedPipeline

NEEDED = ("prompt", "image", "mask_image", "num_inference_steps", "generator", "output_type")
"""Arguments without which a pipeline cannot repair."""
FOREIGN = ("control_image", "control_mode")
"""Arguments that no repair request can fill."""
BATCHED = (
    "StableDiffusionInpaintPipeline",
    "StableDiffusionXLInpaintPipeline",
    "StableDiffusion3InpaintPipeline",
    "FluxInpaintPipeline",
    "FluxFillPipeline",
)
"""Classes known to paint a list of prompts, pictures, masks and generators as they paint each alone."""
USUAL_CFG = 7.5
"""The cfg knob at which embedded guidance has the value that its class uses by default."""


@dataclass(frozen=True)
class Traits:
    """How to call one inpainting pipeline."""

    arguments: frozenset[str]
    guidance: str | None
    """The argument that the cfg knob sets; None if the model has no guidance."""
    embedded: bool
    """Whether that is an input of the network and not classifier-free guidance."""
    guidance_unit: float
    """What the knob is multiplied with: embedded guidance has a scale of its own (30 is usual for FLUX Fill)."""
    negative: bool
    """Whether a negative prompt changes anything."""
    batched: bool
    """Whether several candidates may share a call."""
    native: int
    """Shorter side in pixels that the model paints at."""
    unit: int
    """Sizes are multiples of this."""
    most: int | None
    """Longest side in pixels that the model has positions for."""

    def native_size(self, height: int, width: int) -> tuple[int, int]:
        """The view's shape with its shorter side at the model's own resolution."""
        scale = self.native / min(height, width)
        most = self.most or max(height, width) * scale + self.unit
        scale = min(scale, most / max(height, width))
        last = int(most) // self.unit * self.unit
        rows, columns = (round(side * scale / self.unit) * self.unit for side in (height, width))
        return min(last, max(self.unit, rows)), min(last, max(self.unit, columns))


def traits_of(pipe: Any, size: int | None = None) -> Traits:
    """The traits of a pipeline; raises UnsupportedPipeline or BadCheckpoint if it cannot repair."""
    name = type(pipe).__name__
    parameters = inspect.signature(type(pipe).__call__).parameters
    check_arguments(name, parameters)
    check_unguarded(pipe)
    parts = pipe.components
    denoiser = parts.get("unet") or parts.get("transformer")
    if denoiser is None or parts.get("vae") is None:
        raise UnsupportedPipeline(f"{name}: has no {'vae' if denoiser is not None else 'unet or transformer'}; {TAKEN}")
    factor = int(pipe.vae_scale_factor)
    channels = int(parts["vae"].config.latent_channels)
    check_channels(pipe, denoiser, channels, factor)
    guidance, unit = guidance_of(parameters, denoiser)
    patch = int(denoiser.config.get("patch_size") or 1)
    positions = denoiser.config.get("pos_embed_max_size")
    return Traits(
        arguments=frozenset(parameters),
        guidance=guidance,
        embedded=bool(denoiser.config.get("guidance_embeds")),
        guidance_unit=unit,
        negative="negative_prompt" in parameters
        and ("true_cfg_scale" not in parameters or guidance == "true_cfg_scale"),
        batched=any(cls.__name__ in BATCHED for cls in type(pipe).__mro__),
        native=size or native_side(pipe, denoiser) * factor,
        unit=factor * (8 if "unet" in parts else max(2, patch)),
        most=None if positions is None else int(positions) * patch * factor,
    )


TAKEN = "a repairer needs a latent inpainting pipeline, such as AutoPipelineForInpainting opens"


def check_unguarded(pipe: Any) -> None:
    """Raise BadInput if the pipeline is a guarded twin or made of the parts of one, which refuse to work elsewhere."""
    if any("_guardpaint_original" in vars(type(part)) for part in pipe.components.values()):
        raise BadInput(f"this {type(pipe).__name__} has parts of a guarded pipeline; make it from the original one")


def check_arguments(name: str, parameters: Mapping[str, Any]) -> None:
    """Raise UnsupportedPipeline unless a repair request can be put into a call of this class."""
    missing = [a for a in NEEDED if a not in parameters]
    if missing:
        raise UnsupportedPipeline(
            f"{name}: its call has no {', '.join(missing)}; {TAKEN}, or AutoPipelineForInpainting.from_pipe(pipe)"
        )
    foreign = [a for a in FOREIGN if a in parameters]
    if foreign:
        raise UnsupportedPipeline(f"{name}: its call needs {foreign[0]}, which a repair has not; {TAKEN}")


def check_channels(pipe: Any, denoiser: Any, channels: int, factor: int) -> None:
    """Raise BadCheckpoint if the denoiser's input does not fit the pipeline's class and VAE."""
    plain, masked = channels, 2 * channels + 1
    wanted = {
        "StableDiffusionInpaintPipeline": {plain, masked} & {4, 9},
        "StableDiffusionXLInpaintPipeline": {plain, masked} & {4, 9},
        "StableDiffusion3InpaintPipeline": {plain, masked} & {16, 33},
        "FluxInpaintPipeline": {4 * channels},
        "FluxFillPipeline": {4 * (2 * channels + factor**2)},
    }
    taken = int(denoiser.config.in_channels)
    for cls in type(pipe).__mro__:
        fitting = wanted.get(cls.__name__, {taken})
        if taken not in fitting:
            raise BadCheckpoint(
                f"{cls.__name__}: its {type(denoiser).__name__} takes {taken} channels; with a VAE of {channels} "
                f"latent channels this class repairs with {' or '.join(map(str, sorted(fitting))) or 'none'}"
            )


def guidance_of(parameters: Mapping[str, Any], denoiser: Any) -> tuple[str | None, float]:
    """The argument that the cfg knob sets, and the factor between them."""
    if "guidance_embeds" in denoiser.config:  # FLUX and its kin
        if denoiser.config.guidance_embeds:
            return "guidance_scale", float(parameters["guidance_scale"].default) / USUAL_CFG
        real = "true_cfg_scale" in parameters and parameters["true_cfg_scale"].default > 1.0
        return ("true_cfg_scale", 1.0) if real else (None, 1.0)
    return ("guidance_scale" if "guidance_scale" in parameters else None), 1.0


def native_side(pipe: Any, denoiser: Any) -> int:
    """Shorter side in latent pixels that the model was trained at."""
    own = denoiser.config.get("sample_size") or vars(pipe).get("default_sample_size")
    if own is None:
        raise BadCheckpoint(
            f"{type(pipe).__name__}: does not say at which size it paints; pass size=1024, or what it is"
        )
    return int(min(own)) if isinstance(own, list | tuple) else int(own)
