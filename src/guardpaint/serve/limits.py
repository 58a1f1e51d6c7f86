"""Rates per key: a bucket that fills steadily."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from guardpaint.serve.settings import Key


class Rates:
    """So many pictures a minute for each caller; a burst of a minute's worth is fine."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.lock = threading.Lock()
        self.left: dict[str, tuple[float, float]] = {}

    def take(self, key: Key, count: int) -> float:
        """0 if allowed, else seconds until it would be."""
        now = self.clock()
        rate = key.per_minute / 60
        with self.lock:
            have, since = self.left.get(key.name, (float(key.per_minute), now))
            have = min(float(key.per_minute), have + (now - since) * rate)
            if have < count:
                self.left[key.name] = (have, now)
                return (count - have) / rate
            self.left[key.name] = (have - count, now)
            return 0.0

    def give_back(self, key: Key, count: int) -> None:
        """What was taken for pictures that were turned away."""
        with self.lock:
            have, since = self.left.get(key.name, (float(key.per_minute), self.clock()))
            self.left[key.name] = (min(float(key.per_minute), have + count), since)
