"""Hides installed packages from a Python process and its children: those that GUARDPAINT_WITHOUT names, with commas.

Python imports this module at its start if its folder is on PYTHONPATH. Importing a hidden package fails, and its entry
points are not found. Rehearsals use it to show that a recipe needs nothing but what it names.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterator
from typing import Any

HIDDEN = frozenset(filter(None, os.environ.get("GUARDPAINT_WITHOUT", "").split(",")))


class Hidden:
    """Refuses to find the hidden packages."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"{name} is hidden by GUARDPAINT_WITHOUT", name=name)


if HIDDEN:
    found = importlib.metadata.distributions

    def distributions(**choice: Any) -> Iterator[importlib.metadata.Distribution]:
        """All installed packages but the hidden ones; `entry_points` looks through these."""
        return (d for d in found(**choice) if d.name.replace("-", "_") not in HIDDEN)

    sys.meta_path.insert(0, Hidden())
    importlib.metadata.distributions = distributions
