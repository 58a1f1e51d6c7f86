"""The six knobs, their ranges, and the proposers that need no training."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.errors import BadCheckpoint
from guardpaint.store.checkpoint import sha256_hex
from guardpaint.store.seeds import generator
from guardpaint.types import JsonDict, Knobs, ProposerState

RANGES: dict[str, tuple[float, float]] = {
    "cfg": (1.0, 15.0),
    "dilation": (0.0, 1.0),
    "feather": (0.0, 1.0),
    "jitter": (0.0, 0.5),
    "depth": (1.0, 10.0),
}
CONTINUOUS = tuple(RANGES)
SEED_BUCKETS = 10
SEED_STRIDE = 100


def denormalise(action: Float[Tensor, " 5"], bucket: int) -> Knobs:
    """Clip to [0, 1] and stretch to the physical ranges; depth rounds to a whole number."""
    unit = action.clamp(0.0, 1.0).tolist()
    values = {k: low + u * (high - low) for u, (k, (low, high)) in zip(unit, RANGES.items(), strict=True)}
    return Knobs(
        cfg=values["cfg"],
        dilation=values["dilation"],
        feather=values["feather"],
        jitter=values["jitter"],
        depth=round(values["depth"]),
        seed_offset=bucket * SEED_STRIDE,
    )


def normalise(knobs: Knobs) -> Float[Tensor, " 5"]:
    """The continuous knobs on [0, 1]."""
    values = knobs.as_dict()
    return torch.tensor([(values[k] - low) / (high - low) for k, (low, high) in RANGES.items()])


def checked_knobs(values: dict[str, Any]) -> Knobs:
    """Knobs from a file; TypeError if one is missing, unknown or out of its range."""
    for name, value in values.items():
        low, high = (0, SEED_BUCKETS * SEED_STRIDE) if name == "seed_offset" else RANGES.get(name, (0, 0))
        whole = name in ("depth", "seed_offset")
        kind = int if whole else int | float
        if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
            raise TypeError(f"{name[:40]} must be a {'whole ' if whole else ''}number in [{low}, {high}]")
    return Knobs(**values)


@dataclass(frozen=True)
class UniformProposer:
    """Knobs drawn uniformly from their ranges, one candidate after the other: few are a prefix of many."""

    name: str = "uniform"
    kind: ClassVar[str] = "uniform"

    def options(self) -> JsonDict:
        return {}

    def save_pretrained(self, folder: Path) -> None:
        """Nothing: it has no files."""

    @classmethod
    def from_pretrained(cls, folder: Path) -> UniformProposer:
        return cls()

    def digest(self) -> str:
        return sha256_hex(self.kind)

    def propose(self, state: ProposerState, n: int, seed: int) -> tuple[Knobs, ...]:
        g = generator(seed, "uniform")
        drawn = [
            (torch.rand(len(CONTINUOUS), generator=g), int(torch.randint(SEED_BUCKETS, (), generator=g)))
            for _ in range(n)
        ]
        return tuple(denormalise(a, b) for a, b in drawn)


DEFAULT = Knobs(cfg=7.5, dilation=0.3, feather=0.5, jitter=0.1, depth=8, seed_offset=0)


@dataclass(frozen=True)
class FixedProposer:
    """The same sensible knobs every time; only the seed differs between candidates."""

    knobs: Knobs = DEFAULT
    name: str = "fixed"
    kind: ClassVar[str] = "fixed"

    def options(self) -> JsonDict:
        return {"knobs": self.knobs.as_dict(), "name": self.name}

    def save_pretrained(self, folder: Path) -> None:
        """Nothing: it has no files."""

    @classmethod
    def from_pretrained(cls, folder: Path, knobs: JsonDict | None = None, name: str = "fixed") -> FixedProposer:
        try:
            return cls(DEFAULT if knobs is None else checked_knobs(knobs), name)
        except TypeError as error:
            raise BadCheckpoint(f"{folder}: knobs {reprlib.repr(knobs)} of the proposer ({error})") from error

    def digest(self) -> str:
        return sha256_hex(repr(self.knobs))

    def propose(self, state: ProposerState, n: int, seed: int) -> tuple[Knobs, ...]:
        return tuple(replace(self.knobs, seed_offset=(i % SEED_BUCKETS) * SEED_STRIDE) for i in range(n))


@dataclass(frozen=True)
class StrongProposer:
    """Last resort: wide masks, full depth, guidance spread over its range."""

    name: str = "strong"

    def propose(self, state: ProposerState, n: int, seed: int) -> tuple[Knobs, ...]:
        low, high = RANGES["cfg"]
        return tuple(
            Knobs(
                cfg=low + (high - low) * (i + 0.5) / n,
                dilation=1.0,
                feather=0.5,
                jitter=0.5 * (i % 2),
                depth=10,
                seed_offset=(i % SEED_BUCKETS) * SEED_STRIDE,
            )
            for i in range(n)
        )
