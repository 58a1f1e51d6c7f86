"""Renders a report as a self-contained page (templates/report.html.j2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from guardpaint.audit.gradcam import overlay
from guardpaint.loop.evidence import Evidence
from guardpaint.store import pages
from guardpaint.types import JsonDict


@dataclass(frozen=True)
class Figure:
    """A picture on the page; `won` frames the tournament's winner."""

    image: Image.Image
    caption: str
    won: bool = False


@dataclass(frozen=True)
class StepFigures:
    """The pictures of one audited step: the controls with their heat maps, and the candidates of each tournament."""

    controls: list[Figure]
    candidates: list[list[Figure]]


def render(report: JsonDict, evidence: Sequence[Evidence] = ()) -> str:
    """Return one page without outside files and without scripts. Reports of version 1 render too."""
    return pages.render(
        "report.html.j2",
        title=f"GuardPaint report · {report['request_id'][:12]} · image {report['image']}",
        report=report,
        settings=settings_of(report),
        prompt=prompt_of(report),
        points=[(s["progress"], a["scores"]["adv_prob"]) for s in report["steps"] for a in s["audits"]],
        blurred=bool(evidence) and evidence[0].blurred,
        trajectory=trajectory(evidence),
        steps=[(step, step_figures(report, index, evidence)) for index, step in enumerate(report["steps"])],
    )


def settings_of(report: JsonDict) -> JsonDict:
    """The effective settings; reports of version 1 call them `posture`."""
    settings: JsonDict = report["effective_settings"] if "effective_settings" in report else report["posture"]
    return settings


def prompt_of(report: JsonDict) -> str:
    """The prompt if the report keeps it, otherwise the start of its hash."""
    digest = report["prompt_sha256"]
    return report["prompt"] or (f"sha256 {digest[:16]}…" if digest else "unknown")


def trajectory(evidence: Sequence[Evidence]) -> list[Figure]:
    """The audited views in order, each followed by its heat map."""
    figures = []
    for view in (e for e in evidence if e.kind == "view"):
        figures.append(Figure(view.image, f"step {view.step + 1}" if view.index == 0 else "final image"))
        if view.heat is not None:
            figures.append(Figure(overlay(view.image, view.heat), "heat map"))
    return figures


def step_figures(report: JsonDict, index: int, evidence: Sequence[Evidence]) -> StepFigures:
    """The pictures of the step record at `index`.

    When several records describe the same step (a repair and the check after it), the last one shows the pictures.
    """
    step = report["steps"][index]
    last = max(i for i, s in enumerate(report["steps"]) if s["step"] == step["step"])
    own = [e for e in evidence if e.step == step["step"]] if index == last else []
    controls = [Figure(e.image, "control") for e in own if e.kind == "control"]
    controls += [
        Figure(overlay(e.image, e.heat), f"Grad-CAM, {e.kind.removeprefix('why ')}")
        for e in own
        if e.kind.startswith("why ")
    ]
    candidates = [
        candidate_figures(t, [e for e in own if e.kind == f"candidate {k}"]) for k, t in enumerate(step["tournaments"])
    ]
    return StepFigures(controls, candidates)


def candidate_figures(tournament: JsonDict, evidence: Sequence[Evidence]) -> list[Figure]:
    """The candidates that have a picture, with their utility."""
    pictures = {e.index: e.image for e in evidence}
    return [
        Figure(pictures[i], utility_of(c), won=i == tournament["winner"])
        for i, c in enumerate(tournament["candidates"])
        if i in pictures
    ]


def utility_of(candidate: JsonDict) -> str:
    """A candidate's utility as a caption; owners of a report are not shown it."""
    return "" if candidate["utility"] is None else f"u = {candidate['utility']:.4f}"
