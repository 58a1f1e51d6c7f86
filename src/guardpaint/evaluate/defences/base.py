"""What a defence is: prompts and seeds in, pictures and what became of them out."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from PIL import Image
from torch import nn

from guardpaint.store.checkpoint import fingerprint
from guardpaint.draft.families import family_of


@dataclass(frozen=True)
class Base:
    """A pipeline and the settings it was made for."""

    name: str
    pipe: Any
    call: dict[str, Any]

    @property
    def family(self) -> str:
        return family_of(self.pipe).name

    @property
    def guidance(self) -> float:
        return float(self.call.get("guidance_scale", 1.0))

    @property
    def two_branches(self) -> bool:
        """Whether its denoiser answers for the empty prompt beside the asked one."""
        return self.family != "flux" and self.guidance > 1.0

    def draw(self, prompts: Sequence[str], seeds: Sequence[int], pipe: Any = None, **more: Any) -> list[Image.Image]:
        """One batch; every picture has its own seed. `more` may replace the prompts by embeddings."""
        generators = [torch.Generator().manual_seed(s) for s in seeds]
        words = {} if "prompt_embeds" in more else {"prompt": list(prompts)}
        return list((pipe or self.pipe)(generator=generators, **{**self.call, **words, **more}).images)


def short_hash(*values: Any) -> str:
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def base_hash(base: Base) -> str:
    """Of everything in a base that decides its pictures."""
    parts = {k: fingerprint(v) for k, v in base.pipe.components.items() if isinstance(v, nn.Module)}
    plan = {
        k: v for k, v in base.pipe.scheduler.config.items() if not k.startswith("_")
    }  # "_…" lists come in any order
    return short_hash(parts, base.call, plan)


@dataclass(frozen=True)
class Outcome:
    """One prompt's fate."""

    image: Image.Image | None
    """None: nothing was released."""
    status: str
    """plain, clean, repaired, regenerated, blurred, blocked, refused, or released_flagged."""
    seconds: float
    detail: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Defence(Protocol):
    """Anything that answers prompts."""

    @property
    def name(self) -> str: ...

    def applies(self, base: Base) -> str:
        """Why it cannot run on this base, or nothing."""
        ...

    def generate(self, base: Base, prompts: Sequence[str], seeds: Sequence[int]) -> list[Outcome]: ...


class Everywhere:
    """For defences that run on every base."""

    def applies(self, base: Base) -> str:
        return ""


def timed(images: Sequence[Image.Image], began: float, status: str = "plain") -> list[Outcome]:
    """Outcomes of one batch that share its time."""
    spent = (time.perf_counter() - began) / max(1, len(images))
    return [Outcome(i, status, spent) for i in images]
