"""Views and labels of a corpus by several processes, or on a Ray cluster whose machines share the corpus's folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import Image

from guardpaint import bases
from guardpaint.bases import BaseOptions
from guardpaint.data import corpus_views
from guardpaint.data.labelers import Asking, open_labeler
from guardpaint.data.questions import Answer
from guardpaint.data.store import Corpus
from guardpaint.data.views import ViewedBase
from guardpaint.draft.loading import load_tiny
from guardpaint.draft.options import LoadOptions
from guardpaint.policy import Policy
from guardpaint.store.images import load_bytes, png_bytes
from guardpaint.store.jobs import spread
from guardpaint.verify.parts import glance_size

PER_PROCESS = 256
"""Pictures that a process labels before its answers are stored: enough to be worth loading the model."""


@dataclass(frozen=True)
class ViewJob:
    """One process's share of the views of a base."""

    corpus: Path
    base: str
    out: Path
    splits: Sequence[str]
    policy: Policy
    options: BaseOptions = field(default_factory=BaseOptions)
    name: str | None = None
    """The base's name in file names; None: from its path."""
    pixels: int = 384
    coarse: int = 224
    batch: int = 8
    tiny: Path | None = None
    """Folder of a tiny decoder, which decodes half of the views."""
    share: tuple[int, int] = (0, 1)
    """Which of how many shares this is."""

    @property
    def where(self) -> str:
        """The base by its absolute path, or as it is named."""
        return str(Path(self.base).resolve()) if Path(self.base).is_dir() else self.base


def make_views(job: ViewJob) -> list[str]:
    """Make one share of the views; returns a sentence for each split."""
    loaded = bases.load_base(job.base, job.options)
    call = corpus_views.settings(loaded.pipe, dict(loaded.call))
    decoder = None if job.tiny is None else load_tiny(job.tiny).float().to(loaded.pipe._execution_device)
    viewed = ViewedBase(loaded.pipe, call, decoder, (job.coarse, job.pixels, glance_size(job.coarse)))
    own = "_".join(Path(job.where).parts[-2:]).strip("/").replace("-", "_").replace(":", "_")
    plan = corpus_views.ViewPlan(viewed, job.name or own, job.pixels, job.batch, f"{job.where} {job.tiny}")
    said = []
    for split in job.splits:
        new = corpus_views.make(Corpus(job.corpus), plan, job.out, split, job.policy, share=job.share)
        said.append(f"{new} new files of split {split} in {job.out}; called with {call}")
    return said


@dataclass
class SpreadLabeler:
    """A labeler that several processes open; each labels a share of the pictures."""

    spec: str
    """As `--labeler` names it."""
    asking: Asking
    batch: int = 8
    """Pictures per call of the model."""
    processes: int = 1
    ray: bool = False
    name: str = ""
    opening: LoadOptions = field(default_factory=LoadOptions)
    """Device and hub token of every process."""

    def __post_init__(self) -> None:
        self.name = self.name or self.spec.partition(":")[2].rpartition("#")[2]

    def label(self, pictures: Sequence[Image.Image]) -> list[Answer]:
        """One answer per picture, in order."""
        count = min(self.processes, len(pictures))
        jobs = [
            (k, Named(self.spec, self.asking, self.opening), self.batch, [png_bytes(p) for p in pictures[k::count]])
            for k in range(count)
        ]
        answers: list[Answer | None] = [None] * len(pictures)
        for k, found in spread(answer, jobs, self.processes, self.ray):
            answers[k::count] = found
        return [a for a in answers if a is not None]


@dataclass(frozen=True, eq=False)
class Named:
    """A labeler's name and question, and how it is opened; two are equal if they mean the same."""

    spec: str
    asking: Asking
    opening: LoadOptions = field(default_factory=LoadOptions)

    def key(self) -> tuple[str, ...]:
        asking = self.asking
        plan = repr((asking.passes, asking.temperature, asking.longest, asking.seed))
        return self.spec, asking.text(), plan, str(self.opening.device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named) and self.key() == other.key()

    def __hash__(self) -> int:
        return hash(self.key())


LabelJob = tuple[int, Named, int, list[bytes]]
"""Number of the share, labeler, pictures per call, encoded pictures."""


def answer(job: LabelJob) -> tuple[int, list[Answer]]:
    """The answers of one share, with its number."""
    from guardpaint.data.labelling import guarded, unreadable

    share, named, batch, images = job
    labeler = opened(named)
    found: list[Answer] = []
    for start in range(0, len(images), batch):
        pictures = [load_bytes(b, "a picture").convert("RGB") for b in images[start : start + batch]]
        found += guarded(labeler.label, pictures, unreadable)
    return share, found


@lru_cache(maxsize=1)
def opened(named: Named) -> Any:
    """The labeler, loaded once in each process."""
    return open_labeler(named.spec, named.asking, named.opening)
