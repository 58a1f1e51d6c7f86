"""A small disk that can be filled and emptied: a memory file system of its own, which needs root to mount."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path


class NoDisk(Exception):
    """No file system of one's own can be mounted here."""


@dataclass(frozen=True)
class Disk:
    """A mounted folder with little room."""

    folder: Path

    @property
    def ballast(self) -> Path:
        return self.folder / "ballast"

    def fill(self) -> None:
        """Write until there is no room for another byte."""
        with self.ballast.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"\0" * 65536)
        with self.ballast.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"\0")

    def free(self) -> None:
        self.ballast.unlink(missing_ok=True)


@contextmanager
def full_disk(megabytes: int = 16) -> Iterator[Disk]:
    """A disk of its own inside a with block; unmounted afterwards. Raises NoDisk where that is not allowed."""
    with tempfile.TemporaryDirectory(prefix="redteam-disk-") as name:
        line = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "redteam", name]
        found = subprocess.run(line, capture_output=True, text=True, check=False)
        if found.returncode:
            raise NoDisk(f"no disk to fill: {found.stderr.strip()}")
        try:
            yield Disk(Path(name))
        finally:
            subprocess.run(["umount", "-l", name], check=False)
