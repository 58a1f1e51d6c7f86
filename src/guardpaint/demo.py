"""`make demo`: guarded generation on every family, as a gallery to look at."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from guardpaint import tiny
from guardpaint.doubles import AlwaysSafe, AlwaysUnsafe, FlagsBright, PaintsFlat
from guardpaint.images import save_image
from guardpaint.report_html import STYLE, figure
from guardpaint.system import GuardPaint

NOTICE = (
    "The models in this demo are small and random-initialised, so the pictures are noise, and the detector is a "
    "stand-in that flags bright pixels. What you see is the real loop on real diffusers pipelines: audits, "
    "tournaments, reinsertion and verdicts."
)


def cases() -> list[tuple[str, GuardPaint]]:
    """What a guard can do with a picture."""
    return [
        ("nothing found", GuardPaint(AlwaysSafe(), PaintsFlat())),
        ("bright pixels flagged", GuardPaint(FlagsBright(), PaintsFlat()).configured(retain_evidence=True)),
        ("nothing helps", GuardPaint(AlwaysUnsafe(), PaintsFlat())),
    ]


def run(out_dir: Path, seed: int, out: Console) -> None:
    """Write the gallery; prints each verdict as it comes."""
    out.print(NOTICE, style="yellow")
    sections = []
    for family in tiny.BASES:
        pipe = tiny.pipeline(family, seed)
        plain = generate(pipe, seed).images[0]
        figures = [figure(plain, "unguarded")]
        for name, guard in cases():
            result = generate(guard.attach(pipe), seed)
            report = result.safety[0]
            page = out_dir / f"{family}-{name.replace(' ', '-')}.html"
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(report.to_html(), encoding="utf-8")
            save_image(result.images[0], page.with_suffix(".png"))
            identical = " (bit-identical)" if result.images[0] == plain else ""
            figures.append(
                f'<a href="{page.name}">{figure(result.images[0], f"{name}: {report.status}{identical}")}</a>'
            )
            out.print(f"{family:5s} {name:22s} {report.status}{identical}", highlight=False)
        title = html.escape(type(pipe).__name__)
        sections.append(f'<h2>{title}</h2><div class="strip">{"".join(figures)}</div>')
    gallery = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>GuardPaint demo</title><style>{STYLE}'
        f"figure img {{ width: 192px; image-rendering: pixelated }}</style><h1>GuardPaint demo</h1><p>{NOTICE}</p>"
        f"<p>Click a picture for its report.</p>{''.join(sections)}</html>"
    )
    index = out_dir / "index.html"
    index.write_text(gallery, encoding="utf-8")
    out.print(f"gallery: {index}")


def generate(pipe: Any, seed: int) -> Any:
    g = torch.Generator().manual_seed(seed)
    return pipe("a small house by the sea", num_inference_steps=10, height=64, width=64, generator=g)
