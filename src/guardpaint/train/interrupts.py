"""Ctrl-C during training: the running step is finished and a checkpoint written before the process ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Interrupt:
    """Whether Ctrl-C was pressed."""

    pressed: bool = False


@contextmanager
def finishing_the_step() -> Iterator[Interrupt]:
    """Inside the with block the first Ctrl-C is only noted, the second one raises as usual.

    A Ctrl-C that was noted raises KeyboardInterrupt when the block ends.
    """
    noted = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        if noted.pressed:
            raise KeyboardInterrupt
        noted.pressed = True

    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
    if noted.pressed:
        raise KeyboardInterrupt
