"""Bases as an evaluation opens them: named as NAME=PATH, called with settings of their own, safety checker set aside.

A base's own safety checker would blacken pictures of every defence alike. Only the defence `stock_checker` uses it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from guardpaint.bases import SMALL, Base, BaseOptions, load_base, named_bases
from guardpaint.draft.loading import open_folder, pipeline_folder
from guardpaint.errors import BadInput
from guardpaint.store.checkpoint import fingerprint
from guardpaint.testbed import Testbed

SETTINGS: Mapping[str, tuple[int, float]] = {"jbdb": (20, 7.5)}
"""Steps and guidance of published protocols by name; `jbdb` are those of JailbreakDiffBench."""
NAMED = re.compile(r"(?P<name>[\w.+-]+)=(?P<path>.+)")
CALL = {"steps": int, "guidance": float, "size": int}


@dataclass(frozen=True)
class BaseEntry:
    """A base of a run: the name that its rows carry, and how it is opened and called."""

    name: str
    path: str
    """A registered name, a folder or `hub:owner/name`."""
    opening: BaseOptions = field(default_factory=BaseOptions)

    @property
    def real(self) -> bool:
        """Whether it is neither a base that a package brings nor a small random one."""
        return self.path not in named_bases() and not self.path.startswith(SMALL)


def read_entry(text: str, opening: BaseOptions, calls: Mapping[str, BaseOptions]) -> BaseEntry:
    """An entry from NAME=PATH, or from a name or path alone, which then is its name too."""
    match = None if Path(text).exists() else NAMED.fullmatch(text)
    name, path = (match["name"], match["path"]) if match else (text, text)
    own = calls.get(name, BaseOptions())
    named = {k: v for k in CALL if (v := getattr(own, k)) is not None}
    return BaseEntry(name, path, replace(opening, **named))


def read_entries(texts: Sequence[str], opening: BaseOptions, calls: Sequence[str] = ()) -> dict[str, BaseEntry]:
    """The bases of a run by name; `calls` are settings of single bases, as in flux:steps=28,guidance=3.5."""
    own = dict(read_call(text) for text in calls)
    entries = [read_entry(text, opening, own) for text in texts]
    found = {entry.name: entry for entry in entries}
    if len(found) < len(entries):
        raise BadInput(f"bases {', '.join(e.name for e in entries)}: name each base once")
    if unknown := sorted(set(own) - set(found)):
        raise BadInput(f"settings of base {unknown[0]!r}: the run has {', '.join(found)}")
    return found


def read_call(text: str) -> tuple[str, BaseOptions]:
    """The name of a base and its settings, from NAME:steps=N,guidance=G,size=S."""
    name, _, rest = text.partition(":")
    try:
        pairs = [part.partition("=")[::2] for part in rest.split(",")]
        values: dict[str, Any] = {key: CALL[key](value) for key, value in pairs}
    except (KeyError, ValueError) as error:
        raise BadInput(f"settings {text!r}: write NAME:steps=4,guidance=0, with any of {', '.join(CALL)}") from error
    return name, BaseOptions(**values)


def with_settings(opening: BaseOptions, name: str | None) -> BaseOptions:
    """The options with a protocol's steps and guidance where the user names none."""
    if name is None:
        return opening
    if name not in SETTINGS:
        raise BadInput(f"settings {name!r}: choose among {', '.join(SETTINGS)}")
    steps, guidance = SETTINGS[name]
    return replace(
        opening,
        steps=steps if opening.steps is None else opening.steps,
        guidance=guidance if opening.guidance is None else opening.guidance,
    )


@dataclass(frozen=True)
class StockChecker:
    """Stable Diffusion's own safety checker and the processor of its pictures."""

    model: Any
    processor: Any

    @classmethod
    def from_pretrained(cls, where: str) -> StockChecker:
        """The checker of a pipeline in a folder or on the hub."""
        pipe = open_folder(pipeline_folder(where))
        checker = checker_of(pipe)
        if checker is None:
            raise BadInput(f"{where}: has no safety checker; name the folder of a pipeline with one, such as SD 1.5")
        return checker

    def digest(self) -> str:
        return fingerprint(self.model)

    @torch.no_grad()
    def flags(self, images: Sequence[Image.Image]) -> list[bool]:
        """Whether each picture is flagged."""
        pixels = self.processor(list(images), return_tensors="pt").pixel_values
        pixels = torch.as_tensor(pixels).to(self.model.device, self.model.dtype)
        unused = [np.zeros((1, 1, 3), np.float32) for _ in images]  # the checker blackens what it flags
        return [bool(flag) for flag in self.model(images=unused, clip_input=pixels)[1]]


def checker_of(pipe: Any) -> StockChecker | None:
    """The safety checker of a pipeline, or None if it has none."""
    parts = pipe.components
    model, processor = parts.get("safety_checker"), parts.get("feature_extractor")
    return None if model is None or processor is None else StockChecker(model, processor)


@dataclass(frozen=True)
class EvaluatedBase(Base):
    """A base that draws without its own safety checker."""

    checker: StockChecker | None = None
    """The checker that was set aside; None if the base has none."""


def open_base(entry: BaseEntry, testbed: Testbed | None) -> EvaluatedBase:
    """Open a base, through the testbed if there is one, and set its safety checker aside."""
    base = load_base(entry.path, entry.opening) if testbed is None else testbed.base(entry.path, entry.opening)
    return without_checker(replace(base, name=entry.name))


def without_checker(base: Base) -> EvaluatedBase:
    """The base with a copy of its pipeline that has no safety checker; the given one stays as it is."""
    checker, pipe = checker_of(base.pipe), base.pipe
    if checker is not None:
        pipe = copy.copy(pipe)
        vars(pipe)["safety_checker"] = None
    return EvaluatedBase(base.name, pipe, base.call, checker)


def drawn_with(base: Base) -> str:
    """Steps, guidance, size and sampler of a base's pictures, as reports show them."""
    own = base.settings
    size = f"{own.width} × {own.height} pixels"
    return f"{own.steps} steps, guidance {own.guidance:g}, {size}, {type(base.pipe.scheduler).__name__}"
