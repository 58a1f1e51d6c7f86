"""Plots and picture sheets of an evaluation, each from its rows alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFilter

from guardpaint.evaluate import summary
from guardpaint.train.dynamics import figure

Row = dict[str, Any]
COLOURS = {"undefended": "#999999", "paper": "#ccbb44", "ours": "#228833"}
SIZE = re.compile(r"ours:candidates=(\d+),audits=(\d+)$")
RULE = re.compile(r"ours:reinsertion=(\w+)")
PANELS = (("asr", "attack success"), ("agreement_all", "agreement"), ("seconds", "seconds"))
SIDE = 130


def heat_map(rows: Sequence[Row], defence: str = "ours") -> Any:
    """Attack × base: how far the attack success rate falls."""
    found = summary.attack_cells(rows)
    attacks = list(dict.fromkeys(r["suite"] for r in summary.harmful(rows)))
    bases = list(dict.fromkeys(r["base"] for r in summary.harmful(rows)))
    drawing = figure((1.6 + 1.3 * len(bases), 1.2 + 0.5 * len(attacks)))
    axis = drawing.subplots()
    grid = [[(found.get(f"{a}.{b}.fall.{defence}") or {}).get("value") for b in bases] for a in attacks]
    shaded(axis, grid, [f"{100 * v:.0f} %" if v is not None else "–" for line in grid for v in line], (0.0, 1.0))
    axis.set_xticks(range(len(bases)), bases, fontsize=8)
    axis.set_yticks(range(len(attacks)), attacks, fontsize=8)
    axis.set_title(f"attack success removed by {defence}", fontsize=10)
    return drawing


def shaded(axis: Any, grid: Sequence[Sequence[float | None]], texts: Sequence[str], span: tuple[float, float]) -> None:
    """A grid of numbers as colours, each written in its cell."""
    blank = float("nan")
    axis.imshow([[blank if v is None else v for v in line] for line in grid], vmin=span[0], vmax=span[1], aspect="auto")
    width = len(grid[0])
    for i, text in enumerate(texts):
        value = grid[i // width][i % width]
        bright = value is not None and span[1] > span[0] and (value - span[0]) / (span[1] - span[0]) > 0.7
        colour = "black" if bright or value is None else "white"
        axis.text(i % width, i // width, text, ha="center", va="center", color=colour, fontsize=9)


def front_plot(rows: Sequence[Row]) -> Any:
    """Safety against fidelity; the dot's size is the time per picture."""
    drawing = figure((6, 4))
    axis = drawing.subplots()
    points = summary.front(rows)
    told = [p for p in points if p["fidelity"] is not None]
    if len(told) < len(points):
        axis.set_title("without defences whose fidelity the judge does not tell", fontsize=8)
    beside: dict[tuple[float, float], list[str]] = {}
    for point in told:
        colour = COLOURS.get(point["defence"], "#4477aa")
        axis.scatter(point["fidelity"], point["safety"], s=40 + 60 * point["seconds"], color=colour, alpha=0.7, lw=0)
        beside.setdefault((round(point["fidelity"], 2), round(point["safety"], 2)), []).append(point["defence"])
    middle = sum(axis.get_xlim()) / 2
    for place, names in beside.items():  # names at one place share a label; it reaches into the picture
        left = place[0] > middle
        axis.annotate("\n".join(names), place, fontsize=8, xytext=(-8 if left else 8, 0), va="center",
                      ha="right" if left else "left", textcoords="offset points")  # fmt: skip
    axis.set(
        xlabel="agreement with the harmless part of the prompt (withheld: none)", ylabel="safety (1 − attack success)"
    )
    return drawing


def size_panels(rows: Sequence[Row]) -> Any | None:
    """Per base, over candidates N and audits X: attack success, agreement, time. None if that was not run."""
    tried = [r for r in summary.harmful(rows) if SIZE.match(r["defence"])]
    if not tried:
        return None
    bases = list(dict.fromkeys(r["base"] for r in tried))
    sizes = [(int(m[1]), int(m[2])) for r in tried if (m := SIZE.match(r["defence"]))]
    ns, xs = sorted({n for n, _ in sizes}), sorted({x for _, x in sizes})
    drawing = figure((1.0 + 3.0 * len(PANELS), 0.6 + 2.4 * len(bases)))
    panels = drawing.subplots(len(bases), len(PANELS), squeeze=False)
    for line, base in zip(panels, bases, strict=True):
        found = summary.defences([r for r in tried if r["base"] == base])
        for axis, (name, title) in zip(line, PANELS, strict=True):
            cells = [[found.get(f"ours:candidates={n},audits={x}.{name}") for x in xs] for n in ns]
            grid = [[c["value"] if c else None for c in row] for row in cells]
            known = [v for row in grid for v in row if v is not None]
            span = (0.0, 1.0) if name != "seconds" else (0.0, max(known, default=1.0))
            shaded(axis, grid, ["–" if v is None else f"{v:.2f}" for row in grid for v in row], span)
            axis.set_xticks(range(len(xs)), [str(x) for x in xs], fontsize=8)
            axis.set_yticks(range(len(ns)), [str(n) for n in ns], fontsize=8)
            axis.set_title(f"{base}: {title}", fontsize=9)
            axis.set(xlabel="audits X", ylabel="candidates N")
    return drawing


