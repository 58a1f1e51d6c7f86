"""When to step in: the same scenes with audits from different moments of the trajectory on, or only at its end.

guardpaint eval moment --base mini-sd --base mini-sd3 --count 60 --out runs/moment

Every scene is drawn once for each start. The picture at the end of the trajectory is what repairs inside of it make of
the scene alone; the picture that is released had a final repair as well. The picture without any audit before the end
is the undefended one, and with the final repair it is what repairing finished pictures makes of the scene. There is no
last-resort ladder: what is still flagged is released, so that the numbers show repairs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from PIL import Image
from torch import Tensor

from guardpaint.bases import Base
from guardpaint.data.judges import Judge
from guardpaint.draft.tap import tapped
from guardpaint.errors import BadInput
from guardpaint.evaluate.outside import changed
from guardpaint.guard import GuardPaint
from guardpaint.loop.release import release
from guardpaint.loop.report import Status
from guardpaint.store.checkpoint import short_hash
from guardpaint.store.images import from_pil
from guardpaint.store.progress import bar
from guardpaint.store.rows import append_rows, read_rows
from guardpaint.testbed import Prompt
from guardpaint.types import SAFE
from guardpaint.verify.seam import seam_quality

STARTS = (0.4, 0.55, 0.7, 0.85, 1.0)
"""Progress from which on every step is audited; 1: only the finished picture."""
PARTS = ("trajectory", "both")
"""The picture at the end of the trajectory, and the one that is released."""
Row = dict[str, Any]
SceneKey = tuple[str, str, int]
"""Configuration, prompt and seed."""


def config_of(guard: GuardPaint, base: Base, judge: Judge) -> str:
    """Hash of everything that rows depend on: a resumed run does not take rows of other weights for its own."""
    settings = guard.config.to_dict(), guard.policy.to_dict()
    return short_hash(guard.weight_hashes(), *settings, base.digest(), judge.identity)


def name_of(start: float) -> str:
    """A start in the names of metrics: 0.55 is s55, and the end is `end`."""
    return "end" if start >= 1 else f"s{round(100 * start)}"


@dataclass(frozen=True)
class Drawing:
    """One scene, drawn with one start."""

    inside: Image.Image
    """At the end of the trajectory."""
    released: Image.Image | None
    inside_mask: Bool[Tensor, "h w"] | None
    """What repairs inside of the trajectory painted."""
    mask: Bool[Tensor, "h w"] | None
    seconds: tuple[float, float]
    """Until the end of the trajectory, and until the release."""
    tournaments: tuple[int, int]
    accepted: tuple[int, int]
    audits: int
    status: str
    error: str


@torch.no_grad()
def draw(guard: GuardPaint, base: Base, prompt: Prompt) -> Drawing:
    """Draw a scene under guard, and keep the picture as it is before the final verdict."""
    call = guard.open(base.pipe, door="attach", prompts=[prompt.text], seeds=lambda i, n: (prompt.seed, i))
    began = time.perf_counter()
    with tapped(base.pipe, call.setup.family, call):
        images = base.draw([prompt.text], [prompt.seed])
    middle = time.perf_counter() - began
    call.ensure(1)
    recorder = call.state.images[0].recorder
    inside_mask = recorder.painted
    released, reports = release(call, images, "pil")
    total = time.perf_counter() - began
    report = reports[0]
    last = call.state.index - 1
    played = [(step.step, t.winner is not None) for step in report.steps for t in step.tournaments]
    before = [won for step, won in played if step < last]
    shown = report.status in (Status.CLEAN, Status.REPAIRED, Status.RELEASED_FLAGGED)
    return Drawing(
        images[0],
        released[0] if shown else None,
        inside_mask,
        report.painted,
        (middle, total),
        (len(before), len(played)),
        (sum(before), sum(won for _, won in played)),
        sum(step.step < last for step in report.steps),
        str(report.status.value),
        report.errors[0] if report.errors else "",
    )


@dataclass(frozen=True)
class Scenes:
    """What every start is measured on."""

    guard: GuardPaint
    base: Base
    judge: Judge
    starts: Sequence[float] = STARTS
    config: str = ""
    """Hash that rows carry, so that a resumed run takes none of other weights."""

    def guarded(self, start: float) -> GuardPaint:
        """The guard that audits every step from a start on, or only the finished picture, and has no ladder."""
        policy = replace(self.guard.policy, last_resort=("keep",))
        if start >= 1:
            return self.guard.configured(policy=policy, audits=1, audit_start=1.0)
        return self.guard.configured(policy=policy, audits=1000, audit_start=start)

    def rows(self, prompt: Prompt) -> list[Row]:
        """The rows of one scene: two for each start."""
        drawn = {start: draw(self.guarded(start), self.base, prompt) for start in sorted({*self.starts, 1.0})}
        plain = drawn[1.0]
        found = []
        for start, drawing in drawn.items():
            for k, part in enumerate(PARTS):
                image, mask = (drawing.inside, drawing.inside_mask) if k == 0 else (drawing.released, drawing.mask)
                row: Row = {
                    "base": self.base.name,
                    "config": self.config,
                    "id": prompt.id,
                    "seed": prompt.seed,
                    "prompt": prompt.text,
                    "category": prompt.category,
                    "start": name_of(start),
                    "part": part,
                    "steps": self.base.settings.steps,
                    "audits": drawing.audits,
                    "tournaments": drawing.tournaments[k],
                    "accepted": drawing.accepted[k],
                    "seconds": round(drawing.seconds[k], 4),
                    "status": drawing.status if k else "",
                    "error": drawing.error,
                }
                found.append(row | self.judged(image, prompt) | self.compared(image, plain.inside, mask))
        return found

    def judged(self, image: Image.Image | None, prompt: Prompt) -> Row:
        """What the judge says; whether the auditor flags it; the share of requested attributes that are present."""
        if image is None:
            return {"released": 0, "unsafe": 0, "flagged": 0, "whole": 0}
        said, right = self.judge.verdict(image.convert("RGB"), prompt.asked)
        pixels = from_pil(image)
        flagged = self.guard.finding(pixels, self.guard.audit_image(pixels, prompt.text), prompt.text) is not None
        row: Row = {"released": 1, "unsafe": int(said != SAFE), "flagged": int(flagged)}
        row["whole"] = int(said == SAFE and not flagged)
        return row | ({"agreement": sum(right.values()) / len(right)} if right else {})

    def compared(self, image: Image.Image | None, plain: Image.Image, mask: Bool[Tensor, "h w"] | None) -> Row:
        """Seam around what was painted, detail inside, and SSIM outside, against the undefended picture."""
        if image is None or mask is None or not mask.any():
            return {}
        after, before = from_pil(image), from_pil(plain)
        seam = seam_quality(self.guard.parts.seam, after[None], before, mask[None].float())
        row: Row = {"coverage": float(mask.float().mean()), "seam": float(seam[0])}
        row["detail"] = fine(after, mask) / max(1e-9, fine(before, mask))
        return row | changed(after, before, mask)


def fine(image: Float[Tensor, "3 h w"], mask: Bool[Tensor, "h w"]) -> float:
    """Fine structure inside a mask: mean absolute Laplacian of the grey values."""
    grey = image.mean(0)[None, None]
    kernel = torch.tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]])[None, None]
    edges = torch.nn.functional.conv2d(torch.nn.functional.pad(grey, (1, 1, 1, 1), mode="replicate"), kernel)
    return float(edges[0, 0].abs()[mask].mean())


@dataclass(frozen=True)
class MomentOptions:
    """What `guardpaint eval moment` measures."""

    guard: GuardPaint
    bases: Sequence[Base]
    prompts: Sequence[Prompt]
    judge: Judge
    out: Path
    """Folder of the rows; a later run resumes."""
    starts: Sequence[float] = STARTS


def measure(options: MomentOptions) -> list[Row]:
    """The rows of all scenes on all bases; scenes that have rows already are not drawn again."""
    if not options.prompts:
        raise BadInput("no prompts to draw")
    file = options.out / "rows.jsonl"
    wanted = {name_of(s) for s in (*options.starts, 1.0)}
    stored: dict[SceneKey, list[Row]] = {}
    for row in read_rows(file):
        stored.setdefault((row["config"], row["prompt"], row["seed"]), []).append(row)
    found: list[Row] = []
    with bar("moment", len(options.bases) * len(options.prompts)) as advance:
        for base in options.bases:
            options.guard.to(base.pipe._execution_device)
            config = config_of(options.guard, base, options.judge)
            scenes = Scenes(options.guard, base, options.judge, options.starts, config)
            for prompt in options.prompts:
                own = stored.get((config, prompt.text, prompt.seed), [])
                if not wanted <= {r["start"] for r in own}:
                    own = scenes.rows(prompt)
                    append_rows(file, own)
                found += {(r["start"], r["part"]): r for r in own if r["start"] in wanted}.values()
                advance(1)
    return found
