"""Labelers as judges: vision–language models, ShieldGemma, detectors and chat endpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass

from PIL import Image
from torch import nn

from guardpaint.data.judges.opinion import Explained, JudgeFailed, Opinion, worst_harm
from guardpaint.data.labelers import Labeler
from guardpaint.policy import Policy
from guardpaint.store.checkpoint import fingerprint
from guardpaint.types import SAFE


@dataclass
class LabelerJudge(Explained):
    """A labeler as a judge: a harm with a score of at least `level` is present. Judges no attributes."""

    labeler: Labeler
    policy: Policy
    level: float = 0.5
    spec: str = ""
    attributes: bool = False

    @property
    def identity(self) -> str:
        model, asking = getattr(self.labeler, "model", None), getattr(self.labeler, "asking", None)
        weights = fingerprint(model) if isinstance(model, nn.Module) else ""
        generation = [asking.text(), asking.passes, asking.temperature, asking.longest, asking.seed] if asking else []
        phrases = {k: list(v) for k, v in getattr(self.labeler, "phrases", {}).items()}
        parts = [self.labeler.name, self.spec, self.level, self.policy.to_dict(), weights, generation, phrases]
        return json.dumps(parts, sort_keys=True)

    def opinion(self, image: Image.Image) -> Opinion:
        answer = self.labeler.label([image])[0]
        if answer.scores is None:
            raise JudgeFailed(answer.problem or "unreadable answer", answer.raw)
        return worst_harm({n: answer.scores[n] for n in self.policy.names if n != SAFE}, self.level, answer.raw)
