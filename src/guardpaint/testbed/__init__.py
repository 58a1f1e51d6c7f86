"""Testbeds: worlds to train and measure in, opened by name, from a YAML file, or as the installed default.

`protocol.py` says what a testbed provides, `files.py` reads one from a YAML file.
"""

from __future__ import annotations

from pathlib import Path

from guardpaint.errors import BadInput
from guardpaint.store import plugins
from guardpaint.testbed.files import FileTestbed
from guardpaint.testbed.protocol import (
    SPLITS,
    AuditorLessons,
    Dataset,
    HardNegatives,
    InpainterLessons,
    KnownPicture,
    KnownPictures,
    Prompt,
    References,
    RepairCases,
    SafePairs,
    Showcase,
    StockInpainter,
    Testbed,
    Wordings,
    need,
)

__all__ = [
    "SPLITS",
    "AuditorLessons",
    "Dataset",
    "FileTestbed",
    "HardNegatives",
    "InpainterLessons",
    "KnownPicture",
    "KnownPictures",
    "Prompt",
    "References",
    "RepairCases",
    "SafePairs",
    "Showcase",
    "StockInpainter",
    "Testbed",
    "Wordings",
    "installed",
    "need",
    "open_dataset",
    "open_testbed",
]


def installed() -> tuple[str, ...]:
    """Names of the testbeds that installed packages provide."""
    return tuple(plugins.registered(plugins.TESTBEDS))


def open_testbed(name: str | None = None) -> Testbed:
    """Open a testbed by name or YAML file. No name means the only one installed, or `paperdolls` if there are more."""
    if name is not None and Path(name).suffix in (".yaml", ".yml"):
        return FileTestbed.load(Path(name))
    if name is None:
        name = installed()[0] if len(installed()) == 1 else "paperdolls"
    elif name not in installed():
        names = ", ".join(installed()) or "none is installed"
        raise BadInput(f"testbed {name!r}: name a YAML file or an installed one ({names}); {plugins.HOW_TO_INSTALL}")
    return plugins.load(plugins.TESTBEDS, name, f"the testbed {name!r}")()


def open_dataset(name: str | None = None) -> Dataset:
    """The pictures of a testbed as a dataset, for `guardpaint data ingest`."""
    return need(open_testbed(name), Dataset, "data ingest")
