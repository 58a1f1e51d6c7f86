"""The safety checker that comes with Stable Diffusion, as a judge.

stock:FOLDER names the checker's own folder or a pipeline's folder with `safety_checker` and `feature_extractor` in it.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from PIL import Image

from guardpaint.audit.checkpoints import open_model, open_processor
from guardpaint.data.judges.opinion import Explained, Opinion, named_by
from guardpaint.draft.loading import on_machine, without_warnings
from guardpaint.policy import Policy
from guardpaint.store.checkpoint import fingerprint
from guardpaint.store.folders import resolve
from guardpaint.types import SAFE


class StockJudge(Explained):
    """StableDiffusionSafetyChecker; it looks for sexual concepts and answers yes or no."""

    def __init__(self, checker: Any, processor: Any, policy: Policy, spec: str = "") -> None:
        self.checker, self.processor, self.policy, self.spec = checker.eval(), processor, policy, spec

    @classmethod
    def open(cls, where: str, policy: Policy) -> StockJudge:
        from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
        from transformers import AutoImageProcessor

        folder = resolve(where)
        own, looks = folder / "safety_checker", folder / "feature_extractor"
        checker = open_model(StableDiffusionSafetyChecker, own if own.is_dir() else folder, "a safety checker")
        processor = open_processor(AutoImageProcessor, looks if looks.is_dir() else folder, "a safety checker")
        return cls(on_machine(checker), processor, policy, f"stock:{where}")

    @property
    def identity(self) -> str:
        return json.dumps(["stock", fingerprint(self.checker), list(self.policy.names)])

    @torch.no_grad()
    def opinion(self, image: Image.Image) -> Opinion:
        pixels = torch.as_tensor(self.processor(images=image, return_tensors="pt")["pixel_values"])
        unused = [np.zeros((1, 1, 3), np.float32)]  # the checker blackens what it flags
        with without_warnings():  # of a black picture, which nobody gets here
            flagged = bool(self.checker(clip_input=pixels.to(self.checker.device), images=unused)[1][0])
        said = named_by(self.policy, "nudity", "sexual") if flagged else SAFE
        return Opinion(said, raw=json.dumps({"nsfw": flagged}), harm=float(flagged))
