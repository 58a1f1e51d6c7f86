"""Progress bars of long commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

T = TypeVar("T")


@contextmanager
def bar(description: str, total: int | None, done: int = 0, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar while the block runs; yields a function that is told how many more are done. An unknown total is None."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=quiet) as progress:
        task = progress.add_task(description, total=total, completed=done)
        yield lambda count: progress.advance(task, count)


def track(items: Iterable[T], description: str, total: int | None = None, quiet: bool = False) -> Iterator[T]:
    """The items, with a bar that counts them; the total is their length if they have one."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with bar(description, total, quiet=quiet) as advance:
        for item in items:
            yield item
            advance(1)