def variants_plot(rows: Sequence[Row]) -> Any | None:
    """Every other setting of ours, and its parts: attack success and agreement beside each other."""
    tried = [r for r in summary.harmful(rows) if summary.variant(r["defence"]) and not SIZE.match(r["defence"])]
    if not tried:
        return None
    met = {summary.same(r) for r in tried}
    tried += [r for r in summary.harmful(rows) if r["defence"] == "ours" and summary.same(r) in met]
    found = summary.defences(tried)
    names = sorted(dict.fromkeys(r["defence"] for r in tried))
    drawing = figure((9, 0.9 + 0.3 * len(names)))
    for axis, (key, title) in zip(drawing.subplots(1, 2, sharey=True), PANELS[:2], strict=True):
        values = [found[f"{n}.{key}"] for n in names]
        level = [float("nan") if m["value"] is None else m["value"] for m in values]
        ends = [m.get("ci") or (v, v) for m, v in zip(values, level, strict=True)]
        errors = [
            [max(0.0, v - low) for v, (low, _) in zip(level, ends, strict=True)],
            [max(0.0, high - v) for v, (_, high) in zip(level, ends, strict=True)],
        ]
        axis.barh(range(len(names)), level, xerr=errors, color="#4477aa", error_kw={"lw": 1})
        axis.set_yticks(range(len(names)), [n.removeprefix("ours:") for n in names], fontsize=8)
        axis.set(xlim=(0, 1), xlabel=title)
    return drawing


def shown(row: Row, out: Path) -> Image.Image:
    """A kept picture, blurred where the judge calls it unsafe."""
    picture = Image.open(out / row["image"]).convert("RGB").resize((SIDE, SIDE), Image.Resampling.NEAREST)
    return picture.filter(ImageFilter.GaussianBlur(5)) if row["unsafe"] else picture


def pairs_sheet(rows: Sequence[Row], out: Path, count: int = 24, defence: str = "ours") -> Image.Image | None:
    """Undefended and defended pictures of the same prompts side by side, taking turns among suites and bases."""
    plain = {summary.same(r): r for r in rows if r["defence"] == "undefended" and r["image"]}
    cells: dict[tuple[str, str], list[tuple[Row, Row]]] = {}
    for r in rows:
        key = summary.same(r)
        if r["defence"] == defence and r["image"] and key in plain:
            cells.setdefault((r["suite"], r["base"]), []).append((plain[key], r))
    turns = max(map(len, cells.values()), default=0)
    both = [own[k] for k in range(turns) for own in cells.values() if k < len(own)][:count]
    if not both:
        return None
    sheet = Image.new("RGB", (4 * (2 * SIDE + 12), -(-len(both) // 4) * (SIDE + 4)), "white")
    for i, pair in enumerate(both):
        for j, row in enumerate(pair):
            sheet.paste(shown(row, out), ((2 * SIDE + 12) * (i % 4) + (SIDE + 2) * j, (SIDE + 4) * (i // 4)))
    return sheet


def reinsertion_sheet(rows: Sequence[Row], out: Path, count: int = 6) -> Image.Image | None:
    """The same prompts under every reinsertion rule, one column each, the undefended picture first."""
    named = [("undefended", r) for r in rows if r["defence"] == "undefended" and r["image"]]
    named += [(m[1], r) for r in rows if (m := RULE.match(r["defence"])) and r["image"]]
    rules = [n for n in dict.fromkeys(n for n, _ in named) if n != "undefended"]
    if not rules:
        return None
    columns = {n: {summary.same(r): r for m, r in named if m == n} for n in ("undefended", *rules)}
    common = [k for k in columns[rules[0]] if all(k in own for own in columns.values())][:count]
    if not common:
        return None
    sheet = Image.new("RGB", (len(columns) * (SIDE + 4), 16 + len(common) * (SIDE + 4)), "white")
    pen = ImageDraw.Draw(sheet)
    for x, (name, own) in enumerate(columns.items()):
        pen.text((x * (SIDE + 4) + 2, 2), name, fill="black")
        for y, key in enumerate(common):
            sheet.paste(shown(own[key], out), (x * (SIDE + 4), 16 + y * (SIDE + 4)))
    return sheet
