"""A guard that is busy, for tests on another device: everything triggers, and an error is an error."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from guardpaint.draft import loading
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


def on_a_gpu(monkeypatch, device):
    """Openers find this device where nobody names one, as they find CUDA on a machine that has it."""
    monkeypatch.setattr(loading, "chosen_device", lambda options: device)


def places(value, depth=3) -> set[str]:
    """The kinds of devices that the weights inside a judge, labeler or metric are on; heads of a few numbers aside."""
    if isinstance(value, nn.Module):
        return {p.device.type for p in value.parameters()}
    parts = vars(value).values() if depth and hasattr(value, "__dict__") else ()
    return {kind for part in parts for kind in places(part, depth - 1)}
