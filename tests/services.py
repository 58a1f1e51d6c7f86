"""A small service and its keys, for the tests of the API."""

from __future__ import annotations

from PIL import Image

from guardpaint.guard import GuardPaint
from guardpaint.serve.app import Service
from guardpaint.serve.settings import Key, Settings
from guardpaint.serve.worker import Worker
from guardpaint.testing import small
from guardpaint.testing.doubles import AlwaysSafe, PaintsFlat

USER, OPERATOR, OTHER = "user-secret-0123456", "operator-secret-012", "other-secret-012345"
KEYS = {USER: Key("ann", per_minute=1000), OPERATOR: Key("olga", "operator", 1000), OTHER: Key("bob", per_minute=1000)}
CALL = {"num_inference_steps": 2, "guidance_scale": 3.0, "height": small.PIXELS, "width": small.PIXELS}
BAD = Image.new("RGB", (64, 64), "white")


def make(auditor=None, guard=None, **settings):
    guard = guard or GuardPaint(auditor or AlwaysSafe(), PaintsFlat())
    limits = Settings(keys=KEYS, **settings)
    return Service(Worker(guard, small.pipeline("sd"), CALL, limits), "tiny-sd", limits, BAD)


def bearer(secret=USER):
    return {"Authorization": f"Bearer {secret}"}
