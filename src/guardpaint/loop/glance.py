"""Glances: coarse looks at steps that are not audited anyway. A glance only schedules an audit; it never decides."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from guardpaint.config import GuardConfig
from guardpaint.draft.codec import ViewDecoder
from guardpaint.draft.views import LatentView
from guardpaint.loop.recorder import Recorder
from guardpaint.loop.report import GlanceRecord
from guardpaint.types import Audit
from guardpaint.verify.parts import Parts


def due(step: int, steps: int, config: GuardConfig) -> bool:
    """Whether the guard glances at a step, if it does not audit it."""
    return config.glance_from is not None and (step + 1) / steps >= config.glance_from - 1e-9


def scheduled(parts: Parts, audit: Audit, progress: float) -> bool:
    """Whether a glance is reason enough for an audit."""
    return parts.policy.finding(audit) is not None or audit.adv_prob >= parts.glance_trigger(progress)


@torch.no_grad()
def glance(
    parts: Parts,
    decoder: ViewDecoder,
    views: Mapping[int, LatentView],
    prompts: Sequence[str | None],
    records: Sequence[Recorder],
    at: tuple[int, float],
) -> list[int]:
    """Look at images, given by index with their views; returns those that must be audited at this step.

    `at` is the step and its progress.
    """
    start = time.perf_counter()
    step, progress = at
    pictures = decoder.at(torch.stack([v.latent for v in views.values()]), parts.glance_size).cpu()
    noise = next(iter(views.values())).noise
    sound = [k for k, picture in enumerate(pictures) if torch.isfinite(picture).all()]
    seen = parts.audit(pictures[sound], [prompts[k] for k in sound], noise) if sound else []
    audits = dict(zip(sound, seen, strict=True))
    share = (time.perf_counter() - start) / len(views)
    found = []
    for k, (image, recorder) in enumerate(zip(views, records, strict=True)):
        audit = audits.get(k)
        if audit is None:  # the audit of this image says what is wrong with it, and of no other
            found.append(image)
            continue
        audited = scheduled(parts, audit, progress)
        limit = parts.glance_trigger(progress)
        recorder.glances.append(GlanceRecord(step, progress, parts.glance_size, audit.adv_prob, limit, audited, share))
        if audited:
            found.append(image)
    return found
