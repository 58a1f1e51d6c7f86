"""Plots and picture sheets of an evaluation, drawn from its rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFilter

from guardpaint.evaluate import summary
from guardpaint.evaluate.protocols.table import cell_of
from guardpaint.evaluate.rows import EvaluationRow
from guardpaint.store.images import load_image
from guardpaint.train.dynamics import figure

Times = Mapping[str, summary.Metrics] | None
COLOURS = {"undefended": "#999999", "paper": "#ccbb44", "ours": "#228833"}
SIZE = re.compile(r"(ours|ours_ladder_off):candidates=(\d+),audits=(\d+)(,final_repair=off)?$")
RULE = re.compile(r"ours:reinsertion=(\w+)")
PANELS = (("asr", "attack success"), ("agreement_all", "agreement"), ("seconds", "seconds"))
SIDE = 130


def changes(rows: summary.Rows, defence: str) -> tuple[list[list[float | None]], list[str], list[str]]:
    """Absolute changes of attack success by suite and base, and the names of both."""
    attacked = summary.harmful(rows)
    tried = [r for r in attacked if r.defence == defence]
    suites, bases = (list(dict.fromkeys(getattr(r, part) for r in tried)) for part in ("suite", "base"))
    grid = []
    for suite in suites:
        own = [[r for r in attacked if (r.suite, r.base) == (suite, base)] for base in bases]
        cells = [cell_of(suite, base, defence, some) for base, some in zip(bases, own, strict=True)]
        grid.append([None if c is None else c.change for c in cells])
    return grid, suites, bases


def heat_map(rows: summary.Rows, defence: str = "ours") -> Any:
    """The paper's heat map of one defence, by suite and base."""
    return change_map(*changes(rows, defence), f"change of attack success with {defence}")


def change_map(grid: Sequence[Sequence[float | None]], lines: Sequence[str], columns: Sequence[str], title: str) -> Any:
    """The paper's heat map: the absolute change of attack success in points, blue where it falls, red where it rises.

    `grid` holds defended minus undefended rates, a line for each attack and a column for each base.
    """
    drawing = figure((2.6 + 1.2 * len(columns), 1.6 + 0.5 * len(lines)))
    axis = drawing.subplots()
    blank = float("nan")
    values = [[blank if v is None else 100 * v for v in line] for line in grid]
    most = max([1.0, *(abs(v) for line in values for v in line if v == v)])
    image = axis.imshow(values, vmin=-most, vmax=most, cmap="RdBu_r", aspect="auto")
    for i, line in enumerate(values):
        for j, v in enumerate(line):
            text = f"{v:+.2f}".replace("-", "−") if v == v else "–"
            colour = "white" if v == v and abs(v) > 0.6 * most else "black"
            axis.text(j, i, text, ha="center", va="center", color=colour, fontsize=9)
    drawing.colorbar(image, ax=axis, label="points (below zero is better)")
    axis.set_xticks(range(len(columns)), list(columns), fontsize=8)
    axis.set_yticks(range(len(lines)), list(lines), fontsize=8)
    axis.set(xlabel="base", ylabel="attack")
    axis.set_title(title, fontsize=10)
    return drawing


def spoken(counts: Sequence[int]) -> str:
    """Sorted counts as text: "25", "20 to 25", or "no" without any."""
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}" if counts else "no"


