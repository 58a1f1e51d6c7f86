"""Label and caption a corpus, and calibrate the decision thresholds.

guardpaint data label corpora/paper --labeler vlm:OpenGVLab/InternVL3_5-8B-HF
guardpaint data calibrate corpora/paper --reference reference.csv
"""

from __future__ import annotations

import csv
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from guardpaint.data import hand_labels
from guardpaint.data.hand_labels import categories_of
from guardpaint.data.known_labels import KnownLabels
from guardpaint.data.labelers import Captioner, Labeler
from guardpaint.data.questions import Answer
from guardpaint.data.store import Corpus, Example
from guardpaint.errors import BadInput
from guardpaint.policy import Policy
from guardpaint.store.checkpoint import sha256_hex
from guardpaint.store.progress import bar
from guardpaint.types import SAFE

CAPTIONS = "captions.jsonl"
T = TypeVar("T")


def label_file(labeler: str, question: str) -> str:
    """Name of the labels file of one labeler and question: a changed policy or style starts a new file."""
    return f"labels-{re.sub(r'[^A-Za-z0-9.]+', '-', labeler).strip('-')}-{sha256_hex(question)[:8]}.jsonl"


def label(  # noqa: PLR0913 (what is asked, of whom, and about which images)
    corpus: Corpus,
    labeler: Labeler | KnownLabels,
    question: str,
    batch: int = 8,
    retry: bool = False,
    quiet: bool = False,
    *,
    keys: set[str] | None = None,
    name: str | None = None,
) -> str:
    """Label every image that has no answer yet, and with `retry` those whose answer could not be read.

    With `keys` only these images. `name` stands for the labeler's own in the labels file's name, which is returned.
    """
    name = label_file(name or labeler.name, question)
    rows = {r["key"]: r for r in corpus.lines(name)}
    answered = {k for k, r in rows.items() if not (retry and r["scores"] is None)}
    if keys is not None:
        answered |= corpus.keys() - keys

    def ask(examples: Sequence[Example]) -> list[dict[str, Any]]:
        start = time.perf_counter()
        if isinstance(labeler, KnownLabels):
            answers = labeler.read(examples)
        else:
            answers = guarded(labeler.label, [e.picture() for e in examples], unreadable)
        seconds = round((time.perf_counter() - start) / len(examples), 4)
        rows = [{"scores": a.scores, "problem": a.problem, "spread": a.spread, "raw": a.raw[:2000]} for a in answers]
        return [{"key": e.key, **row, "seconds": seconds} for e, row in zip(examples, rows, strict=True)]

    work(corpus, name, answered, ask, batch, f"labels by {labeler.name}", quiet)
    return name


def guarded(
    call: Callable[[Sequence[Any]], Sequence[T]], pictures: Sequence[Any], fallback: Callable[[Exception], T]
) -> list[T]:
    """Answers for a batch. If the model raises, or loses an answer, each picture is asked about alone; one that still
    fails gets the fallback."""
    try:
        answers = list(call(pictures))
        if len(answers) != len(pictures):
            raise ValueError(f"{len(answers)} answers for {len(pictures)} pictures")
        return answers
    except Exception as error:
        if len(pictures) == 1:
            return [fallback(error)]
        return [a for p in pictures for a in guarded(call, [p], fallback)]


def unreadable(error: Exception) -> Answer:
    """The answer for a picture that makes a labeler fail."""
    return Answer(None, "", f"{type(error).__name__}: {error}")


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many pictures have an answer, how many of these cannot be read, and why. A picture's last row counts."""
    last = list({r["key"]: r for r in rows}.values())
    problems = Counter(re.sub(r"\d+", "…", r["problem"])[:80] for r in last if r["scores"] is None)
    text = f"{len(last)} answers, {problems.total()} unreadable"
    if problems:
        why = "; ".join(f"{n} × {problem or 'no reason given'}" for problem, n in problems.most_common(3))
        more = f"; {len(problems) - 3} other reasons" if len(problems) > 3 else ""
        text += (
            f" ({problems.total() / len(last):.1%}: {why}{more}); they are never taken for safe and stay out of the "
            "dataset; ask again with --retry"
        )
    return text


def caption(corpus: Corpus, captioner: Captioner, batch: int = 8, quiet: bool = False) -> None:
    """Write captions, to serve as prompts, for the images that have no prompt. Those that failed are tried again."""
    rows = {r["key"]: r for r in corpus.lines(CAPTIONS)}
    answered = {k for k, r in rows.items() if not r.get("problem")} | {e.key for e in corpus if e.prompt is not None}

    def ask(examples: Sequence[Example]) -> list[dict[str, Any]]:
        found = guarded(
            spoken, [e.picture() for e in examples], lambda error: (None, f"{type(error).__name__}: {error}")
        )
        return [{"key": e.key, "prompt": t, "problem": p} for e, (t, p) in zip(examples, found, strict=True)]

    def spoken(pictures: Sequence[Any]) -> list[tuple[str | None, str]]:
        return [(text, "") for text in captioner.caption(pictures)]

    work(corpus, CAPTIONS, answered, ask, batch, "captions", quiet)


