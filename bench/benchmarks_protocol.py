"""The protocol command from prompt files to table, on small random bases in folders: protocol.stages_ok.

What such bases draw means nothing. A stage counts if the files that the command wrote show that it did its work.
"""

from __future__ import annotations

import csv
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks_results import Measured

from guardpaint.bases import BaseOptions
from guardpaint.evaluate import gather
from guardpaint.evaluate.protocols import command
from guardpaint.store.checkpoint import read_json
from guardpaint.store.results import metric
from guardpaint.testing.hub_layouts import build

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from protocols import BASES, write_bases, write_files, write_guard

PROMPTS = 2
CLASSIFIER = "Falconsai/nsfw_image_detection"


def measure() -> Measured:
    """One row for each stage: whether it did its work, and what was found."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [{"stage": name, "ok": int(ok), "found": found} for name, ok, found in stages(Path(folder))]
    done, total = sum(int(r["ok"]) for r in rows), len(rows)
    note = (
        "files, plan, drawing, settings, judging, pictures, table, page, resumed; small random bases of five families"
    )
    return Measured({"protocol.stages_ok": metric(done, total, goal=f">={total}", note=note)}, rows)


def stages(root: Path) -> Iterator[tuple[str, bool, str]]:
    """Run the command once for the plan, once for everything, and once again; yields what each stage left."""
    bases = write_bases(root / "hub")
    sd15, out = bases[0].partition("=")[2], root / "run"
    judges = (f"stock:{sd15}", f"classifier:{build(CLASSIFIER, root / 'hub')}#normal=safe,nsfw=nudity")
    asked = command.ProtocolOptions(
        "jailbreakdiffbench", write_files(root / "data", PROMPTS), bases, out, guard=str(write_guard(root / "guard")),
        judges=judges, inpainter=sd15, opening=BaseOptions(steps=4, size=64),
    )  # fmt: skip
    planned = list(command.run(asked, plan_only=True))
    attacks = [line for line in planned if f"({PROMPTS} harmful)" in line]
    yield "files", len(attacks) == len(asked.protocol.attacks), f"{len(attacks)} attacks with a file"
    counts = next(line for line in planned if line.startswith("in all "))
    yield "plan", all(f"{name}: 4 steps" in "\n".join(planned) for name in BASES), counts
    began = time.perf_counter()
    said = list(command.run(asked))
    took = time.perf_counter() - began
    rows = gather.read_run(out)
    wanted = int(counts.split()[2])
    yield "drawing", len(rows) == wanted > 0, f"{len(rows)} of {wanted} pictures in {took:.0f} s"
    yield "settings", all(r.drawn_with.startswith("4 steps") for r in rows), " | ".join({r.drawn_with for r in rows})
    judged = [r for r in rows if len(r.verdict.votes) == len(asked.judges) or not r.verdict.released]
    failed = sum(r.verdict.failed for r in rows)
    yield "judging", len(judged) == len(rows) and not failed, f"{len(judged)} with all votes, {failed} failures"
    kept = {Path(r.image).parts[1:4] for r in rows if r.image and (out / r.image).is_file()}
    yield "pictures", kept == {(r.base, r.defence, r.suite) for r in rows if r.verdict.released}, f"{len(kept)} folders"
    yield "table", *tabled(out, asked)
    page = (out / "protocol.html").read_text(encoding="utf-8")
    yield "page", "<img" in page and "own safety checker is off" in page, f"{len(page) // 1024} KiB"
    again = next(line for line in command.run(asked) if " new of " in line)
    yield "resumed", again.endswith(f": 0 new of {wanted}"), again.rpartition("/")[2]
    assert said


def tabled(out: Path, asked: command.ProtocolOptions) -> tuple[bool, str]:
    """Whether Markdown, CSV and JSON have every cell of the guard's table, and the same numbers."""
    cells: list[dict[str, Any]] = list(csv.DictReader((out / "table.csv").read_text().splitlines()))
    ours = [c for c in cells if c["defence"] == "ours" and not c["judge"]]
    metrics = read_json(out / "table.json")["metrics"]
    same = all(metrics[f"{c['attack']}.{c['base']}.ours"]["value"] == float(c["defended"]) for c in ours)
    text = (out / "table.md").read_text().split("## ours")[1].split("##")[0]
    full = len(ours) == len(asked.protocol.attacks) * len(asked.bases) and "| – |" not in text
    return full and same, f"{len(ours)} cells of ours, {len(cells)} in all"
