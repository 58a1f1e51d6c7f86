"""Waiting jobs, served fairly: callers take turns, whatever the number of pictures that each of them asks for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from guardpaint.serve.jobs import Crowded, Overloaded


@runtime_checkable
class Waiting(Protocol):
    """What the queue needs of a job."""

    owner: str
    future: Future[Any]
    gone: threading.Event

    @property
    def ask(self) -> Any: ...


Item = TypeVar("Item", bound=Waiting)


class FairQueue(Generic[Item]):
    """One line of jobs per owner, in the order of the owners' turns. It is not locked: its user holds a lock.

    A turn is a batch. Its owner's oldest job leads, and jobs of any owner with equal settings fill it up. An owner
    whose oldest job was taken goes to the end, so that nobody waits for more than one turn of each other owner.
    """

    def __init__(self, most: int, per_owner: int) -> None:
        self.most, self.per_owner = most, per_owner
        self.lines: dict[str, deque[Item]] = {}

    def __len__(self) -> int:
        return sum(len(line) for line in self.lines.values())

    def add(self, jobs: Sequence[Item]) -> None:
        """Take all of these jobs of one owner, or none: Overloaded if the queue is full, Crowded if their share is."""
        if not jobs:
            return
        self.purge()
        if len(self) + len(jobs) > self.most:
            raise Overloaded(f"{len(self)} pictures are waiting already; try again later")
        owner = jobs[0].owner
        own = len(self.lines.get(owner, ()))
        if own + len(jobs) > self.per_owner:
            raise Crowded(f"{own} of your pictures are waiting already; a key may have {self.per_owner}")
        self.lines.setdefault(owner, deque()).extend(jobs)

    def take(self, most: int) -> list[Item]:
        """The next batch of at most `most` jobs with equal settings."""
        self.purge()
        if not self.lines:
            return []
        ask = next(iter(self.lines.values()))[0].ask
        batch: list[Item] = []
        found = True
        while found and len(batch) < most:
            found = False
            for owner in list(self.lines):
                job = self.next_of(owner, ask) if len(batch) < most else None
                found = found or job is not None
                if job is not None and job.future.set_running_or_notify_cancel():
                    batch.append(job)
        return batch

    def next_of(self, owner: str, ask: Any) -> Item | None:
        """Take the owner's oldest job with these settings, if there is one."""
        line = self.lines[owner]
        place = next((i for i, job in enumerate(line) if job.ask == ask), None)
        if place is None:
            return None
        job = line[place]
        del line[place]
        if place == 0:
            del self.lines[owner]
            if line:
                self.lines[owner] = line
        return job

    def purge(self) -> None:
        """Drop the jobs that nobody waits for."""
        for owner, line in list(self.lines.items()):
            for job in line:
                if job.gone.is_set():
                    job.future.cancel()
            kept = deque(job for job in line if not job.future.cancelled())
            if kept:
                self.lines[owner] = kept
            else:
                del self.lines[owner]

    def clear(self) -> list[Item]:
        """Empty the queue; returns what was waiting."""
        left = [job for line in self.lines.values() for job in line]
        self.lines.clear()
        return left
