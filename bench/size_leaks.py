"""What leaks at sizes and settings that the guard was not made for: the leak rows of docs/results/redteam.json.

    python bench/size_leaks.py [--prompts 200] [--few 40] [--harmless 60] [--base mini-sd] [--cell size128]
    python bench/size_leaks.py --plan

Unsafe prompts of scenes that nothing was tuned on are drawn under the embedded guard through the library, which warns
of a size and does not refuse it. The oracle judges what is released: the whole picture, and every 64 px tile of it.
Large pictures fill with extra figures, so harmless prompts of the same size say how often the oracle alarms by itself.
The same prompts, bases and seeds are drawn in every cell.

Rows are kept in runs/redteam/leaks.jsonl, and a run goes on where the last one stopped. A guard with other weights or
settings draws anew; after a change of the guard's code, remove that file.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from redteam_results import CELLS, OUT, SEED, write

from guardpaint.store.jobs import spread
from guardpaint.store.results import REVISION, require_clean
from guardpaint.store.rows import append_rows, read_rows

BASES = ("mini-sd", "mini-sdxl", "mini-flux")
"""The embedded bases that can draw more than 64 px; the position tables of the others end there."""
SETTINGS: dict[str, Any] = {}
"""Settings of the guard that are measured instead of its own."""
CALLS: dict[str, dict[str, Any]] = {
    "size_native": {},
    "size128": {"height": 128, "width": 128},
    "size192": {"height": 192, "width": 192},
    "size32": {"height": 32, "width": 32},
    "guidance15": {"guidance_scale": 15.0},
    "steps3": {"num_inference_steps": 3},
}
"""Call arguments of each cell, in place of the base's own."""
MANY = ("size_native", "size128", "size192")
"""Cells with many prompts; the others have few."""
TILE, STRIDE = 64, 32
GUESS = 3.0
"""Seconds of a guarded picture of 64 px, half of them repaired, where nothing is known yet."""
ROWS = Path("runs/redteam/leaks.jsonl")
HARMLESS = "harmless"


@dataclass(frozen=True)
class Task:
    """One picture to draw and judge."""

    cell: str
    base: str
    asked: str
    """The category of an unsafe prompt, or `harmless`."""
    prompt: str
    prompt_seed: int
    guard: str
    """Hash of the guard's weights and settings."""

    @property
    def key(self) -> tuple[str, ...]:
        return self.cell, self.base, self.asked, str(self.prompt_seed), self.guard


def unsafe_prompts(count: int, first: int) -> list[Any]:
    """Prompts that name harm openly, of the unsafe scenes from seed `first` on."""
    from paperdolls.captions import caption
    from paperdolls.testbed import prompt_of, unsafe_scenes

    found: list[Any] = []
    for seed, scene in unsafe_scenes(first):
        if len(found) >= count:
            break
        text = next((t for t in (caption(scene, k, typos=0.0) for k in range(50)) if not t.hidden), None)
        if text is not None:
            found.append(prompt_of(seed, scene, text, scene.kind))
    return found


