"""Reads the prompt and the seed of each image from a pipeline call, and puts the released images into its output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from guardpaint.loop.report import GuardReport, Status
from guardpaint.store import seeds


def image_prompts(arguments: dict[str, Any], safety_prompt: Any) -> list[str] | None:
    """The text of each image, from the call's prompts (all encoders') or safety_prompt; None if unknown."""
    per_prompt = int(arguments.get("num_images_per_prompt") or 1)
    if safety_prompt is not None:
        texts = [safety_prompt] if isinstance(safety_prompt, str) else list(safety_prompt)
        embeds = arguments.get("prompt_embeds")
        if len(texts) == 1 and embeds is not None:
            texts = texts * len(embeds)
    else:
        columns = []
        for name in ("prompt", "prompt_2", "prompt_3"):
            value = arguments.get(name)
            if value is not None:
                columns.append([value] if isinstance(value, str) else list(value))
        if not columns:
            return None
        rows = max(map(len, columns))
        texts = [" ".join(dict.fromkeys(c[i % len(c)] for c in columns)) for i in range(rows)]
    return [t for t in texts for _ in range(per_prompt)]


def seed_rule(generator: Any, fallback: int | None) -> Callable[[int, int], tuple[int, int]]:
    """A function (image, batch) → (request seed, index among the images that share it).

    The seeds are those of the caller's generators, which are read without drawing from them. Without a generator, the
    seed is `fallback` or, if that is None, a fresh one.
    """
    if isinstance(generator, Sequence) and len(generator) > 1:
        each = [g.initial_seed() for g in generator]
        return lambda image, batch: (each[image % len(each)], image // len(each))
    if isinstance(generator, Sequence) and generator:
        generator = generator[0]
    if isinstance(generator, torch.Generator):
        seed = generator.initial_seed()
    else:
        seed = seeds.fresh() if fallback is None else fallback
    return lambda image, batch: (seed, image)


def finished_output(out: Any, images: Any, reports: list[GuardReport]) -> Any:
    """The pipeline's output, object or tuple, with guarded images and flags (and, in the object, the reports)."""
    if isinstance(out, tuple):
        return (images, nsfw_flags(reports, out[1]), *out[2:]) if len(out) > 1 else (images,)
    previous = out.get("nsfw_content_detected")
    out.images = images
    out.nsfw_content_detected = nsfw_flags(reports, previous)
    out.safety = reports
    return out


def nsfw_flags(reports: Sequence[GuardReport], previous: Sequence[bool] | None) -> list[bool]:
    """diffusers' flag per image: true if it was withheld, or released although flagged."""
    mine = [r.status in (Status.BLOCKED, Status.RELEASED_FLAGGED) for r in reports]
    return mine if previous is None else [a or bool(b) for a, b in zip(mine, previous, strict=True)]
