"""Processes as /proc shows them: descendants, memory, and waiting for something to become true."""

from __future__ import annotations

import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def resident(pid: int) -> float:
    """Resident memory of a process in MB; 0 once it is gone."""
    with suppress(OSError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 2**20
    return 0.0


def family_tree(pid: int) -> list[int]:
    """A process and its descendants, parents first."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                found += [int(p) for p in task.read_text().split()]
    return found


class Peak:
    """Largest value of a measure inside a with block, above what it was before."""

    def __init__(self, measure: Callable[[], float]) -> None:
        self.measure, self.over, self.value = measure, threading.Event(), 0.0

    def watch(self) -> None:
        while not self.over.wait(0.02):
            self.value = max(self.value, self.measure() - self.before)

    def __enter__(self) -> Peak:
        self.before = self.measure()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()


def end_in_order() -> None:
    """Let SIGTERM end this process like an error does, so that its with blocks end what they have started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


def until(question: Callable[[], bool], seconds: float, pause: float = 0.1) -> float | None:
    """Seconds until a question is answered with yes; None if it is not in time."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if question():
            return time.monotonic() - began
        time.sleep(pause)
    return None
