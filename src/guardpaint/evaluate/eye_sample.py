"""The blind sample of a run's pictures that people label: which ones, and bound to which pixels.

guardpaint eval label RUN --labeller ann

The sample is stratified by base, defence, the judge's answer and the picture's status. RUN/labels holds `sample.json`
and `labels.jsonl`; a label's key is the digest of the picture's pixels, so it never passes to another picture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL import Image

from guardpaint.data.hand_labels import HandLabel
from guardpaint.data.label_page import Item
from guardpaint.errors import BadInput
from guardpaint.evaluate.rows import EvaluationRow
from guardpaint.evaluate.run import digest
from guardpaint.store.checkpoint import read_json, sha256_hex, short_hash, write_json
from guardpaint.store.images import load_image

FOLDER = "labels"
LEAST = 3
"""A stratum gives at least this many pictures, if it has them."""
FAILED = "failed"
"""The answer of a judge that gave none."""

Stratum = tuple[str, str, str, str]
"""Base, defence, the judge's answer, status."""


def answer_of(row: EvaluationRow) -> str:
    """What the judge said of a released picture: safe, unsafe, or failed."""
    return FAILED if row.verdict.failed else "unsafe" if row.verdict.unsafe else "safe"


def stratum_of(row: EvaluationRow) -> Stratum:
    return row.base, row.defence, answer_of(row), row.status


def strata(rows: Sequence[EvaluationRow]) -> dict[Stratum, list[EvaluationRow]]:
    """Released pictures by stratum, each in an order that is random, but the same for every run of the command."""
    found: dict[Stratum, list[EvaluationRow]] = {}
    for row in rows:
        if row.verdict.released:
            found.setdefault(stratum_of(row), []).append(row)
    return {k: found[k] for k in sorted(found)}


def shares_of(sizes: Sequence[int], n: int, least: int = LEAST) -> list[int]:
    """How many of n pictures each stratum gives: `least` of each, then in proportion to the sizes (Sainte-Laguë).

    Sizes 90, 9, 1 and n = 13, least 3: 3, 3, 1 first; the remaining 6 all go to the first, whose 90/(2·8 + 1) is still
    more than the second's 9/(2·3 + 1).
    """
    counts = [0] * len(sizes)
    for _ in range(min(n, sum(sizes))):
        open_ones = [i for i, size in enumerate(sizes) if counts[i] < size]
        poor = [i for i in open_ones if counts[i] < least]
        if poor:
            best = min(poor, key=lambda i: (counts[i], -sizes[i]))
        else:
            best = max(open_ones, key=lambda i: sizes[i] / (2 * counts[i] + 1))
        counts[best] += 1
    return counts


@dataclass(frozen=True)
class Sample:
    """The pictures that were drawn for labelling."""

    seed: int
    n: int
    population: str
    """Hash of the rows that it was drawn from: their keys, pictures, answers and statuses."""
    keys: tuple[str, ...]
    """Keys of the rows that were drawn."""
    closed: Mapping[str, str] = field(default_factory=dict)
    """Labellers who have seen the judge's answers, with the hash of their labels at that time."""

    @classmethod
    def of(cls, rows: Sequence[EvaluationRow], n: int, seed: int = 0) -> Sample:
        """Draw a sample of the kept pictures; the same rows, number and seed give the same one."""
        kept = strata([r for r in rows if r.image])
        if not kept:
            raise BadInput("the run kept no pictures to label")
        counts = shares_of([len(own) for own in kept.values()], n)
        keys = []
        for own, count in zip(kept.values(), counts, strict=True):
            keys += sorted((r.key for r in own), key=lambda key: sha256_hex(f"{seed} {key}"))[:count]
        return cls(seed, n, population_of(rows), tuple(keys))

    def save(self, run: Path) -> None:
        write_json(sample_file(run), {**asdict(self), "keys": list(self.keys)})


def population_of(rows: Sequence[EvaluationRow]) -> str:
    """Hash of everything that the strata depend on."""
    return short_hash(sorted([r.key, r.picture, answer_of(r), r.status, bool(r.image)] for r in rows))


def sample_file(run: Path) -> Path:
    return run / FOLDER / "sample.json"


def labels_file(run: Path) -> Path:
    return run / FOLDER / "labels.jsonl"


def read_sample(run: Path) -> Sample | None:
    """The sample of a run; None if none was drawn."""
    if not sample_file(run).exists():
        return None
    try:
        values = read_json(sample_file(run))
        return Sample(**{**values, "keys": tuple(values["keys"])})
    except (TypeError, KeyError) as error:
        raise BadInput(f"{sample_file(run)}: not a sample ({error}); remove it to draw another") from error


def sample_of(run: Path, rows: Sequence[EvaluationRow], n: int | None, seed: int = 0) -> Sample:
    """The run's sample, drawn now if there is none, if more pictures are asked for, or if the run has other rows.

    Labels are kept in every case: they belong to pictures, not to samples.
    """
    found = read_sample(run)
    if found is not None and found.population == population_of(rows) and (n is None or n == found.n):
        return found
    fresh = Sample.of(rows, n or (found.n if found else 200), seed if found is None else found.seed)
    fresh = fresh if found is None else replace(fresh, closed=found.closed)
    fresh.save(run)
    return fresh


def items_of(sample: Sample, run: Path, rows: Sequence[EvaluationRow]) -> list[Item]:
    """The pictures to label, each once however many rows have it; the page learns nothing else of a row."""
    chosen = set(sample.keys)
    return [
        Item(picture, picture_loader(run / row.image, picture))
        for picture, row in {r.picture: r for r in rows if r.key in chosen}.items()
    ]


def picture_loader(file: Path, picture: str) -> Callable[[], Image.Image]:
    """Loads a picture; raises BadInput if its pixels are not those that the row was judged by."""

    def load() -> Image.Image:
        image = load_image(file)
        if digest(image) != picture:
            raise BadInput(f"{file}: other pixels than when it was judged; run the suite again to draw it")
        return image

    return load


def close(run: Path, sample: Sample, labeller: str, labels: Sequence[HandLabel]) -> Sample:
    """The sample with this labeller closed: the judge's answers may be shown, and no further label counts."""
    closed = replace(sample, closed={**sample.closed, labeller: labels_hash(labeller, labels)})
    closed.save(run)
    return closed


def labels_hash(labeller: str, labels: Sequence[HandLabel]) -> str:
    """Hash of what a labeller said."""
    said: list[Any] = sorted([x.key, x.label] for x in labels if x.labeller == labeller and not x.settled)
    return short_hash(said)


def check_closed(run: Path, sample: Sample, labels: Sequence[HandLabel]) -> None:
    """Raise BadInput if a labeller changed labels after seeing the judge's answers."""
    for name, said in sample.closed.items():
        if labels_hash(name, labels) != said:
            raise BadInput(f"{labels_file(run)}: labels of {name} were changed after the judge's answers were shown")
