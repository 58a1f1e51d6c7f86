"""The latest values by name, bounded in number and in bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")


class Recent(Generic[V]):
    """Keeps the latest values: at most `most`, and of `most_bytes` together. It is not locked.

    The newest value stays, however large it is.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self.most, self.most_bytes, self.bytes = most, most_bytes, 0
        self.values: OrderedDict[str, tuple[V, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self.values)

    def put(self, name: str, value: V, size: int) -> None:
        """Keep a value of so many bytes as the newest; the oldest ones make room for it."""
        self.drop(name)
        self.values[name] = value, size
        self.bytes += size
        while len(self.values) > max(1, self.most) or (self.bytes > self.most_bytes and len(self.values) > 1):
            self.drop(next(iter(self.values)))

    def get(self, name: str) -> V | None:
        """The value, or None if it is not kept (any more)."""
        return self.values[name][0] if name in self.values else None

    def drop(self, name: str) -> None:
        """Forget a value, if it is kept."""
        self.bytes -= self.values.pop(name, (None, 0))[1]
