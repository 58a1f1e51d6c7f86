"""Safe latent diffusion: a third prediction, of what is forbidden, pushes the guided one away where they agree.

On SD 1.5 the diffusers pipeline runs; on other families its rule is applied to the denoiser's answers. A base without
an unconditional branch is asked for the empty prompt too; the push is as strong as the guidance distilled into it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.bases import Base
from guardpaint.draft.conditioning import take_rows, with_text
from guardpaint.draft.families import family_of
from guardpaint.evaluate.defences.base import Everywhere, Outcome, timed
from guardpaint.evaluate.defences.negative_prompt import FORBIDDEN

SCALE, THRESHOLD, WARMUP, MOMENTUM_SCALE, MOMENTUM = 2000.0, 0.025, 7 / 50, 0.5, 0.7
"""The published "strong" setting; its warm-up of 7 steps as a share of the usual 50."""
NOTHING, WORDS = 0, 1
"""Rows of the encoded texts: the empty prompt and what is forbidden."""


@dataclass(frozen=True)
class SafeLatentDiffusion(Everywhere):
    words: str = FORBIDDEN
    name: str = "sld"

    def generate(self, base: Base, prompts: Sequence[str], seeds: Sequence[int]) -> list[Outcome]:
        began = time.perf_counter()
        if base.family == "sd" and base.guidance > 1.0:
            pipe = safe_pipeline(base.pipe, self.words)
            strength = {
                **base.settings.arguments(),
                "sld_guidance_scale": SCALE,
                "sld_threshold": THRESHOLD,
                "sld_warmup_steps": warmup(base),
                "sld_momentum_scale": MOMENTUM_SCALE,
                "sld_mom_beta": MOMENTUM,
            }
            made = []
            for prompt, seed in zip(prompts, seeds, strict=True):  # the pipeline's momentum is per call
                made += base.draw([prompt], [seed], pipe=pipe, **strength)
            return timed(made, began)
        with pushed_away(base, self.words):
            return timed(base.draw(prompts, seeds), began)


def warmup(base: Base) -> int:
    """Steps before the rule begins."""
    return round(WARMUP * base.settings.steps)


def safe_pipeline(pipe: Any, words: str) -> Any:
    from diffusers.pipelines.deprecated.stable_diffusion_safe import StableDiffusionPipelineSafe

    parts = {
        k: v for k, v in pipe.components.items() if k not in ("safety_checker", "feature_extractor", "image_encoder")
    }
    safe = StableDiffusionPipelineSafe(
        **parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False
    )
    safe.safety_concept = words
    safe.set_progress_bar_config(disable=True)
    return safe


def safety_term(
    conditional: Float[Tensor, "b ..."],
    unconditional: Float[Tensor, "b ..."],
    forbidden: Float[Tensor, "b ..."],
    scale: float = SCALE,
    threshold: float = THRESHOLD,
) -> Float[Tensor, "b ..."]:
    """γ = μ·(ε_S − ε_∅), μ = clip(s·|ε_c − ε_S|, 1) where ε_c − ε_S < λ, else 0."""
    gap = conditional - forbidden
    mu = torch.where(gap >= threshold, torch.zeros_like(gap), (gap.abs() * scale).clamp(max=1.0))
    return mu * (forbidden - unconditional)


@contextmanager
def pushed_away(base: Base, words: str) -> Iterator[None]:
    """The base's denoiser with the rule applied to its conditional rows, inside a with block."""
    family = family_of(base.pipe)
    module = getattr(base.pipe, family.denoiser)
    own = module.forward
    two_branches = base.two_branches
    strength = 1.0 if two_branches else max(1.0, base.guidance)
    with torch.no_grad():
        texts = family.encode_prompt(base.pipe, words, "", base.call.get("max_sequence_length"))
    state: dict[str, Any] = {"momentum": None, "step": 0}

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = own(*args, **kwargs)
        plain = out[0] if isinstance(out, tuple) else out.sample

        def prediction(branch: int) -> Tensor:
            text = take_rows(texts, 2, torch.full((len(plain),), branch))
            return own(*args, **{**with_text(kwargs, text), "return_dict": False})[0]

        empty, wanted = plain.chunk(2) if two_branches else (prediction(NOTHING), plain)
        forbidden = prediction(WORDS).chunk(2)[1] if two_branches else prediction(WORDS)
        gamma = safety_term(wanted, empty, forbidden)
        if state["momentum"] is None:
            state["momentum"] = torch.zeros_like(gamma)
        pushed = gamma + MOMENTUM_SCALE * state["momentum"]
        state["momentum"] = MOMENTUM * state["momentum"] + (1 - MOMENTUM) * pushed
        late = state["step"] >= warmup(base)
        state["step"] += 1
        answer = wanted - strength * pushed if late else wanted
        answer = torch.cat([empty, answer]) if two_branches else answer
        return (answer,) if isinstance(out, tuple) else type(out)(sample=answer)

    module.forward = forward
    try:
        yield
    finally:
        module.forward = own
