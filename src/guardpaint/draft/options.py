"""How a base model is opened: which files of it, in which precision, where, and with which LoRAs."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from guardpaint.errors import BadConfig
from guardpaint.store.folders import REVISION, Access

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Precisions by the names that options use, with torch's own names."""
OFFLOADS = ("none", "model", "sequential")
VARIANT = r"\w[\w-]*"
DEVICE = r"[a-z]+(:\d+)?"


@dataclass(frozen=True)
class Lora:
    """A LoRA to merge into a base model."""

    path: str
    """A safetensors file, a folder that holds one, or `hub:owner/name`."""
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.path or not math.isfinite(self.scale):
            raise BadConfig(f"LoRA {self.path!r} with scale {self.scale}: write PATH or PATH=SCALE, as in style=0.8")

    @classmethod
    def parse(cls, text: str) -> Lora:
        """Read PATH or PATH=SCALE. A path that exists as it is written may contain a `=`."""
        path, sign, scale = text.rpartition("=")
        if not sign or Path(text).exists():
            return cls(text)
        try:
            return cls(path, float(scale))
        except ValueError as error:
            raise BadConfig(
                f"LoRA {text!r}: {scale!r} is no scale; write PATH or PATH=SCALE, as in style=0.8"
            ) from error


@dataclass(frozen=True)
class LoadOptions:
    """How a diffusers pipeline is opened. What is not given is chosen for the machine; docs/guide.md says how."""

    dtype: str | None = None
    """fp32, fp16 or bf16, for all components alike."""
    device: str | None = None
    """cpu, cuda, cuda:1, mps …"""
    variant: str | None = None
    """Which of several sets of weight files is read, as in `model.fp16.safetensors`."""
    revision: str | None = None
    """Branch, tag or commit of a hub repository."""
    token: str | None = field(default=None, repr=False)
    """Access token of the hub, for gated and private repositories."""
    offload: str = "none"
    """none, model (whole models wait in main memory) or sequential (single layers do: slow, least memory)."""
    loras: tuple[Lora, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in (None, *DTYPES):
            raise BadConfig(f"dtype {self.dtype!r}: choose {', '.join(DTYPES)}")
        if self.offload not in OFFLOADS:
            raise BadConfig(f"offload {self.offload!r}: choose {', '.join(OFFLOADS)}")
        if self.device is not None and not re.fullmatch(DEVICE, self.device):
            raise BadConfig(f"device {self.device!r}: write cpu, cuda, cuda:1 or mps")
        if self.variant is not None and not re.fullmatch(VARIANT, self.variant):
            raise BadConfig(f"variant {self.variant!r}: write a name such as fp16")
        if self.revision is not None and not re.fullmatch(REVISION, self.revision):
            raise BadConfig(f"revision {self.revision!r}: write a branch, a tag or a commit")
        if self.token is not None and not self.token.strip():
            raise BadConfig("token: it is empty; leave it out, or take one from https://huggingface.co/settings/tokens")

    @property
    def access(self) -> Access:
        """What the hub is asked for."""
        return Access(self.revision, self.token, self.variant)

    def check_installed(self, name: str) -> None:
        """Raise BadConfig if these options name files of a base that a package brings; it has only one set of them."""
        for what, value in (("variant", self.variant), ("revision", self.revision)):
            if value is not None:
                raise BadConfig(f"{what} {value!r}: {name} comes with a package and has only one; leave --{what} out")


FP32 = LoadOptions(dtype="fp32", device="cpu")
"""How models are opened for training and inside of packages."""
