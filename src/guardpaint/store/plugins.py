"""What other installed packages add to GuardPaint, found through entry points and loaded on first use.

Groups: `guardpaint.bases` (named base models), `guardpaint.guards` (folders of ready guards; `embedded` is the default
one), `guardpaint.testbeds` (worlds to train and measure in), `guardpaint.models` (models that can be trained, with
their trainers), `guardpaint.commands` (command groups), and `guardpaint.auditors`, `.approvers`, `.repairers` and
`.judges` (classes of parts, by kind).
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from guardpaint.errors import BadPlugin, MissingPackage

BASES, GUARDS, TESTBEDS, MODELS, COMMANDS = (
    f"guardpaint.{name}" for name in ("bases", "guards", "testbeds", "models", "commands")
)
AUDITORS, APPROVERS, REPAIRERS, JUDGES = (
    f"guardpaint.{name}" for name in ("auditors", "approvers", "repairers", "judges")
)
HOW_TO_INSTALL = "pip install paperdolls (in a checkout: pip install -e packages/paperdolls)"
"""The package that brings the embedded guard, its base models and the testbed they were trained in."""


@cache
def registered(group: str) -> dict[str, EntryPoint]:
    """Entry points of a group by name; nothing is imported yet."""
    return {point.name: point for point in entry_points(group=group)}


def package_of(point: EntryPoint) -> str:
    """The installed package that registers an entry point."""
    return point.dist.name if point.dist is not None else point.value.partition(":")[0].partition(".")[0]


def load(group: str, name: str, what: str) -> Any:
    """The object behind an entry point. If no installed package provides it, the error says how to install one.

    Whatever else the package's code raises when it is imported becomes a BadPlugin that names entry point and package.
    """
    point = registered(group).get(name)
    if point is None:
        raise MissingPackage(f"{what} comes with the package `paperdolls`, which is not installed: {HOW_TO_INSTALL}")
    package = package_of(point)
    where = f"the entry point {name} = {point.value} of the package `{package}`"
    try:
        return point.load()
    except ImportError as error:
        how = HOW_TO_INSTALL if package == "paperdolls" else f"install what it needs, as with pip install {package}"
        raise MissingPackage(f"{what}: {where} cannot be imported ({error}): {how}") from error
    except Exception as error:
        raise BadPlugin(
            f"{what}: {where} cannot be loaded ({type(error).__name__}: {error}); repair or remove the package"
        ) from error
