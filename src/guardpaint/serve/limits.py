"""Rate limits per key, as token buckets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from guardpaint.serve.settings import Key


class Rates:
    """Allows each caller `per_minute` pictures a minute; up to a minute's worth may come at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.lock = threading.Lock()
        self.left: dict[str, tuple[float, float]] = {}

    def take(self, key: Key, count: int) -> float:
        """Take `count` pictures from the caller's bucket. Returns 0 if they are allowed, else the seconds to wait."""
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
        """Return `count` pictures to the bucket, because they were not drawn."""
        with self.lock:
            have, since = self.left.get(key.name, (float(key.per_minute), self.clock()))
            self.left[key.name] = (min(float(key.per_minute), have + count), since)
