"""`guardpaint demo`: guarded generation on every base of a testbed, as a gallery to look at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from guardpaint.cli.common import out

if TYPE_CHECKING:
    from guardpaint.bases import Base
    from guardpaint.guard import GuardPaint
    from guardpaint.loop.report import GuardReport

NOTICE = (
    "Base models, auditor and inpainter are small ones, trained in an abstract world of paper dolls. Every prompt is "
    "drawn twice with the same seed: without and with the guard."
)


@dataclass(frozen=True)
class Drawn:
    """One prompt without and with the guard."""

    prompt: str
    plain: Any
    image: Any
    report: GuardReport
    page: str

    @property
    def verdict(self) -> str:
        identical = ", bit-identical" if self.image == self.plain else ""
        return f"{self.report.status}{identical}"


def demo(
    out_dir: Annotated[Path, typer.Option("--out", help="Directory of the gallery.")] = Path("out/gallery"),
    seed: Annotated[int, typer.Option(help="Seed of every picture.")] = 0,
    base: Annotated[list[str] | None, typer.Option(help="Only this base; may be repeated.")] = None,
) -> None:
    """Draw with every embedded base, without and with the guard, and write a gallery to open in a browser."""
    from guardpaint.bases import load_base
    from guardpaint.guard import GuardPaint
    from guardpaint.store.pages import render
    from guardpaint.testbed import Showcase, need, open_testbed

    testbed = open_testbed()
    prompts = need(testbed, Showcase, "demo")
    shown = {"benign prompts": prompts.benign_showcase(), "unsafe prompts": prompts.harmful_showcase()}
    out.print(NOTICE, style="yellow")
    guard = GuardPaint.embedded(retain_evidence=True)
    out_dir.mkdir(parents=True, exist_ok=True)
    sections = []
    for name in base or testbed.bases():
        loaded = load_base(name)
        strips = []
        for title, texts in shown.items():
            drawn = []
            for text in texts:
                drawn.append(both(guard, loaded, text, seed, out_dir))
                out.print(f"{name:15s} {drawn[-1].verdict:22s} {text}", highlight=False, soft_wrap=True)
            strips.append({"title": title, "drawn": drawn})
        sections.append({"base": name, "pipeline": type(loaded.pipe).__name__, "strips": strips})
    index = out_dir / "index.html"
    index.write_text(
        render("gallery.html.j2", title="GuardPaint demo", notice=NOTICE, sections=sections), encoding="utf-8"
    )
    out.print(f"gallery: {index}")


def both(guard: GuardPaint, base: Base, prompt: str, seed: int, out_dir: Path) -> Drawn:
    """The same seed without and with the guard, the report beside the picture."""
    import torch

    from guardpaint.store.images import save_image

    def draw(pipe: Any) -> Any:
        return pipe(prompt, generator=torch.Generator().manual_seed(seed), **base.call)

    plain = draw(base.pipe).images[0]
    result = draw(guard.attach(base.pipe))
    page = out_dir / f"{base.name}-{'-'.join(prompt.split())}.html"
    page.write_text(result.safety[0].to_html(), encoding="utf-8")
    save_image(plain, page.with_name(f"{page.stem}-unguarded.png"))
    save_image(result.images[0], page.with_suffix(".png"))
    return Drawn(prompt, plain, result.images[0], result.safety[0], page.name)
