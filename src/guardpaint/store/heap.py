"""What the C library's heap keeps for itself. Where there is no glibc, nothing here does anything.

A batch of pictures leaves holes between what stays. glibc keeps them, in as many heaps as threads have asked for
memory, so a service that draws for days would hold far more than it uses.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

ARENA_MAX = -8
"""M_ARENA_MAX of malloc.h."""


@functools.cache
def glibc() -> Any | None:
    """The C library if it can give memory back."""
    try:
        library = ctypes.CDLL(None)
        library.malloc_trim, library.mallopt  # noqa: B018 (raises if they are not there)
        return library
    except (OSError, AttributeError, TypeError):
        return None


def few_heaps(most: int = 2) -> None:
    """Let threads share so many heaps; for the beginning of a process."""
    library = glibc()
    if library is not None:
        library.mallopt(ARENA_MAX, most)


def give_back() -> None:
    """Give unused memory back to the operating system; takes some milliseconds."""
    library = glibc()
    if library is not None:
        library.malloc_trim(0)
