"""One progress bar for every long command."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")


class Advance(Protocol):
    """Advances a bar by `count`; with `description`, it also changes the text before the bar."""

    def __call__(self, count: int, description: str | None = None) -> None: ...


@contextmanager
def bar(description: str, total: int | None, quiet: bool = False, done: int = 0) -> Iterator[Advance]:
    """A bar on standard error inside a with block; yields the function that advances it. `done` is where it starts."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as progress:
        task = progress.add_task(description, total=total, completed=done)

        def advance(count: int, description: str | None = None) -> None:
            progress.update(task, advance=count, description=description)

        yield advance


def track(items: Iterable[T], description: str, total: int | None = None, quiet: bool = False) -> Iterator[T]:
    """The items, with a bar that advances as they are used."""
    known = len(items) if total is None and isinstance(items, Sized) else total
    with bar(description, known, quiet) as advance:
        for item in items:
            yield item
            advance(1)
