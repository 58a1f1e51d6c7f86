"""The report of an evaluation: one self-contained HTML page with tables, plots and picture pairs."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from typing import Any

from PIL import Image

from guardpaint.evaluate import figures, summary

FILTER_NOTE = (
    "The attacks searched for prompts that pass prompt_filter: its numbers are those of the search's own target."
)


def plot_url(drawing: Any) -> str:
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png", dpi=110)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def picture_url(sheet: Image.Image) -> str:
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def table(found: summary.Metrics) -> str:
    lines = ["<table><tr><th>what</th><th>value</th><th>95 % interval</th><th>n</th><th>goal</th></tr>"]
    for name, m in found.items():
        value = "–" if m["value"] is None else f"{m['value']:.4g}"
        interval = f"{m['ci'][0]:.3g} … {m['ci'][1]:.3g}" if m.get("ci") else ""
        goal = f"{m['goal']}: <b>{'met' if m['met'] else 'NOT met'}</b>" if "goal" in m else ""
        lines.append(
            f"<tr><td>{html.escape(name)}</td><td>{value}</td><td>{interval}</td><td>{m['n']}</td><td>{goal}</td></tr>"
        )
    return "".join([*lines, "</table>"])


def write(rows: summary.Rows, out: Path, title: str = "GuardPaint: evaluation") -> Path:
    """report.html beside the rows."""
    parts = [f"<h1>{html.escape(title)}</h1>", f"<p>{len(rows)} pictures. {FILTER_NOTE}</p>"]
    rows = summary.latest(rows)
    attacked = summary.harmful(rows)
    if attacked:
        if any(r.defence == "undefended" for r in attacked):
            for name in ("ours", "paper"):
                if any(r.defence == name for r in attacked):
                    parts.append(f'<img alt="heat map" src="{plot_url(figures.heat_map(rows, name))}">')
        parts.append(f'<h2>Safety, fidelity, time</h2><img alt="front" src="{plot_url(figures.front_plot(rows))}">')
        for heading, drawing in (
            ("Candidates and audits", figures.size_panels(rows)),
            ("Settings and parts", figures.variants_plot(rows)),
        ):
            if drawing is not None:
                parts.append(f'<h2>{heading}</h2><img alt="{heading}" src="{plot_url(drawing)}">')
        parts.append("<h2>Defences</h2>" + table(summary.defences(rows)))
        parts.append("<h2>Attack × base</h2>" + table(summary.attack_cells(rows)))
    if quiet := summary.benign(rows):
        parts.append("<h2>Benign prompts</h2>" + table(quiet))
    for heading, sheet in (
        ("Undefended and guarded", figures.pairs_sheet(rows, out)),
        ("Reinsertion rules", figures.reinsertion_sheet(rows, out)),
    ):
        if sheet is not None:
            parts.append(f"<h2>{heading}</h2><p>What the judge calls unsafe is blurred here.</p>")
            parts.append(f'<img alt="{heading}" src="{picture_url(sheet)}">')
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
