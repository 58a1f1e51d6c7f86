"""The options of the repairers that have weights of their own, checked and as JSON values."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from guardpaint.draft.loading import LORA
from guardpaint.errors import BadConfig
from guardpaint.repair.ladder import DEPTHS
from guardpaint.types import JsonDict, RepairRequest

PROMPTS = ("safe", "user")
RENOISING = ("LCMScheduler", "TCDScheduler")
"""Schedulers that add fresh noise after every step."""
DETERMINISTIC = ("DDIMScheduler", "EulerDiscreteScheduler")
FLOW = ("FlowMatchEulerDiscreteScheduler",)
SAMPLERS = (*RENOISING, *DETERMINISTIC, *FLOW)
MOST_STEPS, MOST_FEW_STEPS, FEW_STEPS = 100, 8, 4
MOST_CROP, MOST_GUIDANCE, MOST_SIZE = 8.0, 100.0, 1 << 14


@dataclass(frozen=True)
class Adapter:
    """A few-step LoRA (LCM, Hyper-SD) and the scheduler that its publisher samples it with."""

    path: str
    """A folder, or `hub:owner/name[@revision]`."""
    scheduler: str
    file: str = LORA
    """The weights' file in that folder; of a repository only this file is downloaded."""


@dataclass(frozen=True)
class RepairOptions:
    """How a repairer is prompted, how much it sees, and how many steps it takes."""

    prompt: str
    """`safe`: the policy's safe prompt, for models without safety training; `user`: the user's own prompt."""
    crop: float | None = None
    """Context around the region as a share of its longer side; None repairs the whole picture."""
    steps: int | None = None
    """Denoising steps at inversion depth 10; None: 10, or 4 with an adapter."""
    guidance: float | None = None
    """Guidance scale of every candidate; None: the cfg knob, or 1 (off) with an adapter."""
    size: int | None = None
    """Shorter side in pixels that the model paints at; None: its own."""
    adapter: Adapter | None = None

    @classmethod
    def read(cls, prompt: str, options: Mapping[str, Any]) -> RepairOptions:
        """Checked options from JSON values; `prompt` is the default of the repairer's class."""
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise BadConfig(f"repairer option {unknown[0]!r}: choose among {', '.join(known)}")
        values = {"prompt": prompt, **options}
        if values["prompt"] not in PROMPTS:
            raise BadConfig(f"prompt={reprlib.repr(values['prompt'])}: choose among {', '.join(PROMPTS)}")
        adapter = values["adapter"] = read_adapter(values.get("adapter"))
        check_number("crop", values.get("crop"), 0.0, MOST_CROP)
        check_number("guidance", values.get("guidance"), 0.0, MOST_GUIDANCE)
        check_whole("steps", values.get("steps"), MOST_STEPS if adapter is None else MOST_FEW_STEPS)
        check_whole("size", values.get("size"), MOST_SIZE)
        return cls(**values)

    def to_dict(self) -> JsonDict:
        return asdict(self)

    @property
    def rungs(self) -> int:
        """Denoising steps at inversion depth 10."""
        return self.steps or (DEPTHS if self.adapter is None else FEW_STEPS)

    @property
    def fixed_guidance(self) -> float | None:
        """The guidance scale of every candidate; None: that of its cfg knob."""
        return 1.0 if self.guidance is None and self.adapter is not None else self.guidance

    def words(self, request: RepairRequest) -> tuple[str, str]:
        """What to paint, and what not to: the harm's definition goes with the safe prompt only."""
        return (request.safe_prompt, request.avoid) if self.prompt == "safe" else (request.prompt, "")


def read_adapter(value: Any) -> Adapter | None:
    """An adapter from JSON values."""
    if value is None:
        return None
    if isinstance(value, Adapter):
        value = asdict(value)
    known = [f.name for f in fields(Adapter)]
    if not isinstance(value, Mapping) or not {"path", "scheduler"} <= set(value) <= set(known):
        raise BadConfig(f"adapter={reprlib.repr(value)}: must be a mapping with path, scheduler and possibly file")
    for name, text in value.items():
        if not isinstance(text, str) or not text:
            raise BadConfig(f"adapter {name}={reprlib.repr(text)}: must be a text")
    adapter = Adapter(**value)
    if adapter.scheduler not in SAMPLERS:
        raise BadConfig(f"adapter scheduler={adapter.scheduler!r}: choose among {', '.join(SAMPLERS)}")
    if not adapter.file.endswith(".safetensors") or "/" in adapter.file or "\\" in adapter.file:
        raise BadConfig(f"adapter file={adapter.file!r}: must be the name of a .safetensors file in {adapter.path}")
    return adapter


def check_number(name: str, value: Any, low: float, high: float) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadConfig(f"{name}={reprlib.repr(value)}: must be a number or None")
    if not low <= value <= high:
        raise BadConfig(f"{name}={value}: must be in [{low:g}, {high:g}]")


def check_whole(name: str, value: Any, most: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most):
        raise BadConfig(f"{name}={reprlib.repr(value)}: must be a whole number in [1, {most}]")
