"""Memory that was used once goes back to the operating system."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from guardpaint.store.heap import glibc

CODE = """
from guardpaint.store.heap import few_heaps, give_back
few_heaps()
few_heaps(1)

def megabytes():
    return int(open("/proc/self/statm").read().split()[1]) * {page} / 1e6

before = megabytes()
blocks = [b"x" * 60_000 for _ in range(2000)]
last = b"x" * 60_000  # stays, so that everything before it does not lie at the end of the heap
del blocks
held = megabytes() - before
give_back()
print(held, megabytes() - before, len(last))
"""


@pytest.mark.skipif(glibc() is None or not Path("/proc/self/statm").exists(), reason="no glibc on Linux")
def test_holes_are_given_back():
    """In a process of its own, because pytest's heap has other holes."""
    code = CODE.format(page=os.sysconf("SC_PAGE_SIZE"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    held, left, _ = map(float, done.stdout.split())
    assert held > 60 and left < 10


def test_without_glibc_nothing_happens(monkeypatch):
    from guardpaint.store import heap

    monkeypatch.setattr(heap, "glibc", lambda: None)
    heap.few_heaps()
    heap.give_back()
