"""Opens a recipe for a folder and decides how its commands are started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from guardpaint.recipe import spec
from guardpaint.recipe.engine import Engine, Launch


def has_gpu() -> bool:
    """Whether this machine shows an NVIDIA or AMD device; PyTorch is not imported for the answer."""
    return Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists()


def open_engine(
    path: Path, out: Path, processes: int = 1, again: str = "", say: Callable[[str], None] = print
) -> Engine:
    """An engine for a recipe in a folder."""
    out = out.absolute()
    values = spec.read_recipe(path)
    recipe = spec.assemble(located(values, path), path.stem, out)
    launch = Launch(processes, has_gpu(), again=again or f"guardpaint recipe run {path} --out {out}")
    return Engine(recipe, launch, say)


def located(data: dict, path: Path) -> dict:
    """A recipe whose values under `files` … are absolute: a text that begins with ./ is relative to the recipe."""
    folder = path.absolute().parent
    values = {
        k: str((folder / v).resolve()) if isinstance(v, str) and v.startswith(("./", "../")) else v
        for k, v in data["values"].items()
    }
    return {**data, "values": values}
