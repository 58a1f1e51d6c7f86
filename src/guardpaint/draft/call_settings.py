"""Steps, guidance and picture size that a pipeline is called with if nobody says otherwise."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from guardpaint.draft.families import family_of
from guardpaint.errors import BadInput


@dataclass(frozen=True)
class CallSettings:
    """What one picture is drawn with."""

    steps: int
    guidance: float
    height: int
    width: int

    def arguments(self) -> dict[str, Any]:
        """As arguments of a pipeline's call."""
        return {
            "num_inference_steps": self.steps,
            "guidance_scale": self.guidance,
            "height": self.height,
            "width": self.width,
        }


def call_settings(pipe: Any, call: Mapping[str, Any] | None = None) -> CallSettings:
    """What a pipeline draws with under these call arguments: they come first, then what the pipeline itself would do.

    Steps and guidance are the defaults of its `__call__`, such as 50 and 7.5 for Stable Diffusion. The size is what the
    pipeline computes from its configuration, such as 1024 for FLUX.
    """
    call = call or {}
    defaults = call_parameters(pipe)
    height, width = call.get("height"), call.get("width")
    if not height or not width:
        own = native_size(pipe)
        height, width = height or own[0], width or own[1]
    steps, guidance = (
        call[name] if call.get(name) is not None else defaults[name].default
        for name in ("num_inference_steps", "guidance_scale")
    )
    return CallSettings(int(steps), float(guidance), int(height), int(width))


def call_parameters(pipe: Any) -> Mapping[str, inspect.Parameter]:
    """Parameters of the pipeline's `__call__`, or of the class that it derives from if its own takes `**kwargs`."""
    wanted = {"num_inference_steps", "guidance_scale"}
    for cls in type(pipe).__mro__:
        parameters = inspect.signature(cls.__call__).parameters if "__call__" in vars(cls) else {}
        if wanted <= set(parameters):
            return parameters
    raise BadInput(
        f"{type(pipe).__name__} takes no {' and '.join(sorted(wanted))}; it is no pipeline of a known family"
    )


def native_size(pipe: Any) -> tuple[int, int]:
    """Height and width in pixels that the pipeline draws by itself: its sample size times the VAE's factor."""
    denoiser = getattr(pipe, family_of(pipe).denoiser)
    units = getattr(pipe, "default_sample_size", None) or getattr(denoiser.config, "sample_size", None)
    if isinstance(units, int):
        units = (units, units)
    if units is None:
        raise BadInput(f"{type(pipe).__name__} does not state its picture size; give it with --size")
    height, width = (int(side) * int(pipe.vae_scale_factor) for side in units)
    return height, width
