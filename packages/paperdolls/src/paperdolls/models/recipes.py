"""The base models of the paper-doll world by family name: each recipe has its parts, its loss and its pipeline."""

from __future__ import annotations

from collections.abc import Callable

import torch

from paperdolls.models.flow_recipes import Flux, Sd3
from paperdolls.models.recipe import GeneratorConfig, Latents, Recipe
from paperdolls.models.unet_recipes import Inpaint, Sd, Sdxl

RECIPES: dict[str, Callable[..., Recipe]] = {"sd": Sd, "inpaint": Inpaint, "sdxl": Sdxl, "sd3": Sd3, "flux": Flux}


def build(config: GeneratorConfig, vocab: int, other_vocab: int, latents: Latents, seed: int) -> Recipe:
    """The recipe of the config's family for these latents, initialised at random by seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return RECIPES[config.family](config, vocab, other_vocab, latents)
