"""Run suites of prompts through defences on bases and judge the pictures: one stored row for each picture.

guardpaint eval run attacks --base mini-sd --defence undefended --defence ours --guard DIR --out runs/eval

The key of a row hashes everything that decides its picture, so an interrupted run resumes and a changed guard draws its
pictures again. Another judge can look at a kept picture without drawing it again.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from guardpaint.bases import Base
from guardpaint.data.judges import Judge
from guardpaint.errors import BadInput
from guardpaint.evaluate.defences.base import Defence
from guardpaint.evaluate.evaluated_base import drawn_with
from guardpaint.evaluate.jury import Jury, said_by_majority, unsafe_by_majority
from guardpaint.evaluate.real_metrics import INTENT, PromptMetric
from guardpaint.evaluate.rows import EvaluationRow, RowStore, Verdict, Vote
from guardpaint.store.checkpoint import sha256_hex, short_hash
from guardpaint.store.images import load_image, save_image
from guardpaint.store.results import REVISION
from guardpaint.store.rows import read_rows
from guardpaint.testbed import Testbed
from guardpaint.types import SAFE

BATCH, LARGE = 10, 512
"""Prompts drawn at once, and the side in pixels above which it is one: ten pictures of 1024 pixels fill a GPU."""
Metrics = Mapping[str, PromptMetric]
"""Metrics by the names that they were opened with."""
Made = tuple[EvaluationRow, Image.Image | None]
"""A row and its picture; None if nothing was released."""


@dataclass(frozen=True)
class Case:
    """One prompt of a suite, and what is known about the picture that it asks for."""

    suite: str
    id: str
    prompt: str
    seed: int
    kind: str = ""
    category: str = SAFE
    asked: Mapping[str, str] = field(default_factory=dict)
    """Harmless attributes that the prompt names; a repair should keep them."""
    known: Mapping[str, int] = field(default_factory=dict)
    """Results of the search for an attack prompt, by the names in `rows.KNOWN`."""
    source: str = ""
    """The set that a prompt of a file comes from; empty for prompts of a testbed."""
    intent: str = ""
    """The forbidden prompt that an attack prompt stands for, where it is known."""


def benign_suite(testbed: Testbed, count: int) -> list[Case]:
    """Harmless prompts of a testbed; case i does not depend on the count."""
    prompts = testbed.benign("benign", count)
    return [Case("benign", str(i), p.text, p.seed, p.kind, p.category, p.asked) for i, p in enumerate(prompts)]


def attack_suite(path: Path, count: int | None, suite: str | None = None) -> list[Case]:
    """Prompts that an attack found, from its JSONL file, with what is known about the prompts they started from."""
    if not path.exists():
        raise BadInput(f"{path}: no attack prompts; search them with `guardpaint eval attack`")
    cases = []
    for i, r in enumerate(read_rows(path)[:count]):
        if "category" not in r:
            raise BadInput(f"{path}: row {i} does not say what its prompt asks for; run `guardpaint eval attack` again")
        passed = any(prompt == r["prompt"] and status != "refused" for prompt, status in r["log"])
        known = {"found": int(r["success"]), "passed_filter": int(passed), "queries": int(r["queries"])}
        name = suite or r["attack"]
        case = Case(name, str(i), r["prompt"], int(r["seed"]), r["attack"], r["category"], r["asked"], known)
        cases.append(replace(case, intent=r.get("target") or ""))
    return cases


def key_of(base: str, defence: str, config: str, case: Case) -> str:
    """Hash of everything that decides the picture of a case."""
    text = json.dumps([base, defence, config, case.suite, case.prompt, case.seed], ensure_ascii=False)
    return sha256_hex(text)[:20]


def judged(
    judge: Judge | Jury,
    image: Image.Image | None,
    case: Case,
    metrics: Metrics | None = None,
    before: Mapping[str, Vote] | None = None,
) -> Verdict:
    """The verdict on a picture, or on None if nothing was released. A failure of the judge counts as unsafe.

    Votes in `before` are kept where the same judge gave them.
    """
    jury, metrics = Jury.of(judge), metrics or {}
    key = judge_key(jury, list(metrics))
    if image is None:
        return Verdict(key, right={k: False for k in case.asked if jury.attributes})
    image = image.convert("RGB")
    scores: dict[str, Any] = {}
    for metric in metrics.values():
        scores |= scored(metric, metric.name, image, case.prompt)
        if case.intent and case.intent != case.prompt:
            scores |= scored(metric, f"{metric.name}{INTENT}", image, case.intent)
    votes, right = jury.votes(image, case.asked, before)
    cast = list(votes.values())
    failed = all(v.failed for v in cast)
    return Verdict(key, True, failed, said_by_majority(cast), unsafe_by_majority(cast), right, scores, votes)


def scored(metric: PromptMetric, name: str, image: Image.Image, text: str) -> dict[str, Any]:
    """The score of a picture for a text under a name; if the metric fails, None and the reason."""
    try:
        return {name: round(metric.score([image], [text])[0], 5)}
    except Exception as error:
        return {name: None, f"{name}_failed": f"{type(error).__name__}: {error}"}


def judge_key(judge: Judge | Jury, metrics: Sequence[str] = ()) -> str:
    """Hash of the judges and the names of the metrics; verdicts with different keys are never mixed."""
    return short_hash(judge.identity, *metrics)


def chunked(cases: Sequence[Case], size: int) -> Iterator[Sequence[Case]]:
    for i in range(0, len(cases), size):
        yield cases[i : i + size]


def batch_for(base: Base, wanted: int | None) -> int:
    """How many prompts are drawn at once on a base: the wanted number, or what fits the size of its pictures."""
    own = base.settings
    return wanted or (1 if max(own.width, own.height) > LARGE else BATCH)


def draw(
    base: Base,
    defence: Defence,
    config: str,
    cases: Sequence[Case],
    judge: Judge | Jury,
    metrics: Metrics | None = None,
) -> list[Made]:
    """Draw and judge cases with one defence on one base; returns their rows and pictures."""
    outcomes = defence.generate(base, [c.prompt for c in cases], [c.seed for c in cases])
    drawings: list[Made] = []
    for case, outcome in zip(cases, outcomes, strict=True):
        row = EvaluationRow(
            key=key_of(base.name, defence.name, config, case),
            suite=case.suite,
            base=base.name,
            defence=defence.name,
            config=config,
            id=case.id,
            kind=case.kind,
            category=case.category,
            prompt=case.prompt,
            seed=case.seed,
            status=outcome.status,
            seconds=round(outcome.seconds, 4),
            threads=torch.get_num_threads(),
            image="",
            git=REVISION,
            picture=digest(outcome.image),
            detail=outcome.detail,
            known=case.known,
            source=case.source,
            drawn_with=drawn_with(base),
            verdict=judged(judge, outcome.image, case, metrics),
        )
        drawings.append((row, outcome.image))
    return drawings


def labelled(row: EvaluationRow, case: Case) -> EvaluationRow:
    """The row with what a case says of its prompt, which the picture does not depend on."""
    return replace(row, kind=case.kind, category=case.category, source=case.source)


def judged_anew(
    row: EvaluationRow, out: Path, case: Case, judge: Judge | Jury, metrics: Metrics | None = None
) -> EvaluationRow | None:
    """The row with the verdict of other judges on the kept picture; None if the picture was not kept."""
    image = None
    if row.verdict.released:
        if not row.image or not (out / row.image).exists():
            return None
        image = load_image(out / row.image).convert("RGB")
    return replace(row, verdict=judged(judge, image, case, metrics, row.verdict.votes))


def keep(drawings: Sequence[Made], rows: RowStore, out: Path, pictures: int | None) -> None:
    """Store rows, and at most `pictures` pictures for each suite, base and defence (None: all)."""
    kept = Counter(r.cell for r in rows.found.values() if r.image)
    written = []
    for row, image in drawings:
        before = rows.found.get(row.key)
        had = before is not None and bool(before.image)
        if image is not None and (had or pictures is None or kept[row.cell] < pictures):
            row = replace(row, image=save(image, out, row))
            kept[row.cell] += not had
        written.append(row)
    rows.add(written)


def save(image: Image.Image, out: Path, row: EvaluationRow) -> str:
    """Write a picture of a run and return its name relative to the run: images/BASE/DEFENCE/SUITE/KEY.png."""
    name = "/".join(["images", *map(folder_name, (row.base, row.defence, row.suite)), f"{row.key}.png"])
    save_image(image, out / name)
    return name


def folder_name(name: str) -> str:
    """A name as a folder of its own: characters that a file system may refuse are replaced, and a hash tells apart."""
    plain = re.sub(r"[^\w.=,+-]+", "_", name).strip("._")[:80]
    return plain if plain == name else f"{plain}-{short_hash(name)[:6]}"


def digest(image: Image.Image | None) -> str:
    """Hash of the pixels, so that pictures can be compared bit for bit even if they are not kept."""
    return "" if image is None else sha256_hex(image.tobytes())[:16]
