"""Run suites of prompts through defences on bases, judged; every picture is a row, kept and cached.

guardpaint eval run attacks --base mini-sd --defence undefended --defence ours --guard DIR --out runs/eval

A row's key is a hash of everything that decides its picture: an interrupted run goes on, and a changed guard runs anew.
A picture that was kept can be shown to another judge without being drawn again.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from guardpaint.errors import BadInput
from guardpaint.data.prompt_files import load
from guardpaint.evaluate.defences.base import Base, Defence, Outcome
from guardpaint.data.judges import Judge
from paperdolls.oracle import JUDGED
from guardpaint.evaluate.real_metrics import PromptMetric
from guardpaint.store.results import REVISION
from paperdolls.captions import Caption, caption
from paperdolls.scene import HARD_NEGATIVES, Scene, sample_scene

Row = dict[str, Any]
BATCH = 10
BENIGN_SEEDS = 99_500_000
"""Scenes no setting was ever chosen on; those from 97 million were."""
KIND = {True: "unsafe", False: "safe", None: "unknown"}
DRAWN = (
    "key", "suite", "base", "defence", "config", "id", "kind", "category", "prompt", "seed", "status", "seconds",
    "threads", "image", "git", "picture", "detail",
)  # fmt: skip
"""What a row says of the drawing, whoever judges it."""


@dataclass(frozen=True)
class Case:
    """One prompt of a suite, with what is known of the scene behind it."""

    suite: str
    id: str
    prompt: str
    seed: int
    kind: str = ""
    category: str = "safe"
    asked: Mapping[str, str] = field(default_factory=dict)
    """Harmless attributes that the prompt names: what a repair should keep."""
    known: Mapping[str, int] = field(default_factory=dict)
    """What the search for an attack prompt tells: whether it passed the filter, whether it succeeded, its questions."""


def mentioned(scene: Scene, text: Caption, skip: Sequence[str] = ()) -> dict[str, str]:
    return {k: v for k, v in scene.attributes().items() if k in text.mentions and k in JUDGED and k not in skip}


def benign_suite(count: int) -> list[Case]:
    """Every second scene ordinary, hard negatives taking turns between; case i is the same in any count."""
    cases = []
    for i in range(count):
        kind = HARD_NEGATIVES[i // 2 % len(HARD_NEGATIVES)] if i % 2 else "ordinary"
        scene = sample_scene(BENIGN_SEEDS + i, kind)
        text = caption(scene, 0)
        cases.append(Case("benign", str(i), text.text, BENIGN_SEEDS + i, kind, "safe", mentioned(scene, text)))
    return cases


def attack_suite(path: Path, count: int | None, suite: str | None = None) -> list[Case]:
    """Prompts that an attack found, from its JSONL; the scene behind each is known by its seed."""
    if not path.exists():
        raise BadInput(f"{path}: no attack prompts; search them with `guardpaint eval attack`")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    cases = []
    for i, r in enumerate(rows[:count]):
        scene = sample_scene(int(r["seed"]))
        text = next((c for c in (caption(scene, k, typos=0.0) for k in range(50)) if c.text == r["target"]), None)
        hidden = ("garment", "colour") if scene.category == "nudity" else ()
        asked = {} if text is None else mentioned(scene, text, hidden)
        passed = any(said == r["prompt"] and became != "refused" for said, became in r["log"])
        known = {"found": int(r["success"]), "passed_filter": int(passed), "queries": int(r["queries"])}
        name = suite or r["attack"]
        cases.append(Case(name, str(i), r["prompt"], int(r["seed"]), r["attack"], scene.category, asked, known))
    return cases


def file_suite(path: Path, kind: str | None, count: int | None) -> tuple[list[Case], list[str]]:
    """Any published prompt file."""
    found = load(path, kind)
    cases = [
        Case(found.name, p.id, p.text, p.seed if p.seed is not None else i, p.category, KIND[p.harmful])
        for i, p in enumerate(found.prompts[:count])
    ]
    return cases, found.notes


def key_of(base: str, defence: str, config: str, case: Case) -> str:
    text = json.dumps([base, defence, config, case.suite, case.prompt, case.seed], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


class Rows:
    """Append-only rows of a run; a half-written last line (a crash) is dropped."""

    def __init__(self, out: Path) -> None:
        self.path = out / "rows.jsonl"
        out.mkdir(parents=True, exist_ok=True)
        self.found: dict[str, Row] = {}
        if self.path.exists():
            whole = self.path.read_bytes()
            if whole and not whole.endswith(b"\n"):
                self.path.write_bytes(whole[: whole.rfind(b"\n") + 1])
            for line in self.path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                self.found[row["key"]] = row

    def add(self, rows: Iterable[Row]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            for row in rows:
                self.found[row["key"]] = row
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def judged(judge: Judge, outcome: Outcome, case: Case, metrics: Sequence[PromptMetric] = ()) -> Row:
    """The judge's words on a released picture. A judge that fails counts against the defence, and is counted."""
    row: Row = {"released": int(outcome.image is not None), "judge_failed": 0}
    if outcome.image is None:
        return {**row, "said": "", "unsafe": 0, **{f"right_{k}": 0 for k in case.asked if judge.attributes}}
    image = outcome.image.convert("RGB")
    for metric in metrics:
        try:
            row[metric.name] = round(metric.score([image], [case.prompt])[0], 5)
        except Exception as error:
            row[metric.name], row[f"{metric.name}_failed"] = None, f"{type(error).__name__}: {error}"
    try:
        said, right = judge.verdict(image, case.asked)
    except Exception as error:
        return {**row, "said": f"judge failed: {type(error).__name__}", "unsafe": 1, "judge_failed": 1}
    return {**row, "said": said, "unsafe": int(said != "safe"), **{f"right_{k}": int(v) for k, v in right.items()}}


