"""Training-free filtering of prompt embeddings: tokens near the forbidden subspace are projected out of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from guardpaint.bases import Base
from guardpaint.draft.families import family_of
from guardpaint.evaluate.defences.base import Everywhere, Outcome, timed
from guardpaint.evaluate.defences.prompt_filter import SENTENCES

NEUTRAL = "a person"
"""What all prompts have in common is no part of the forbidden subspace."""


def subspace(states: Float[Tensor, "k d"]) -> Float[Tensor, "d r"]:
    """Orthonormal basis of what the forbidden sentences span."""
    return torch.linalg.qr(states.T).Q


def projected(
    states: Float[Tensor, "l d"], forbidden: Float[Tensor, "d r"], share: float = 0.01, plain: Tensor | None = None
) -> tuple[Float[Tensor, "l d"], Bool[Tensor, " l"]]:
    """Tokens unusually close to the forbidden subspace lose their part in it, but stay in the prompt's own span.

    A token is close when its distance to the subspace is smaller than the others' mean by a margin. What it has in
    common with a `plain` prompt does not count as its part.
    """
    own_part = states if plain is None else states - plain
    inside = own_part @ forbidden @ forbidden.T
    distance = (own_part - inside).norm(dim=1)
    others = (distance.sum() - distance) / max(1, len(distance) - 1)
    close = distance < (1 - share) * others
    own = torch.linalg.qr(states.T).Q
    safe = states - inside @ own @ own.T
    return torch.where(close[:, None], safe, states), close


@dataclass(frozen=True)
class EmbeddingProjection(Everywhere):
    name: str = "embedding_projection"

    def generate(self, base: Base, prompts: Sequence[str], seeds: Sequence[int]) -> list[Outcome]:
        began = time.perf_counter()
        return timed(base.draw(prompts, seeds, **self.embeds(base, list(prompts))), began)

    @torch.no_grad()
    def embeds(self, base: Base, prompts: list[str]) -> dict[str, Any]:
        """The pipeline's own embeddings, token by token cleaned; pooled text likewise."""
        states, pooled, more = encode(base, prompts)
        wrong, wrong_pooled, _ = encode(base, list(SENTENCES))
        plain, plain_pooled, _ = encode(base, [NEUTRAL])
        basis = subspace((wrong - plain).mean(1))
        shared = plain.mean(1)
        out = {"prompt_embeds": torch.stack([projected(s, basis, plain=shared)[0] for s in states]), **more}
        if pooled is not None and wrong_pooled is not None and plain_pooled is not None:
            basis = subspace(wrong_pooled - plain_pooled)
            out["pooled_prompt_embeds"] = pooled - (pooled - plain_pooled) @ basis @ basis.T
        return out


def encode(base: Base, texts: list[str]) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """Prompt states, pooled text, and what else the pipeline's call then wants."""
    pipe, family = base.pipe, family_of(base.pipe).name
    guided = base.guidance > 1.0
    length = {"max_sequence_length": base.call["max_sequence_length"]} if "max_sequence_length" in base.call else {}
    if family == "sd":
        states, empty = pipe.encode_prompt(texts, pipe._execution_device, 1, guided, [""] * len(texts))
        return states, None, {"negative_prompt_embeds": empty} if guided else {}
    if family == "flux":
        states, pooled, _ = pipe.encode_prompt(texts, None, **length)
        return states, pooled, {}
    first = (texts,) if family == "sdxl" else (texts, None, None)
    negative = {"negative_prompt": [""] * len(texts)} if guided else {}
    states, empty, pooled, empty_pooled = pipe.encode_prompt(
        *first, do_classifier_free_guidance=guided, **negative, **length
    )
    more = {"negative_prompt_embeds": empty, "negative_pooled_prompt_embeds": empty_pooled} if guided else {}
    return states, pooled, more
