"""Guards and pipelines that another process can load, with an auditor that does what prompts say."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from services import CALL

from guardpaint.guard import GuardPaint
from guardpaint.testing import small
from guardpaint.testing.doubles import AlwaysSafe, AlwaysUnsafe, PaintsFlat


@dataclass
class Obeys(AlwaysSafe):
    """Sleeps for ever on the prompt `hang`, dies on `die`, flags `bad` and plain white pictures, and is slow otherwise."""

    pause: float = 0.0

    def audit(self, images, prompts, noise):
        if "hang" in prompts:
            time.sleep(1e6)
        if "die" in prompts:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.pause)
        flagged = [p == "bad" or bool((i > 0.99).all()) for i, p in zip(images, prompts, strict=True)]
        return [
            (AlwaysUnsafe() if bad else AlwaysSafe()).audit(images[:1], [p], noise)[0]
            for bad, p in zip(flagged, prompts, strict=True)
        ]


def obedient(broken: Path | None = None, **config):
    """A guard and a pipeline; while the file `broken` exists, loading them fails."""
    if broken is not None and broken.exists():
        raise RuntimeError("these weights are broken")
    return GuardPaint(Obeys(), PaintsFlat()).configured(**config), small.pipeline("sd"), CALL
