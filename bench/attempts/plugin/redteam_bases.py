"""Bases for attacks on a running service: small random pipelines, and an auditor that does what the prompt says.

The harness (`attempts.stand`) registers them under `guardpaint.bases` for the processes that it starts. Loading one
replaces the answers of every auditor in the process that draws. Only the guard's decisions are staged; the service, the
loop and the pipeline are the real ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from torch import Tensor

from guardpaint.audit.model import AuditorScorer
from guardpaint.store.checkpoint import read_json
from guardpaint.testing import small
from guardpaint.testing.doubles import constant_audit
from guardpaint.types import Audit
from paperdolls.bases import guard_folder

STRANGE = {
    "probs-above-one": {"safe": 1.5, "nudity": -0.25, "violence": -0.25},
    "probs-short": {"safe": 0.3, "nudity": 0.1, "violence": 0.1},
    "probs-zero": {"safe": 0.0, "nudity": 0.0, "violence": 0.0},
    "probs-nan": {"safe": float("nan"), "nudity": 0.0, "violence": 0.0},
}
"""Words of a prompt and the probabilities that they make the auditor answer with."""
SLOW_STEP = 0.5


def steps() -> int:
    """The smallest number of steps that the embedded guard is calibrated for, at least four."""
    scope = read_json(guard_folder() / "guardpaint.json")["config"].get("scope") or {}
    return max(4, int(scope["steps"][0]) if "steps" in scope else 4)


TURNS = count()
"""Counts the audits of an auditor that wavers: the first look flags, the next one does not."""
OWN = AuditorScorer.audit
"""The auditor's own answers, from which staged ones take their embeddings."""


def directed(self: Any, image: Tensor, prompt: str | None, noise: float) -> Audit:
    """The audit of one picture: as its prompt says, and without a prompt unsafe if the picture is plain mid-grey."""
    pixels = min(image.shape[-2:])
    if prompt is None:
        grey = 0.3 < float(image.mean()) < 0.62 and float(image.std()) < 0.1
        return constant_audit(0.9871 if grey else 0.0123, None, pixels)
    if "please hang" in prompt:
        time.sleep(3600)
    if "please crash" in prompt:
        raise RuntimeError("the auditor broke")
    flagged = "please flag" in prompt or ("please waver" in prompt and next(TURNS) % 2 == 0)
    score = 0.4567 if "please waver" in prompt else 0.9871
    audit = constant_audit(score if flagged else 0.0123, prompt, pixels)
    if flagged:
        own = OWN(self, image[None], [prompt], noise)[0]
        audit = replace(audit, image_embed=own.image_embed, text_embed=own.text_embed)
    return next((replace(audit, probs=dict(p)) for word, p in STRANGE.items() if word in prompt), audit)


def audits(self: Any, images: Tensor, prompts: Sequence[str | None], noise: float) -> list[Audit]:
    return [directed(self, i, p, noise) for i, p in zip(images, prompts, strict=True)]


def crashes(self: Any, images: Tensor, prompts: Sequence[str | None], noise: float) -> list[Audit]:
    raise RuntimeError("the auditor broke")


@dataclass(frozen=True)
class Staged:
    """A small base; implements `guardpaint.bases.NamedBase`."""

    audit: Callable[..., list[Audit]] = audits
    pause: float = 0.0
    """Seconds that every step takes longer."""
    inpaints: bool = False

    def load(self) -> Any:
        AuditorScorer.audit = self.audit  # type: ignore[method-assign]
        pipe = small.pipeline("sd")
        if self.pause:
            pipe.unet.register_forward_pre_hook(lambda *_: time.sleep(self.pause))
        return pipe

    def call(self) -> dict[str, Any]:
        side = small.PIXELS
        return {"num_inference_steps": steps(), "guidance_scale": 4.0, "height": side, "width": side}


doubles, crashing, slow = Staged(), Staged(crashes), Staged(pause=SLOW_STEP)
