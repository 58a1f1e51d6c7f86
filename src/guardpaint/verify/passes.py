"""Shared passes: what the steps of several images need of the repairer and the auditor is done for all at once.

A step is written as a generator. It yields a `Paint` or a `Look` and is sent the result. `together` drives the steps of
all images of a batch and puts equal needs into one pass; `alone` drives a single one. An image whose own request fails
gets the error; the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.types import Audit, PaintsTogether, Repairer, RepairRequest

LOOK_BATCH = 16
"""Views that the auditor scores at a time, however many images share a pass."""

T = TypeVar("T")
K = TypeVar("K")


@dataclass(frozen=True)
class Paint:
    """Requests for candidates; answered by the pictures of each request and the share of the time."""

    requests: tuple[RepairRequest, ...]

    @property
    def rows(self) -> int:
        return sum(len(r.knobs) for r in self.requests)


@dataclass(frozen=True)
class Look:
    """Views of one image for the auditor; answered by their checked audits and the share of the time."""

    images: Float[Tensor, "n 3 h w"]
    prompt: str | None
    noise: float

    @property
    def rows(self) -> int:
        return len(self.images)


Need = Paint | Look
Audits = Callable[[Tensor, Sequence[str | None], float], list[Audit]]
"""Pictures, the prompt of each, and one noise level → checked audits."""
Work = Generator[Need, tuple[Any, float], T]
"""A step of one image: yields needs, is sent (results, seconds), returns what it decided."""


@dataclass(frozen=True)
class Passes:
    """The parts that needs are met by."""

    repairer: Repairer
    audits: Audits
    during: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered while steps are driven."""

    def paint(self, requests: Sequence[RepairRequest]) -> list[Tensor]:
        """The candidates of requests, in shared passes if the repairer has them."""
        if isinstance(self.repairer, PaintsTogether) and len(requests) > 1:
            return self.repairer.together(requests)
        return [self.repairer.candidates(r) for r in requests]

    def met(self, needs: Sequence[Need]) -> list[Any]:
        """The results of needs of one kind (`kind`), in one pass."""
        if isinstance(needs[0], Paint):
            painted = self.paint([r for n in needs if isinstance(n, Paint) for r in n.requests])
            ends = [len(n.requests) for n in needs if isinstance(n, Paint)]
            return [painted[sum(ends[:k]) : sum(ends[: k + 1])] for k in range(len(ends))]
        looks = [n for n in needs if isinstance(n, Look)]
        prompts = [n.prompt for n in looks for _ in n.images]
        images = torch.cat([n.images for n in looks])
        audits = [
            audit
            for k in range(0, len(images), LOOK_BATCH)
            for audit in self.audits(images[k : k + LOOK_BATCH], prompts[k : k + LOOK_BATCH], looks[0].noise)
        ]
        ends = [len(n.images) for n in looks]
        return [audits[sum(ends[:k]) : sum(ends[: k + 1])] for k in range(len(ends))]

    def alone(self, work: Work[T]) -> T:
        """Drive the step of one image; errors of the parts are raised inside the step."""
        outcome = self.together({0: work})[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def together(self, works: Mapping[K, Work[T]]) -> dict[K, T | Exception]:
        """Drive the steps of several images side by side; the outcome of each, or the error that ended it.

        Candidates are painted when no step waits for the auditor any more: steps that need different numbers of looks
        then still share the passes that cost most.
        """
        done: dict[K, T | Exception] = {}
        waiting: dict[K, Need] = {}
        with self.during():
            for key, work in works.items():
                advance(key, work, None, waiting, done)
            while waiting:
                kinds: dict[Any, list[K]] = {}
                for key, need in waiting.items():
                    kinds.setdefault(kind(need), []).append(key)
                looks = [keys for shape, keys in kinds.items() if shape != PAINT]
                for keys in looks or kinds.values():
                    self.answer({key: waiting.pop(key) for key in keys}, works, waiting, done)
        return {key: done[key] for key in works}

    def answer(
        self,
        needs: Mapping[K, Need],
        works: Mapping[K, Work[T]],
        waiting: dict[K, Need],
        done: dict[K, T | Exception],
    ) -> None:
        """Meet some needs in one pass and go on with their steps; if it fails, each is met by itself."""
        began = time.perf_counter()
        try:
            found: Sequence[Any] = self.met(list(needs.values()))
        except Exception as error:
            if len(needs) > 1:
                for key, need in needs.items():
                    self.answer({key: need}, works, waiting, done)
                return
            found = [error]
        each = (time.perf_counter() - began) / max(1, sum(n.rows for n in needs.values()))
        for (key, need), result in zip(needs.items(), found, strict=True):
            said = result if isinstance(result, Exception) else (result, each * need.rows)
            advance(key, works[key], said, waiting, done)


def advance(
    key: K,
    work: Work[T],
    said: tuple[Any, float] | Exception | None,
    waiting: dict[K, Need],
    done: dict[K, T | Exception],
) -> None:
    """Send a step its answer, or raise the error in it; note what it needs next or how it ended."""
    try:
        waiting[key] = work.throw(said) if isinstance(said, Exception) else work.send(said)  # type: ignore[arg-type]
    except StopIteration as end:
        done[key] = end.value
    except Exception as error:
        done[key] = error


PAINT = "paint"


def kind(need: Need) -> Any:
    """Needs of equal kinds can share a pass."""
    return PAINT if isinstance(need, Paint) else (tuple(need.images.shape[1:]), need.noise)