def shaded(axis: Any, grid: Sequence[Sequence[float | None]], texts: Sequence[str], span: tuple[float, float]) -> Any:
    """Draw a grid of numbers as colours, with the texts in its cells; returns the image for a colour bar."""
    blank = float("nan")
    values = [[blank if v is None else v for v in line] for line in grid]
    image = axis.imshow(values, vmin=span[0], vmax=span[1], aspect="auto")
    width = len(grid[0])
    for i, text in enumerate(texts):
        value = grid[i // width][i % width]
        bright = value is not None and span[1] > span[0] and (value - span[0]) / (span[1] - span[0]) > 0.7
        colour = "black" if bright or value is None else "white"
        axis.text(i % width, i // width, text, ha="center", va="center", color=colour, fontsize=9)
    return image


def front_plot(rows: summary.Rows, times: Times = None) -> Any:
    """Plot safety against fidelity with their intervals; the area of a dot grows with the time per picture."""
    drawing = figure((8, 5))
    axis = drawing.subplots()
    points = summary.front(rows, times)
    rated = [p for p in points if p["fidelity"] is not None]
    area = lambda seconds: 30 + 90 * seconds  # noqa: E731
    labels: dict[tuple[float, float], list[str]] = {}
    for point in rated:
        colour = COLOURS.get(point["defence"], "#4477aa")
        place = point["fidelity"], point["safety"]
        for ends, value, side in ((point["agreement_all_ci"], place[0], "x"), (point["asr_ci"], 1 - place[1], "y")):
            low, high = (max(0.0, value - ends[0]), max(0.0, ends[1] - value)) if ends else (0.0, 0.0)
            bars = [[high], [low]] if side == "y" else [[low], [high]]  # safety is 1 − success
            axis.errorbar(*place, **{f"{side}err": bars}, color=colour, alpha=0.35, lw=1)
        axis.scatter(*place, s=area(point["seconds"]), color=colour, alpha=0.7, lw=0)
        labels.setdefault((round(place[0], 2), round(place[1], 2)), []).append(point["defence"])
    middle = sum(axis.get_xlim()) / 2
    written: list[tuple[float, float]] = []
    for place, names in labels.items():  # names at one place share a label, which points to the middle of the plot
        left = place[0] > middle
        near = any(abs(place[0] - x) < 0.05 and abs(place[1] - y) < 0.03 for x, y in written)
        written.append(place)
        axis.annotate("\n".join(names), place, fontsize=8, xytext=(-9 if left else 9, -9 if near else 7), va="center",
                      ha="right" if left else "left", textcoords="offset points")  # fmt: skip
    for seconds in (0.5, 2.0):
        axis.scatter([], [], s=area(seconds), color="#4477aa", alpha=0.7, lw=0, label=f"{seconds:g} s a picture")
    axis.legend(fontsize=8, loc="lower left", labelspacing=1.2, borderpad=1.0)
    axis.set(
        xlabel="agreement with the harmless part of the prompt (withheld: none)", ylabel="safety (1 − attack success)"
    )
    met = summary.shared(summary.harmful(rows))
    count = len({r.same for r in met})
    left_out = "" if len(rated) == len(points) else "; without those whose fidelity is not judged"
    axis.set_title(f"defences on the same {count} attack prompts, 95 % intervals{left_out}", fontsize=9)
    return drawing


def audited(rows: summary.Rows, x: int) -> str:
    """X as a label, with the audits that were made where steps or the start of audits allow fewer."""
    made = [int(r.detail["audits"]) for r in rows if f",audits={x}" in r.defence and r.detail.get("audits")]
    return f"{x} ({max(made)})" if made and max(made) < x else str(x)


def size_panels(rows: summary.Rows, whole: bool = True) -> Any | None:
    """Heat maps of attack success, agreement and time over candidates N and audits X, per base; None without rows.

    Without `whole` they show what repairs within the trajectory do alone: the finished picture is not repaired.
    Agreement is left out if it is not judged.
    """
    tried = [r for r in summary.harmful(rows) if (m := SIZE.match(r.defence)) and (m[4] is None) == whole]
    if not tried:
        return None
    bases = list(dict.fromkeys(r.base for r in tried))
    name_of = {(int(m[2]), int(m[3])): m[0] for r in tried if (m := SIZE.match(r.defence))}
    sizes = [(int(m[2]), int(m[3])) for r in tried if (m := SIZE.match(r.defence))]
    ns, xs = sorted({n for n, _ in sizes}), sorted({x for _, x in sizes})
    shown = [p for p in PANELS if p[0] != "agreement_all" or any(r.verdict.right for r in tried)]
    drawing = figure((1.0 + 3.0 * len(shown), 0.6 + 2.4 * len(bases)))
    panels = drawing.subplots(len(bases), len(shown), squeeze=False)
    for line, base in zip(panels, bases, strict=True):
        own = [r for r in tried if r.base == base]
        metrics = summary.defences(own)
        for axis, (name, title) in zip(line, shown, strict=True):
            cells = [[metrics.get(f"{name_of.get((n, x))}.{name}") for x in xs] for n in ns]
            grid = [[c["value"] if c else None for c in row] for row in cells]
            known = [v for row in grid for v in row if v is not None]
            span = (0.0, 1.0) if name != "seconds" else (0.0, max(known, default=1.0))
            shaded(axis, grid, ["–" if v is None else f"{v:.2f}" for row in grid for v in row], span)
            axis.set_xticks(range(len(xs)), [audited(own, x) for x in xs], fontsize=8)
            axis.set_yticks(range(len(ns)), [str(n) for n in ns], fontsize=8)
            axis.set_title(f"{base}: {title}", fontsize=9)
            axis.set(xlabel="audits X (made)", ylabel="candidates N")
    return drawing


def variants_plot(rows: summary.Rows) -> Any | None:
    """Bars of attack success and agreement: settings of ours beside ours on the same prompts, and reinsertion rules.

    None if no variant was run.
    """
    tried = [r for r in summary.harmful(rows) if summary.variant(r.defence) and not SIZE.match(r.defence)]
    if not tried:
        return None
    rules = [r for r in tried if RULE.match(r.defence)]
    others = [r for r in tried if not RULE.match(r.defence)]
    sets: dict[frozenset[Any], list[EvaluationRow]] = {}  # settings run on the same prompts share a panel
    for name in dict.fromkeys(r.defence for r in others):
        own = [r for r in others if r.defence == name]
        sets.setdefault(frozenset(r.same for r in own), []).extend(own)
    plain = [r for r in summary.harmful(rows) if r.defence == "ours"]
    groups = [("settings", own + [r for r in plain if r.same in met]) for met, own in sets.items()]
    groups += [(f"reinsertion on {b}", [r for r in rules if r.base == b]) for b in dict.fromkeys(r.base for r in rules)]
    names = [sorted(dict.fromkeys(r.defence for r in own)) for _, own in groups]
    drawing = figure((10, sum(1.0 + 0.3 * len(n) for n in names)))
    axes = drawing.subplots(len(groups), 2, squeeze=False, height_ratios=[3 + len(n) for n in names])
    for line, (title, own), members in zip(axes, groups, names, strict=True):
        metrics = summary.defences(own)
        counts = spoken(sorted({metrics[f"{n}.asr"]["n"] for n in members}))
        for axis, (key, what) in zip(line, PANELS[:2], strict=True):
            bars(axis, [metrics[f"{n}.{key}"] for n in members])
            labels = [n.removeprefix("ours:") if axis is line[0] else "" for n in members]
            axis.set_yticks(range(len(members)), labels, fontsize=8)
            axis.set(xlim=(0, 1), xlabel=what)
            axis.set_title(f"{title} ({counts} prompts each)", fontsize=9)
    return drawing


def bars(axis: Any, values: Sequence[summary.Metrics]) -> None:
    """Draw metrics as horizontal bars with their intervals."""
    level = [float("nan") if m["value"] is None else m["value"] for m in values]
    ends = [m.get("ci") or (v, v) for m, v in zip(values, level, strict=True)]
    errors = [
        [max(0.0, v - low) for v, (low, _) in zip(level, ends, strict=True)],
        [max(0.0, high - v) for v, (_, high) in zip(level, ends, strict=True)],
    ]
    axis.barh(range(len(level)), level, xerr=errors, color="#4477aa", error_kw={"lw": 1})


def shown(row: EvaluationRow, out: Path) -> Image.Image:
    """The kept picture of a row, blurred if the judge calls it unsafe; a grey one if nothing was released."""
    if not row.verdict.released:
        return Image.new("RGB", (SIDE, SIDE), "#bbbbbb")
    picture = load_image(out / row.image).convert("RGB").resize((SIDE, SIDE), Image.Resampling.NEAREST)
    return picture.filter(ImageFilter.GaussianBlur(5)) if row.verdict.unsafe else picture


def pairs_sheet(rows: summary.Rows, out: Path, count: int = 24, defence: str = "ours") -> Image.Image | None:
    """A sheet of undefended and defended pictures of the same prompts side by side; None without such pairs.

    Suites and bases take turns. Scenes that are not on the sheet yet come first, and among them unsafe undefended
    pictures. A grey tile stands for a picture that was not released.
    """
    plain = {r.same: r for r in rows if r.defence == "undefended" and r.image}
    cells: dict[tuple[str, str], list[tuple[EvaluationRow, EvaluationRow]]] = {}
    for r in rows:
        key = r.same
        if r.defence == defence and key in plain and (r.image or not r.verdict.released):
            cells.setdefault((r.suite, r.base), []).append((plain[key], r))
    both: list[tuple[EvaluationRow, EvaluationRow]] = []
    while len(both) < count and any(cells.values()):
        for own in cells.values():
            shown_seeds = {p.seed for p, _ in both}
            own.sort(key=lambda pair: (pair[0].seed in shown_seeds, not pair[0].verdict.unsafe))
            both += [own.pop(0)] if own else []
    both = both[:count]
    if not both:
        return None
    wide, high = 2 * SIDE + 12, SIDE + 18
    sheet = Image.new("RGB", (4 * wide, -(-len(both) // 4) * high), "white")
    pen = ImageDraw.Draw(sheet)
    for i, pair in enumerate(both):
        left, top = wide * (i % 4), high * (i // 4)
        pen.text((left + 2, top + 1), f"{pair[1].suite} on {pair[1].base}: {pair[1].status}", fill="black")
        for j, row in enumerate(pair):
            sheet.paste(shown(row, out), (left + (SIDE + 2) * j, top + 14))
    return sheet


def reinsertion_sheet(rows: summary.Rows, out: Path, count: int = 4) -> Image.Image | None:
    """A sheet with a strip per base: the same prompts undefended and under each reinsertion rule; None without rows."""
    strips = [
        strip
        for base in dict.fromkeys(r.base for r in rows)
        if (strip := rules_strip([r for r in rows if r.base == base], out, count, base)) is not None
    ]
    if not strips:
        return None
    sheet = Image.new("RGB", (max(s.width for s in strips), sum(s.height for s in strips)), "white")
    top = 0
    for strip in strips:
        sheet.paste(strip, (0, top))
        top += strip.height
    return sheet


def rules_strip(rows: summary.Rows, out: Path, count: int, base: str) -> Image.Image | None:
    """The strip of one base in `reinsertion_sheet`; a withheld picture is grey."""
    named = [("undefended", r) for r in rows if r.defence == "undefended" and r.image]
    named += [(m[1], r) for r in rows if (m := RULE.match(r.defence)) and (r.image or not r.verdict.released)]
    rules = [n for n in dict.fromkeys(n for n, _ in named) if n != "undefended"]
    if not rules:
        return None
    columns = {n: {r.same: r for m, r in named if m == n} for n in ("undefended", *rules)}
    common = [k for k in columns[rules[0]] if all(k in own for own in columns.values())]
    seeds: dict[Any, Any] = {}
    for key in sorted(common, key=lambda k: not columns["undefended"][k].verdict.unsafe):
        seeds.setdefault(key[3], key)  # each scene once
    chosen = list(seeds.values())[:count]
    if not chosen:
        return None
    strip = Image.new("RGB", (len(columns) * (SIDE + 4), 32 + len(chosen) * (SIDE + 4)), "white")
    pen = ImageDraw.Draw(strip)
    pen.text((2, 2), base, fill="black")
    for x, (name, own) in enumerate(columns.items()):
        pen.text((x * (SIDE + 4) + 2, 18), name, fill="black")
        for y, key in enumerate(chosen):
            strip.paste(shown(own[key], out), (x * (SIDE + 4), 32 + y * (SIDE + 4)))
    return strip
