"""What a recipe will need before it starts: downloads, gated repositories, disk, hours and memory of each stage."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from guardpaint.errors import BadInput
from guardpaint.recipe.engine import Engine
from guardpaint.recipe.ledger import DONE, cache_of
from guardpaint.recipe.sources import SourceFile
from guardpaint.recipe.spec import HubModel, Stage

TOTAL = "all stages"


def token() -> str | None:
    """The hub token that downloads will use: HF_TOKEN, or the one that `hf auth login` stored."""
    if os.environ.get("HF_TOKEN", "").strip():
        return os.environ["HF_TOKEN"].strip()
    from huggingface_hub import get_token

    return get_token()


def downloads(stages: Sequence[Stage]) -> list[HubModel]:
    """The repositories that stages need, each once, without those that a local folder stands in for."""
    return list(dict.fromkeys(m for s in stages for m in s.models if m.folder is None))


def is_cached(model: HubModel) -> bool:
    """Whether the hub's cache on this machine has a snapshot of a repository."""
    return any((cache_of(model) / "snapshots").glob("*/*"))


def locked(stages: Sequence[Stage]) -> list[HubModel]:
    """Gated repositories that are not on this machine and for which there is no token."""
    return [] if token() else [m for m in downloads(stages) if m.gated and not is_cached(m)]


def check_access(engine: Engine, stages: Sequence[Stage]) -> None:
    """Raise BadInput if a stage that is not done needs a gated repository and no token is set."""
    todo = [s for s in stages if (r := engine.ledger.read(s)) is None or r.status != DONE]
    names = [m.id for m in locked(todo)]
    if names:
        raise BadInput(
            f"gated: {', '.join(names)}. Accept the terms of each on its page on huggingface.co, then set HF_TOKEN "
            "(or run `hf auth login`); nothing was started"
        )


def check_disk(engine: Engine, stages: Sequence[Stage]) -> str | None:
    """A warning if a disk has less room than the stages and the downloads on it are expected to need."""
    from huggingface_hub.constants import HF_HUB_CACHE

    fresh = [s for s in stages if engine.ledger.read(s) is None]
    own, cache = existing(engine.recipe.out), existing(Path(HF_HUB_CACHE))
    needs = [
        (own, "the stages", sum(s.estimate.disk_gb or 0.0 for s in fresh)),
        (cache, "downloads", sum(m.gigabytes for m in downloads(fresh) if not is_cached(m))),
    ]
    if own.stat().st_dev == cache.stat().st_dev:
        needs = [(own, "stages and downloads together", sum(need for *_, need in needs))]
    lines = []
    for folder, what, need in needs:
        free = shutil.disk_usage(folder).free / 1e9
        if need > free:
            lines.append(f"{what} need about {need:.0f} GB on the disk of {folder}, which has {free:.0f} GB free")
    return "; ".join(lines) or None


def existing(path: Path) -> Path:
    """A folder, or the nearest one above it that exists."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())


def fetched(stages: Sequence[Stage]) -> list[SourceFile]:
    """The files that a person has to fetch: those that testbeds and manifests name, each once."""
    return list(dict.fromkeys(f for s in stages for f in s.reads if f.named_by))


def check_files(engine: Engine, stages: Sequence[Stage]) -> None:
    """Raise BadInput if a stage that is not done reads a file that somebody has to fetch and that is not there."""
    todo = [s for s in stages if (r := engine.ledger.read(s)) is None or r.status != DONE]
    lines = [f"{f.path}, named in {f.named_by}" for f in fetched(todo) if not f.there]
    if lines:
        raise BadInput(f"these files have to be fetched first: {'; '.join(lines)}; nothing was started")


def table(engine: Engine, stages: Sequence[Stage]) -> Table:
    """One row per stage, and one for all."""
    shown = Table(title=f"{engine.recipe.name} in {engine.recipe.out}", show_lines=False, title_justify="left")
    for column in ("stage", "state", "download GB", "disk GB", "hours", "memory GB"):
        shown.add_column(column, overflow="fold", justify="left" if column in ("stage", "state") else "right")
    seen: set[HubModel] = set()
    for stage in stages:
        record = engine.ledger.read(stage)
        fresh = [m for m in stage.models if m.folder is None and m not in seen]
        seen |= set(fresh)
        e = stage.estimate
        shown.add_row(
            stage.name,
            "new" if record is None else record.status,
            f"{sum(m.gigabytes for m in fresh):g}" if fresh else "",
            number(e.disk_gb) if stage.words else "",
            number(e.hours) if stage.words else "a person",
            number(e.memory_gb) if stage.words else "",
        )
    whole = downloads(stages)
    memory = [s.estimate.memory_gb for s in stages if s.estimate.memory_gb is not None]
    shown.add_section()
    shown.add_row(
        TOTAL,
        "",
        f"{sum(m.gigabytes for m in whole):.0f}",
        f"{sum(s.estimate.disk_gb or 0.0 for s in stages):.0f}",
        f"{sum(s.estimate.hours or 0.0 for s in stages):.0f}",
        number(max(memory, default=None)),
    )
    return shown


def notes(stages: Sequence[Stage]) -> list[str]:
    """What is downloaded, and what the estimate of each stage rests on."""
    whole = downloads(stages)
    lines = [f"downloads, {sum(m.gigabytes for m in whole):.0f} GB, {sum(m.gated for m in whole)} gated:"]
    lines += [f"  {m.id} {m.gigabytes:g} GB{' (gated)' if m.gated else ''}" for m in whole]
    own = fetched(stages)
    lines += ["files that you fetch yourself:"] if own else []
    lines += [f"  {f.path}, named in {f.named_by}{'' if f.there else ': MISSING'}" for f in own]
    guessed = sum(s.estimate.hours is None and bool(s.words) for s in stages)
    lines.append(f"estimates rest on the following; {guessed} stages have none for hours:")
    return lines + [f"  {s.name}: {s.estimate.rests_on}" for s in stages if s.words and s.estimate.rests_on]


def number(value: float | None) -> str:
    return "?" if value is None else f"{value:g}"


def show(engine: Engine, stages: Sequence[Stage], console: Console, commands: bool = True) -> None:
    """Print the table, what stands in the way, and the command lines."""
    console.print(table(engine, stages))
    for line in notes(stages):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    lacking = locked(stages)
    if lacking:
        names = ", ".join(m.id for m in lacking)
        console.print(f"no hub token is set, and these are gated: {names}", style="yellow", soft_wrap=True)
    elif any(m.gated for m in downloads(stages)):
        console.print("a hub token is set; whether its account accepted the terms of each gated one is not checked")
    room = check_disk(engine, stages)
    if room:
        console.print(room, style="yellow", soft_wrap=True)
    if commands:
        for stage in stages:
            console.print(f"{stage.name}: {engine.launch.shown(stage)}", markup=False, highlight=False, soft_wrap=True)
