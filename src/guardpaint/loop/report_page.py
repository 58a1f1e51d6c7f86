"""A report as a self-contained page, like the paper's tournament figure."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from typing import Any

from PIL import Image

from guardpaint.loop.report import Evidence
from guardpaint.types import JsonDict

STYLE = """
:root { color-scheme: light dark; --line: #8886; --good: #2a8f4f; --bad: #c0392b; --gold: #e0a800; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem; border-top: 1px solid var(--line); padding-top: 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } td, th { padding: .2rem .7rem; text-align: right;
border-bottom: 1px solid var(--line) } th:first-child, td:first-child { text-align: left; white-space: nowrap }
.gate { white-space: nowrap; margin-left: .6em }
figure { margin: 0; text-align: center; font-size: .8rem } figure img { width: 112px; border: 3px solid transparent;
border-radius: 4px; image-rendering: auto } .strip { display: flex; flex-wrap: wrap; gap: .6rem; align-items: flex-start }
.won img { border-color: var(--gold) } .status { font-weight: 600 } .passed { color: var(--good) } .failed { color: var(--bad) }
.muted { opacity: .7 } svg { max-width: 100% }
"""


def render(report: JsonDict, evidence: Sequence[Evidence] = ()) -> str:
    """One page, no outside files, no scripts."""
    title = f"GuardPaint report · {report['request_id'][:12]} · image {report['image']}"
    body = [f"<h1>{html.escape(title)}</h1>", summary(report), curve(report)]
    if evidence and evidence[0].blurred:
        body.append('<p class="muted">Pictures are blurred: evidence is kept clear only with retain_evidence.</p>')
    body.append(trajectory(evidence))
    for index, step in enumerate(report["steps"]):
        mine = [e for e in evidence if e.step == step["step"]]
        body.append(step_section(step, mine if index == last_with(report, step["step"]) else []))
    body.append(final_section(report["final"]))
    body.append(posture_section(report["posture"]))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style>'
        + "".join(body)
        + "</html>"
    )


def trajectory(evidence: Sequence[Evidence]) -> str:
    """The audited views in order, each with its heat map."""
    from guardpaint.audit.gradcam import overlay

    views = [e for e in evidence if e.kind == "view"]
    figures = []
    for e in views:
        name = f"step {e.step + 1}" if e.index == 0 else "final image"
        figures.append(figure(e.image, name))
        if e.heat is not None:
            figures.append(figure(overlay(e.image, e.heat), "heat map"))
    return f'<div class="strip">{"".join(figures)}</div>' if figures else ""


def last_with(report: JsonDict, step: int) -> int:
    return max(i for i, s in enumerate(report["steps"]) if s["step"] == step)


def summary(report: JsonDict) -> str:
    prompt = report["prompt"] or (f"sha256 {report['prompt_sha256'][:16]}…" if report["prompt_sha256"] else "unknown")
    errors = "".join(f'<p class="failed">{html.escape(e)}</p>' for e in report["errors"])
    return (
        f'<p>Status <span class="status">{report["status"]}</span> · mode {report["mode"]} · '
        f"{html.escape(report['pipeline'])} ({report['family']}) · seed {report['seed']} · "
        f"{report['seconds']:.2f} s</p><p>Prompt: {html.escape(prompt)}</p>{errors}"
    )


def curve(report: JsonDict) -> str:
    """adv_prob of every auditor pass over progress, with the trigger level."""
    points = [(s["progress"], a["scores"]["adv_prob"]) for s in report["steps"] for a in s["audits"]]
    if not points:
        return '<p class="muted">No step was audited.</p>'
    dots = "".join(
        f'<circle cx="{40 + 520 * x:.1f}" cy="{150 - 130 * y:.1f}" r="4" fill="currentColor"/>' for x, y in points
    )
    trigger = report["posture"]["trigger"]
    level = 150 - 130 * trigger
    return (
        '<svg viewBox="0 0 600 180" width="600" role="img" aria-label="adv_prob over progress">'
        '<line x1="40" y1="150" x2="560" y2="150" stroke="currentColor"/>'
        '<line x1="40" y1="20" x2="40" y2="150" stroke="currentColor"/>'
        f'<line x1="40" y1="{level}" x2="560" y2="{level}" stroke="#c0392b" stroke-dasharray="5 4"/>'
        f'<text x="44" y="{level - 4}" font-size="11" fill="#c0392b">trigger {trigger:.2f}</text>'
        f"{dots}"
        '<text x="300" y="172" font-size="11" text-anchor="middle" fill="currentColor">progress</text>'
        '<text x="4" y="12" font-size="11" fill="currentColor">adv_prob</text></svg>'
    )


def step_section(step: JsonDict, evidence: Sequence[Evidence]) -> str:
    from guardpaint.audit.gradcam import overlay

    head = (
        f"<h2>Step {step['step'] + 1} of {step['steps']} · progress {step['progress']:.2f} · "
        f"noise {step['noise']:.3f} · view {step['view']}</h2>"
    )
    rows = "".join(
        f"<tr><td>{a['pixels']} px, {a['decoder']}</td>"
        + "".join(f"<td>{number(a['scores'][k])}</td>" for k in ("adv_prob", "S", "F", "P", "B"))
        + f"<td>{html.escape(a['reason'] or 'benign')}</td></tr>"
        for a in step["audits"]
    )
    table = (
        "<table><tr><th>audit</th><th>adv</th><th>S</th><th>F</th><th>P</th><th>B</th><th>finding</th></tr>"
        f"{rows}</table>"
    )
    parts = [head, table]
    shown = [figure(e.image, "control") for e in evidence if e.kind == "control"]
    shown += [figure(overlay(e.image, e.heat), f"Grad-CAM, {e.kind[4:]}") for e in evidence if e.kind[:4] == "why "]
    if shown:
        parts.append(f'<div class="strip">{"".join(shown)}</div>')
    for k, t in enumerate(step["tournaments"]):
        parts.append(tournament(t, [e for e in evidence if e.kind == f"candidate {k}"]))
    if step["reinsertion"]:
        r = step["reinsertion"]
        note = f" ({html.escape(r['note'])})" if r.get("note") else ""
        parts.append(f"<p>Reinserted by <b>{r['rule']}</b>{note}.</p>")
    parts += [f'<p class="muted">{html.escape(n)}</p>' for n in step["notes"]]
    times = " · ".join(f"{k} {v:.3f} s" for k, v in step["timings"].items())
    return "".join([*parts, f'<p class="muted">{times}</p>'])


def tournament(t: JsonDict, evidence: Sequence[Evidence]) -> str:
    pictures = {e.index: e.image for e in evidence}
    strip = "".join(
        figure(pictures[i], f"u = {c['utility']:.4f}", won=i == t["winner"])
        for i, c in enumerate(t["candidates"])
        if i in pictures
    )
    rows = ""
    for i, c in enumerate(t["candidates"]):
        s, k = c["scores"], c["knobs"]
        gates = " ".join(
            f'<span class="gate {"passed" if g["passed"] else "failed"}">{g["name"]} {number(g["value"])}'
            f"/{number(g['need'])}</span>"
            for g in c["gates"]
        )
        rows += (
            f"<tr><td>{i + 1}{' ★' if i == t['winner'] else ''}</td><td>{k['cfg']:.1f}</td><td>{k['dilation']:.2f}</td>"
            f"<td>{k['feather']:.2f}</td><td>{k['jitter']:.2f}</td><td>{k['depth']}</td><td>{k['seed_offset']}</td>"
            + "".join(f"<td>{s[n]:.3f}</td>" if s else "<td>–</td>" for n in "SFPBQ")
            + f"<td>{gates if s else 'left out after its preview'}</td><td>{c['utility']:.4f}</td></tr>"
        )
    outcome = "the control stays" if t["winner"] is None else f"candidate {t['winner'] + 1} wins"
    return (
        f"<h3>Region {t['region']} · {html.escape(t['category'])} · {100 * t['coverage']:.1f} % of the view · {outcome}</h3>"
        f'<div class="strip">{strip}</div><table><tr><th>#</th><th>CFG</th><th>dilate</th><th>feather</th><th>jitter</th>'
        "<th>depth</th><th>seed</th><th>S</th><th>F</th><th>P</th><th>B</th><th>Q</th><th>gates (value/need)</th>"
        f"<th>u</th></tr>{rows}</table>"
    )


def final_section(final: JsonDict) -> str:
    ladder = "".join(f"<li>{html.escape(r['rung'])}: {html.escape(r['outcome'])}</li>" for r in final["ladder"])
    return f"<h2>Final verdict: {final['verdict']}</h2>" + (f"<ol>{ladder}</ol>" if ladder else "")


def posture_section(posture: JsonDict) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(k)}</td><td>{html.escape(str(v))}</td></tr>"
        for k, v in posture.items()
        if k != "skipped"
    )
    skipped = "".join(f"<li>{html.escape(s['what'])}: {html.escape(s['why'])}</li>" for s in posture["skipped"])
    return f"<h2>Effective posture</h2><table>{rows}</table>" + (
        f"<p>Skipped:</p><ul>{skipped}</ul>" if skipped else ""
    )


def number(value: Any) -> str:
    return "–" if value is None else f"{value:.3f}"


def figure(image: Image.Image, caption: str, won: bool = False) -> str:
    small = image.copy()
    small.thumbnail((224, 224))
    buffer = io.BytesIO()
    small.save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    css = ' class="won"' if won else ""
    return (
        f'<figure{css}><img alt="{html.escape(caption)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )
