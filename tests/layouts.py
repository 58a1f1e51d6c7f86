"""Files in the layouts of published prompt sets, made of invented rows, and what is read wrong in them.

`tests/data/layouts.json` describes the layouts. It holds no published prompt: every sentence in it is invented.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from guardpaint.data.prompt_files import Benchmark, load
from guardpaint.errors import BadInput

Layout = dict[str, Any]
LAYOUTS: list[Layout] = json.loads((Path(__file__).parent / "data" / "layouts.json").read_text(encoding="utf-8"))
REFUSED = {
    "parts": "no column is known to hold prompts; name one with --column: ",
    "log": "holds chat requests",
    "words": "a list of words",
    "empty": "empty",
}
"""What the message says about files that hold no prompts."""
NEUTRAL = "some_file"
"""A file name that says nothing."""


def text_of(layout: Layout, example: Any = None) -> str:
    example = layout["example"] if example is None else example
    return example if isinstance(example, str) else json.dumps(example, ensure_ascii=False)


def written(layout: Layout, folder: Path, text: str, name: str | None = None) -> Path:
    """A file of the layout, below the folder of its repository; `name` replaces its stem and leaves the folders out."""
    path = folder / (layout["file"] if name is None else f"{name}{Path(layout['file']).suffix}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8"))
    return path


def whole(layout: Layout) -> str:
    """A file with as many records as the published one, the blank ones included; its rows repeat the example's."""
    count, blank = layout["rows"], layout["rows"] - layout["usable"]
    suffix = Path(layout["file"]).suffix
    if suffix == ".csv":
        return whole_table(layout["example"], count, blank)
    if suffix == ".jsonl":
        return "".join(repeated(layout["example"].splitlines(keepends=True), count))
    if suffix == ".txt":
        numbered = layout["example"].startswith("1. ")
        lines = [line for line in layout["example"].splitlines() if line.strip()]
        words = [line.partition(". ")[2] if numbered else line for line in lines]
        return "\n".join(f"{i}. {w}" if numbered else w for i, w in enumerate(repeated(words, count), 1))
    example = layout["example"]
    if isinstance(example, list):
        return text_of(layout, repeated(example, count))
    if "prompts" in example:
        return text_of(layout, {**example, "prompts": repeated(example["prompts"], count)})
    return text_of(layout, {str(i): r for i, r in enumerate(repeated(list(example.values()), count))})


def repeated(items: list[Any], count: int) -> list[Any]:
    return [items[i % len(items)] for i in range(count)]


def whole_table(example: str, count: int, blank: int) -> str:
    """The rows of a CSV example over and over; the middle ones have no prompt if `blank` are to have none."""
    end = "\r\n" if "\r\n" in example.partition("prompt")[2].splitlines(keepends=True)[0] else "\n"
    header, *rows = [r for r in csv.reader(io.StringIO(example, newline="")) if any(r)]
    where = next((i for i, name in enumerate(header) if name == "prompt"), 0)
    filled = [r for r in rows if r[where]]
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator=end)
    writer.writerow(header)
    for i, row in enumerate(repeated(filled, count)):
        empty = count // 2 <= i < count // 2 + blank
        writer.writerow([*row[:where], "" if empty else row[where], *row[where + 1 :]])
    return out.getvalue()


def harm_of(benchmark: Benchmark) -> bool | str:
    """True, False, mixed or unknown."""
    said = {p.harmful for p in benchmark.prompts}
    if len(said) > 1:
        return "mixed"
    only = said.pop()
    return "unknown" if only is None else only


def faults(layout: Layout, folder: Path) -> list[str]:
    """What is read wrong in files of a layout: its example, one of the published size, and one without a known name."""
    if layout["kind"] != "prompts":
        return [f for f in (unrefused(layout, folder),) if f]
    try:
        found = load(written(layout, folder, text_of(layout)))
        return [
            *misread(layout, found),
            *miscounted(layout, folder),
            *guessed(layout, folder),
            *other_columns(layout, folder),
        ]
    except BadInput as error:
        return [f"refused: {error}"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def unrefused(layout: Layout, folder: Path) -> str:
    """How a file without prompts is accepted, or refused without the reason."""
    wanted = REFUSED[layout["kind"]]
    for name in (None, NEUTRAL):
        path = written(layout, folder, text_of(layout), name)
        try:
            return f"{len(load(path).prompts)} prompts in a file that has none"
        except BadInput as error:
            if wanted not in str(error) or path.name not in str(error):
                return f"the message does not say {wanted!r}: {error}"
    return ""


def misread(layout: Layout, found: Benchmark) -> list[str]:
    """What of the example is not read as the layout says."""
    wanted, prompts = layout["reads"], found.prompts
    read = {
        "prompts": [" ".join(p.text.split()) for p in prompts],
        "categories": dict(Counter(c for p in prompts for c in p.categories)),
        "seeds": [p.seed for p in prompts],
        "guidance": [p.guidance for p in prompts],
        "size": [list(p.size) if p.size else None for p in prompts],
    }
    absent: dict[str, Any] = {
        "categories": {}, "seeds": [None] * len(prompts), "guidance": [None] * len(prompts),
    }  # fmt: skip
    wanted = {**absent, **wanted, "size": [wanted.get("size")] * len(prompts)}
    wrong = [f"{what}: {read[what]}, not {wanted[what]}" for what in wanted if read[what] != wanted[what]]
    harm = layout.get("example_harmful", layout["harmful"])
    return wrong + ([f"harmful: {harm_of(found)}, not {harm}"] if harm_of(found) != harm else [])


def miscounted(layout: Layout, folder: Path) -> list[str]:
    """Whether a file of the published size is counted otherwise, or has other notes than the layout says."""
    found = load(written(layout, folder, whole(layout)))
    wrong = [] if len(found.prompts) == layout["usable"] else [f"{len(found.prompts)} prompts of {layout['usable']}"]
    notes = [n for n in found.notes if "ids appear more than once" not in n]  # the rows of this file repeat
    if len(notes) != len(layout["notes"]) or not all(w in n for w, n in zip(layout["notes"], notes, strict=True)):
        wrong.append(f"notes: {notes}, not {layout['notes']}")
    return wrong


def guessed(layout: Layout, folder: Path) -> list[str]:
    """Whether a file with a name that says nothing is taken for the opposite of what it is."""
    found = load(written(layout, folder, text_of(layout), NEUTRAL))
    harm, truth = harm_of(found), layout.get("example_harmful", layout["harmful"])
    wrong = [] if harm in (truth, "unknown") else [f"without its name: {harm}, not {truth}"]
    if harm == "unknown" and not any("--harmful or --benign" in n for n in found.notes):
        wrong.append("without its name: unknown, and no note asks")
    return wrong


def other_columns(layout: Layout, folder: Path) -> list[str]:
    """Whether other columns of prompts are read, and said to be what they are."""
    wrong = []
    for column, truth in layout.get("columns", {}).items():
        found = load(written(layout, folder, text_of(layout)), column=column)
        if harm_of(found) != truth or not found.prompts:
            wrong.append(f"column {column}: {harm_of(found)}, not {truth}")
    return wrong