def work(
    corpus: Corpus,
    name: str,
    answered: set[str],
    ask: Callable[[Sequence[Example]], list[dict[str, Any]]],
    batch: int,
    title: str,
    quiet: bool,
) -> None:
    """Ask about every image that has no answer yet, in batches; each batch is written before the next one starts."""
    with bar(title, len(corpus.keys()), quiet, len(answered)) as advance:
        for examples in batches((e for e in corpus if e.key not in answered), batch):
            corpus.append(name, ask(examples))
            advance(len(examples))


def batches(items: Iterable[Example], size: int) -> Iterator[list[Example]]:
    """The items in lists of `size`; the last list may be shorter."""
    batch: list[Example] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


@dataclass(frozen=True)
class Thresholds:
    """The score from which an image shows each harm; scores closer than `margin` to it lie in the dead zone."""

    harms: Mapping[str, float]
    margin: float = 0.1

    def decide(self, scores: Mapping[str, float] | None) -> str | None:
        """The category; None if the scores are unreadable or one lies in the dead zone."""
        if scores is None:
            return None
        over = {n: scores[n] - t for n, t in self.harms.items()}
        if any(abs(gap) < self.margin for gap in over.values()):
            return None
        hits = [n for n, gap in over.items() if gap >= 0]
        return max(hits, key=lambda n: scores[n]) if hits else "safe"

    def every(self, scores: Mapping[str, float] | None) -> list[str] | None:
        """All harms that the image shows, none if it is safe; None if `decide` cannot decide."""
        if scores is None or self.decide(scores) is None:
            return None
        return [n for n, t in self.harms.items() if scores[n] >= t]


def read_reference(path: Path, policy: Policy) -> dict[str, dict[str, str]]:
    """Hand labels by key: label (several categories joined by +) and case, the kind of hard case.

    They come from a CSV with the columns key, label and, optionally, case, or from the JSONL file that
    `guardpaint data hand-label` writes; of the latter, those count on which its labellers agree or that were settled.
    """
    if path.suffix == ".jsonl":
        out = hand_labels.reference(hand_labels.read_labels(path, policy))
        if not out:
            raise BadInput(
                f"{path}: no picture has a label on which its labellers agree; see `guardpaint data agreement`"
            )
        return out
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from error
    out = {}
    for number, row in enumerate(rows, 2):
        labels = categories_of(row.get("label") or "")
        if not row.get("key") or not set(labels) <= set(policy.names) or (SAFE in labels and len(labels) > 1):
            raise BadInput(f"{path}:{number}: needs a key and a label among {', '.join(policy.names)}; got {row}")
        out[row["key"]] = {"label": hand_labels.joined_label(labels, policy), "case": row.get("case") or "other"}
    if not out:
        raise BadInput(f"{path}: no rows; add hand labels with the columns key and label")
    return out


def calibrate(
    answers: Mapping[str, Mapping[str, float] | None],
    reference: Mapping[str, Mapping[str, str]],
    policy: Policy,
    miss_cost: float = 1.0,
    margin: float = 0.1,
) -> Thresholds:
    """For each harm, the threshold that minimises false alarms + miss_cost · misses on the reference.

    Candidates lie midway between neighbouring scores. If several have the same cost, the middle one is taken.
    """
    harms = {}
    for harm in policy.names[1:]:
        pairs = [
            (s[harm], harm in categories_of(reference[k]["label"]))
            for k, s in answers.items()
            if s is not None and k in reference
        ]
        if not any(y for _, y in pairs) or all(y for _, y in pairs):
            raise BadInput(
                f"reference for {harm}: needs readable answers for images with and without it; it has "
                f"{sum(y for _, y in pairs)} with and {sum(not y for _, y in pairs)} without; add hand labels"
            )
        values = sorted({0.0, 1.0, *(s for s, _ in pairs)})
        cuts = [(a + b) / 2 for a, b in pairwise(values)]
        costs = [
            sum((s >= c) and not y for s, y in pairs) + miss_cost * sum((s < c) and y for s, y in pairs) for c in cuts
        ]
        best = [c for c, cost in zip(cuts, costs, strict=True) if cost == min(costs)]
        harms[harm] = best[len(best) // 2]
    return Thresholds(harms, margin)
