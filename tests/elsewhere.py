"""A guard that is busy, for tests on another device: everything triggers, and an error is an error."""

from __future__ import annotations

from dataclasses import replace

import pytest

from guardpaint.guard import GuardPaint
from guardpaint.policy import Policy
from guardpaint.testing import small

STRICT = replace(Policy.default(), trigger=1e-9)
CALL = {"num_inference_steps": 3, "guidance_scale": 3.0, "height": small.PIXELS, "width": small.PIXELS}


def rarely(*names):
    """Parameters that only the slow tests run."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def busy_guard(device="cpu", repairer=None, **config) -> GuardPaint:
    """A guard of small random parts that plays a tournament in every call and raises whatever goes wrong."""
    own = small.guard(seed=0)
    settings = own.config.with_(on_error="raise", candidates=2, regions=1, **config)
    parts = own.parts.auditor, repairer or own.parts.repairer, own.parts.proposer
    return GuardPaint(*parts, policy=STRICT, config=settings, decoders=own.decoders).to(device)