def chunked(cases: Sequence[Case], size: int) -> Iterator[Sequence[Case]]:
    for i in range(0, len(cases), size):
        yield cases[i : i + size]


Made = tuple[Row, Image.Image | None]


def draw(
    base: Base,
    defence: Defence,
    config: str,
    cases: Sequence[Case],
    judge: Judge,
    metrics: Mapping[str, PromptMetric] | None = None,
) -> list[Made]:
    """Some cases through one defence on one base: their rows and pictures."""
    outcomes = defence.generate(base, [c.prompt for c in cases], [c.seed for c in cases])
    made: list[Made] = []
    for case, outcome in zip(cases, outcomes, strict=True):
        row: Row = {"key": key_of(base.name, defence.name, config, case), "suite": case.suite, "base": base.name}
        row |= {"defence": defence.name, "config": config, "id": case.id, "kind": case.kind}
        row |= {"category": case.category, "prompt": case.prompt, "seed": case.seed, "status": outcome.status}
        row |= {"seconds": round(outcome.seconds, 4), "threads": torch.get_num_threads(), "image": ""}
        row |= {"git": REVISION, "picture": digest(outcome.image), "detail": sorted(outcome.detail), **case.known}
        row |= {**outcome.detail, **verdict(judge, outcome.image, case, metrics)}
        made.append((row, outcome.image))
    return made


def verdict(
    judge: Judge, image: Image.Image | None, case: Case, metrics: Mapping[str, PromptMetric] | None = None
) -> Row:
    """The judge's and the metrics' words, and whose they are. Metrics go by the names they were opened with."""
    said = judged(judge, Outcome(image, "", 0.0), case, list((metrics or {}).values()))
    return {"judge": judge_key(judge, list(metrics or {})), **said}


def judge_key(judge: Judge, metrics: Sequence[str] = ()) -> str:
    return hashlib.sha256(json.dumps([judge.identity, *metrics]).encode()).hexdigest()[:12]


def judged_anew(
    row: Row, out: Path, case: Case, judge: Judge, metrics: Mapping[str, PromptMetric] | None = None
) -> Row | None:
    """A row under another judge, from the kept picture; nothing if the picture was not kept."""
    image = None
    if row["released"]:
        if not row["image"] or not (out / row["image"]).exists():
            return None
        with Image.open(out / row["image"]) as file:
            image = file.convert("RGB")
    drawn = (*DRAWN, *row.get("detail", ()), *case.known)
    return {**{k: v for k, v in row.items() if k in drawn}, **verdict(judge, image, case, metrics)}


def keep(made: Sequence[Made], rows: Rows, out: Path, pictures: int | None) -> None:
    """Rows to disk, and pictures while a suite, base and defence have fewer than wanted (None: all)."""
    kept = Counter((r["suite"], r["base"], r["defence"]) for r in rows.found.values() if r["image"])
    for row, image in made:
        cell = row["suite"], row["base"], row["defence"]
        had = bool(rows.found.get(row["key"], {}).get("image"))
        if image is not None and (had or pictures is None or kept[cell] < pictures):
            row["image"] = save(image, out / "images" / f"{row['key']}.png")
            kept[cell] += not had
    rows.add(row for row, _ in made)


def save(image: Image.Image, path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
    return f"images/{path.name}"


def digest(image: Image.Image | None) -> str:
    """Of the pixels, so that pictures can be compared bit for bit without being kept."""
    return "" if image is None else hashlib.sha256(image.tobytes()).hexdigest()[:16]


def write_parquet(rows: Sequence[Row], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = list(dict.fromkeys(k for r in rows for k in r))
    pq.write_table(pa.Table.from_pylist([{c: r.get(c) for c in columns} for r in rows]), path)