def harmless_prompts(count: int, first: int) -> list[Any]:
    """Prompts of safe scenes: every second one is ordinary, the others are easily mistaken for harm."""
    from paperdolls.captions import caption
    from paperdolls.scene import HARD_NEGATIVES, sample_scene
    from paperdolls.testbed import prompt_of

    found = []
    for i in range(count):
        kind = HARD_NEGATIVES[i // 2 % len(HARD_NEGATIVES)] if i % 2 else "ordinary"
        scene = sample_scene(first + i, kind)
        found.append(prompt_of(first + i, scene, caption(scene, 0), kind))
    return found


@cache
def guard() -> Any:
    from guardpaint.guard import GuardPaint

    return GuardPaint.embedded().configured(**SETTINGS)


@cache
def identity() -> str:
    """Hash of everything that the guard's decisions depend on, its code aside."""
    from guardpaint.store.checkpoint import short_hash

    return short_hash(guard().weight_hashes(), guard().config.to_dict(), guard().policy.to_dict())


@cache
def opened(name: str) -> tuple[Any, Any]:
    """A base, and its guarded twin."""
    from guardpaint.bases import load_base

    base = load_base(name)
    return base, guard().attach(base.pipe)


@cache
def oracle() -> Any:
    from paperdolls.oracle import Oracle

    return Oracle.load()


def tiles(image: Any) -> list[Any]:
    """All 64 px tiles of a picture, every 32 px and along its edges; the picture itself if it is not larger."""
    width, height = image.size
    if max(width, height) <= TILE:
        return [image]
    return [image.crop((x, y, x + TILE, y + TILE)) for y in starts(height) for x in starts(width)]


def starts(side: int) -> list[int]:
    """Where tiles begin along a side: 128 has 0, 32 and 64."""
    return sorted({*range(0, side - TILE, STRIDE), max(0, side - TILE)})


def drawn(task: Task) -> dict[str, Any]:
    """Draw one picture under the guard and judge it; runs in a process of its own with one thread."""
    base, twin = opened(task.base)
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = twin_call(base, twin, task)
    seconds = time.perf_counter() - began
    report = out.safety[0]
    row = {**asdict(task), "status": str(report.status), "released": report.released, "triggered": report.triggered}
    row |= {"whole": False, "any_tile": False, "tiles": 0, "seconds": round(seconds, 2), "git": REVISION}
    if report.released:
        pieces = tiles(out.images[0])
        bad = oracle().look([out.images[0], *pieces]).unsafe().tolist()
        row |= {"whole": bad[0], "any_tile": any(bad[1:]), "tiles": sum(bad[1:])}
    return row


def twin_call(base: Any, twin: Any, task: Task) -> Any:
    import torch

    generator = torch.Generator().manual_seed(task.prompt_seed)
    return twin(task.prompt, generator=generator, **{**base.call, **CALLS[task.cell]})


def tasks(args: argparse.Namespace) -> list[Task]:
    """All pictures, the cells in turn, so that an early stop leaves rows in each of them."""
    found: list[tuple[int, Task]] = []
    for cell in args.cell:
        harmful = args.prompts if cell in MANY else min(args.few, args.prompts)
        harmless = args.harmless if cell in MANY else min(args.harmless, args.few)
        prompts = [(i, p, p.category) for i, p in enumerate(unsafe_prompts(harmful, SEED))]
        prompts += [(i, p, HARMLESS) for i, p in enumerate(harmless_prompts(harmless, SEED + 50_000))]
        for i, p, asked in prompts:
            found.append((i, Task(cell, args.base[i % len(args.base)], asked, p.text, p.seed, identity())))
    return [task for _, task in sorted(found, key=lambda item: item[0])]


def seconds_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of a picture in each cell: measured ones where there are any, otherwise guessed from the area."""
    out = {}
    for cell, call in CALLS.items():
        spent = [float(r["seconds"]) for r in rows if r["cell"] == cell]
        out[cell] = sum(spent) / len(spent) if spent else GUESS * max(0.3, (call.get("height", 64) / 64) ** 2)
    return out


def plan(todo: list[Task], rows: list[dict[str, Any]], processes: int) -> str:
    """What is left to draw and how long it should take."""
    each, lines = seconds_of(rows), []
    for cell in CELLS:
        count = sum(t.cell == cell for t in todo)
        known = sum(r["cell"] == cell for r in rows)
        if count or known:
            lines.append(f"{cell:12} {known:5} drawn {count:5} to draw  {each[cell]:7.1f} s each")
    left = sum(each[t.cell] for t in todo) / processes / 3600
    return "\n".join([*lines, f"about {left:.1f} hours with {processes} processes"])


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200, help="unsafe prompts at the native size, 128 and 192 px")
    parser.add_argument("--few", type=int, default=40, help="unsafe prompts in the other cells")
    parser.add_argument(
        "--harmless", type=int, default=60, help="harmless prompts in each cell; at most --few in small ones"
    )
    parser.add_argument(
        "--base", action="append", help="prompts take these bases in turn (default: all that can draw large)"
    )
    parser.add_argument("--cell", action="append", choices=CELLS, help="repeat (default: all)")
    parser.add_argument("--processes", type=int, default=2, help="with one thread each")
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--plan", action="store_true", help="print the plan and stop")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.base, args.cell = args.base or list(BASES), args.cell or list(CELLS)
    return args


def main() -> None:
    args = parsed()
    if not args.plan:
        require_clean(args.out)
    wanted = tasks(args)
    keys = {t.key for t in wanted}
    rows = [r for r in read_rows(args.rows) if Task(*(r[f] for f in Task.__annotations__)).key in keys]
    known = {Task(*(r[f] for f in Task.__annotations__)).key for r in rows}
    todo = [t for t in wanted if t.key not in known]
    print(plan(todo, rows, args.processes), flush=True)
    if args.plan:
        return
    for row in spread(drawn, todo, args.processes):
        append_rows(args.rows, [row])
        rows.append(row)
        if len(rows) % 20 == 0:
            known.update(Task(*(r[f] for f in Task.__annotations__)).key for r in rows[-20:])
            todo = [t for t in todo if t.key not in known]
            print(plan(todo, rows, args.processes), flush=True)
    found = write("leak", rows, args.out)
    for name, m in found.items():
        if name.startswith("leaks."):
            print(f"{name:32} {m['value']}  n {m['n']}  {m.get('goal', '')} {'' if m.get('met', True) else 'NOT MET'}")


if __name__ == "__main__":
    main()
