"""A log that cannot be flooded: lines that come too often from one place in the code are counted, not written."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

Place = tuple[str, str, int]
"""Logger, file and line."""


@dataclass
class Allowance:
    """How many lines a place may write now, and how many were left out since the last summary."""

    lines: float
    since: float
    left_out: int = 0


class SparingHandler(logging.StreamHandler[TextIO]):
    """Writes up to `burst` lines at once and `rate` lines a second from one place; says how many it left out."""

    def __init__(
        self, stream: Any, burst: int = 200, rate: float = 20.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(stream)
        self.burst, self.rate, self.clock = burst, rate, clock
        self.places: dict[Place, Allowance] = {}

    def emit(self, record: logging.LogRecord) -> None:
        now, place = self.clock(), (record.name, record.filename, record.lineno)
        for other, allowance in self.places.items():
            allowance.lines = min(float(self.burst), allowance.lines + (now - allowance.since) * self.rate)
            allowance.since = now
            if allowance.left_out and allowance.lines >= min(2.0, self.burst):
                self.summarise(other, allowance)
        own = self.places.setdefault(place, Allowance(float(self.burst), now))
        if own.lines < 1.0:
            own.left_out += 1
            return
        own.lines -= 1.0
        super().emit(record)

    def summarise(self, place: Place, allowance: Allowance) -> None:
        """Write how many lines of a place were left out, without what they said."""
        name, file, line = place
        text = json.dumps({"left_out": allowance.left_out, "logger": name, "from": f"{file}:{line}"})
        allowance.left_out, allowance.lines = 0, allowance.lines - 1.0
        super().emit(logging.LogRecord(name, logging.WARNING, file, line, text, None, None))


def log_to(stream: Any) -> None:
    """Send the process's log to a stream, one message per line and sparingly."""
    handler = SparingHandler(stream)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
