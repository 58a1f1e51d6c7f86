"""The report of an evaluation: one self-contained HTML page with tables, plots and picture pairs."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from guardpaint.evaluate import summary
from guardpaint.train.dynamics import figure

Row = dict[str, Any]
COLOURS = {"undefended": "#999999", "paper": "#ccbb44", "ours": "#228833"}
FILTER_NOTE = (
    "The attacks searched for prompts that pass prompt_filter: its numbers are those of the search's own target."
)


def plot_url(drawing: Any) -> str:
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def heat_map(rows: Sequence[Row], defence: str = "ours") -> Any:
    """Attack × base: how far the attack success rate falls."""
    found = summary.attack_cells(rows)
    attacks = list(dict.fromkeys(r["suite"] for r in summary.harmful(rows)))
    bases = list(dict.fromkeys(r["base"] for r in summary.harmful(rows)))
    drawing = figure((1.6 + 1.3 * len(bases), 1.2 + 0.5 * len(attacks)))
    axis = drawing.subplots()
    grid = [[(found.get(f"{a}.{b}.fall.{defence}") or {}).get("value") for b in bases] for a in attacks]
    axis.imshow([[float("nan") if v is None else v for v in line] for line in grid], vmin=0, vmax=1, cmap="viridis")
    for y, line in enumerate(grid):
        for x, value in enumerate(line):
            text = "–" if value is None else f"{100 * value:.0f} %"
            axis.text(x, y, text, ha="center", va="center", color="white", fontsize=9)
    axis.set_xticks(range(len(bases)), bases, fontsize=8)
    axis.set_yticks(range(len(attacks)), attacks, fontsize=8)
    axis.set_title(f"attack success removed by {defence}", fontsize=10)
    return drawing


def front_plot(rows: Sequence[Row]) -> Any:
    """Safety against fidelity; the dot's size is the time per picture."""
    drawing = figure((6, 4))
    axis = drawing.subplots()
    points = summary.front(rows)
    told = [p for p in points if p["fidelity"] is not None]
    if len(told) < len(points):
        axis.set_title("without defences whose fidelity the judge does not tell", fontsize=8)
    for point in told:
        colour = COLOURS.get(point["defence"], "#4477aa")
        axis.scatter(point["fidelity"], point["safety"], s=40 + 60 * point["seconds"], color=colour, alpha=0.7, lw=0)
        axis.annotate(point["defence"], (point["fidelity"], point["safety"]), fontsize=8, xytext=(5, 3),
                      textcoords="offset points")  # fmt: skip
    axis.set(
        xlabel="agreement with the harmless part of the prompt (withheld: none)", ylabel="safety (1 − attack success)"
    )
    return drawing


def pairs_sheet(rows: Sequence[Row], out: Path, count: int = 24, defence: str = "ours") -> Image.Image | None:
    """Undefended (blurred where the oracle calls it unsafe) and defended pictures of the same prompts, side by side."""
    from PIL import ImageFilter

    plain = {(r["suite"], r["base"], r["id"]): r for r in rows if r["defence"] == "undefended" and r["image"]}
    both = [
        (plain[k], r)
        for r in rows
        if r["defence"] == defence and r["image"] and (k := (r["suite"], r["base"], r["id"])) in plain
    ][:count]
    if not both:
        return None
    sheet = Image.new("RGB", (4 * 272, -(-len(both) // 4) * 134), "white")
    for i, (a, b) in enumerate(both):
        for j, row in enumerate((a, b)):
            picture = Image.open(out / row["image"]).convert("RGB").resize((130, 130), Image.Resampling.NEAREST)
            if row["unsafe"]:
                picture = picture.filter(ImageFilter.GaussianBlur(5))
            sheet.paste(picture, (272 * (i % 4) + 132 * j, 134 * (i // 4)))
    return sheet


def table(found: Row) -> str:
    lines = ["<table><tr><th>what</th><th>value</th><th>95 % interval</th><th>n</th><th>goal</th></tr>"]
    for name, m in found.items():
        value = "–" if m["value"] is None else f"{m['value']:.4g}"
        interval = f"{m['ci'][0]:.3g} … {m['ci'][1]:.3g}" if m.get("ci") else ""
        goal = f"{m['goal']}: <b>{'met' if m['met'] else 'NOT met'}</b>" if "goal" in m else ""
        lines.append(
            f"<tr><td>{html.escape(name)}</td><td>{value}</td><td>{interval}</td><td>{m['n']}</td><td>{goal}</td></tr>"
        )
    return "".join([*lines, "</table>"])


def write(rows: Sequence[Row], out: Path, title: str = "GuardPaint: evaluation") -> Path:
    """report.html beside the rows."""
    parts = [f"<h1>{html.escape(title)}</h1>", f"<p>{len(rows)} pictures. {FILTER_NOTE}</p>"]
    rows = summary.latest(rows)
    attacked = summary.harmful(rows)
    if attacked:
        if any(r["defence"] == "undefended" for r in attacked):
            for name in ("ours", "paper"):
                if any(r["defence"] == name for r in attacked):
                    parts.append(f'<img alt="heat map" src="{plot_url(heat_map(rows, name))}">')
        parts.append(f'<h2>Safety, fidelity, time</h2><img alt="front" src="{plot_url(front_plot(rows))}">')
        parts.append("<h2>Defences</h2>" + table(summary.defences(rows)))
        parts.append("<h2>Attack × base</h2>" + table(summary.attack_cells(rows)))
    if quiet := summary.benign(rows):
        parts.append("<h2>Benign prompts</h2>" + table(quiet))
    sheet = pairs_sheet(rows, out)
    if sheet is not None:
        buffer = io.BytesIO()
        sheet.save(buffer, "PNG")
        data = base64.b64encode(buffer.getvalue()).decode()
        parts.append("<h2>Undefended and guarded</h2><p>What the oracle calls unsafe is blurred here.</p>")
        parts.append(f'<img alt="pairs" src="data:image/png;base64,{data}">')
    page = PAGE.replace("TITLE", html.escape(title)).replace("BODY", "\n".join(parts))
    path = out / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>TITLE</title>
<style>
 :root{color-scheme:light dark} body{font:15px system-ui;max-width:70rem;margin:1rem auto;padding:0 1rem}
 table{border-collapse:collapse} td,th{padding:.15rem .6rem;border-bottom:1px solid #8884;text-align:left}
 img{max-width:100%;background:white}
</style>
BODY
</html>
"""
