"""Label and caption a corpus, calibrate the decision thresholds, and compare labelers.

guardpaint data label corpora/paper --labeler vlm:OpenGVLab/InternVL3_5-8B-HF
guardpaint data calibrate corpora/paper --reference reference.csv
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from guardpaint.data.known_labels import KnownLabels
from guardpaint.data.labelers import Captioner, Labeler
from guardpaint.data.questions import Answer
from guardpaint.data.store import Corpus, Example
from guardpaint.errors import BadInput
from guardpaint.policy import Policy
from guardpaint.store.checkpoint import sha256_hex
from guardpaint.store.progress import bar

CAPTIONS = "captions.jsonl"
T = TypeVar("T")


def label_file(labeler: str, question: str) -> str:
    """Name of the labels file of one labeler and question: a changed policy or style starts a new file."""
    return f"labels-{re.sub(r'[^A-Za-z0-9.]+', '-', labeler).strip('-')}-{sha256_hex(question)[:8]}.jsonl"


def label(
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

    With `keys` only these images. `name` stands for the labeler's own in the name of the labels file, which is returned.
    """
    name = label_file(name or labeler.name, question)
    rows = {r["key"]: r for r in corpus.lines(name)}
    answered = {k for k, r in rows.items() if not (retry and r["scores"] is None)}
    if keys is not None:
        answered |= corpus.keys() - keys

    def ask(examples: Sequence[Example]) -> list[dict[str, Any]]:
        if isinstance(labeler, KnownLabels):
            answers = labeler.read(examples)
        else:
            answers = guarded(labeler.label, [e.picture() for e in examples], unreadable)
        return [
            {"key": e.key, "scores": a.scores, "problem": a.problem, "spread": a.spread, "raw": a.raw[:2000]}
            for e, a in zip(examples, answers, strict=True)
        ]

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
        hits = [n for n, gap in over.items() if gap > 0]
        return max(hits, key=lambda n: scores[n]) if hits else "safe"

    def every(self, scores: Mapping[str, float] | None) -> list[str] | None:
        """All harms that the image shows, none if it is safe; None if `decide` cannot decide."""
        if scores is None or self.decide(scores) is None:
            return None
        return [n for n, t in self.harms.items() if scores[n] >= t]


def read_reference(path: Path, policy: Policy) -> dict[str, dict[str, str]]:
    """Hand labels by key, from a CSV with the columns key, label and, optionally, case (the kind of hard case)."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from error
    out = {}
    for number, row in enumerate(rows, 2):
        if not row.get("key") or row.get("label") not in policy.names:
            raise BadInput(f"{path}:{number}: needs a key and a label among {', '.join(policy.names)}; got {row}")
        out[row["key"]] = {"label": row["label"], "case": row.get("case") or "other"}
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
            (s[harm], reference[k]["label"] == harm) for k, s in answers.items() if s is not None and k in reference
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


def compare(
    labelers: Mapping[str, Mapping[str, Mapping[str, Any]]],
    reference: Mapping[str, Mapping[str, str]],
    policy: Policy,
    miss_cost: float = 1.0,
) -> list[dict[str, Any]]:
    """One row per labeler at its own thresholds: error rates overall and by hard case, and counts of unreadable and
    self-contradicting answers."""
    rows = []
    for name, lines in labelers.items():
        answers = {k: v for k, v in lines.items() if k in reference}
        scores = {k: v["scores"] for k, v in answers.items()}
        row: dict[str, Any] = {"labeler": name, "n": len(answers), "missing": len(reference) - len(answers)}
        row["unreadable"] = sum(s is None for s in scores.values())
        row["contradictions"] = sum("but scores" in v.get("problem", "") for v in answers.values())
        try:
            thresholds = calibrate(scores, reference, policy, miss_cost, margin=0.0)
        except BadInput as error:
            rows.append({**row, "failed": str(error)})
            continue
        decided = {k: thresholds.decide(s) for k, s in scores.items()}
        safe = [k for k in answers if reference[k]["label"] == "safe"]
        harm = [k for k in answers if reference[k]["label"] != "safe"]
        row["fp"] = sum(decided[k] not in ("safe", None) for k in safe) / max(1, len(safe))
        row["fn"] = sum(decided[k] in ("safe", None) for k in harm) / max(1, len(harm))
        near = {h: (t - 0.05, t + 0.05) for h, t in thresholds.harms.items()}
        row["threshold_sensitivity"] = sum(
            any(low <= s[h] <= high for h, (low, high) in near.items()) for s in scores.values() if s is not None
        ) / max(1, len(answers))
        for case in dict.fromkeys(r["case"] for r in reference.values()):
            keys = [k for k in answers if reference[k]["case"] == case]
            row[f"wrong_{case}"] = sum((decided[k] or "unreadable") != reference[k]["label"] for k in keys) / max(
                1, len(keys)
            )
        rows.append(row)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A comparison as a Markdown table, with each labeler's failure modes in words."""
    cases = [k for k in dict.fromkeys(k for r in rows for k in r) if k.startswith("wrong_")]
    heads = ["labeler", "n", "FP", "FN", "unreadable", "contradictions", *(c.removeprefix("wrong_") for c in cases)]
    lines = ["| " + " | ".join([*heads, "failure modes"]) + " |", "|" + "---|" * (len(heads) + 1)]
    for r in rows:
        if "failed" in r:
            lines.append(f"| {r['labeler']} | {r['n']} |" + " |" * (len(heads) - 2) + f" {r['failed']} |")
            continue
        cells = [r["labeler"], r["n"], f"{r['fp']:.2f}", f"{r['fn']:.2f}", r["unreadable"], r["contradictions"]]
        cells += [f"{r[c]:.2f}" for c in cases]
        lines.append("| " + " | ".join([*map(str, cells), failure_modes(r, cases)]) + " |")
    return "\n".join(lines) + "\n"


def failure_modes(row: Mapping[str, Any], cases: Sequence[str]) -> str:
    """The failure modes that a row's numbers show, joined by semicolons."""
    modes = []
    if row["fp"] > 0.2:
        modes.append("flags safe images")
    if row["fn"] > 0.2:
        modes.append("misses unsafe images")
    if row["unreadable"] > 0.05 * max(1, row["n"]):
        modes.append("gives unreadable answers")
    if row["contradictions"] > 0.05 * max(1, row["n"]):
        modes.append("contradicts its own reasoning")
    if row["threshold_sensitivity"] > 0.25:
        modes.append("a small shift of the threshold changes many labels")
    worst = max(cases, key=lambda c: row[c], default=None)
    if worst is not None and row[worst] > 0.25:
        modes.append(f"worst on {worst.removeprefix('wrong_')}")
    return "; ".join(modes) or "none above the limits"
