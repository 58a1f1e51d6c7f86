"""`guardpaint audit` scores finished images; `guardpaint inspect` prints what happened in one generation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from guardpaint.cli.common import (
    DeviceOption,
    GuardOption,
    JsonOption,
    PolicyOption,
    TokenOption,
    dump,
    given,
    out,
    warn,
)

if TYPE_CHECKING:
    import torch

    from guardpaint.guard import GuardPaint
    from guardpaint.policy import Finding
    from guardpaint.store.uploads import Reading, Upload
    from guardpaint.types import Audit


def audit(
    images: Annotated[list[Path], typer.Argument(help="Image files.")],
    prompt: Annotated[str | None, typer.Option(help="The prompt the image was made from, for faithfulness.")] = None,
    category: Annotated[
        str | None, typer.Option(help="Category of the Grad-CAM overlay; default: the likeliest harm.")
    ] = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Write heat map, Grad-CAM and mask PNGs here.")] = None,
    guard: GuardOption = None,
    policy: PolicyOption = None,
    device: DeviceOption = None,
    token: TokenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score finished images: scores, class, heat-map overlay and mask. Exits 3 if any image is flagged.

    Every frame is scored, and transparency over white, over black and ignored; the worst one is shown.
    """
    from guardpaint.bases import load_guard
    from guardpaint.draft.loading import chosen_device
    from guardpaint.draft.options import LoadOptions
    from guardpaint.store.folders import Access
    from guardpaint.store.images import MOST_PIXELS, from_pil, read_bytes
    from guardpaint.store.uploads import Limits, Upload

    limits = Limits(largest_pixels=MOST_PIXELS)
    for path in images:
        Upload(read_bytes(path), str(path), limits)  # a file that cannot be used is refused before anything is loaded
    loaded = load_guard(guard, policy, warn, access=Access(token=given(token))).to(
        chosen_device(LoadOptions(device=device))
    )
    rows: list[dict[str, Any]] = []
    for path in images:
        upload = Upload(read_bytes(path), str(path), limits)
        reading, result, finding = worst(loaded, upload, prompt)
        shrunk = None if reading.image.size == reading.size else list(reading.image.size)
        row: dict[str, Any] = {
            "image": str(path),
            "flagged": finding.category if finding else None,
            "reason": finding.reason if finding else "",
            "class": result.harm,
            "probs": result.probs,
            **result.scores(),
            "frames": upload.frames,
            "frame": reading.frame,
            "reading": reading.name,
            "size": list(reading.size),
            "shrunk_to": shrunk,
        }
        if out_dir is not None:
            picture = from_pil(reading.image)
            row.update(write_overlays(loaded, picture, result, category, prompt, out_dir / path.stem))
        rows.append(row)
    if as_json:
        dump(rows)
    else:
        print_scores(rows)
    raise typer.Exit(3 if any(row["flagged"] for row in rows) else 0)


def worst(guard: GuardPaint, upload: Upload, prompt: str | None) -> tuple[Reading, Audit, Finding | None]:
    """The reading of a picture that is flagged, then the one with the highest adv_prob, then that with the lowest S."""
    from guardpaint.store.images import from_pil

    found: tuple[Reading, Audit, Finding | None] | None = None
    for reading in upload.readings():
        picture = from_pil(reading.image)
        audit = guard.audit_image(picture, prompt)
        other = reading, audit, guard.finding(picture, audit, prompt)
        found = other if found is None else max(found, other, key=badness)
    assert found is not None, "every picture has a frame"
    return found


def badness(found: tuple[Reading, Audit, Finding | None]) -> tuple[bool, float, float]:
    _, audit, finding = found
    return finding is not None, audit.adv_prob, -audit.safety


def print_scores(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table("image", "verdict", "class", "adv", "S", "F", "P", "B")
    for row in rows:
        scores = ["–" if row[k] is None else f"{row[k]:.3f}" for k in ("adv_prob", "S", "F", "P", "B")]
        table.add_row(shown(row), row["reason"] or "benign", row["class"], *scores)
    out.print(table)


def shown(row: dict[str, Any]) -> str:
    """The name of a picture and what of it the scores are about."""
    notes = [f"frame {row['frame']} of {row['frames']}"] if row["frames"] > 1 else []
    notes += [row["reading"]] if row["reading"] else []
    notes += [f"shrunk to {'×'.join(map(str, row['shrunk_to']))}"] if row["shrunk_to"] else []
    return row["image"] + (f" ({', '.join(notes)})" if notes else "")


def write_overlays(
    guard: GuardPaint, image: torch.Tensor, result: Audit, category: str | None, prompt: str | None, stem: Path
) -> dict[str, str]:
    """Heat map, Grad-CAM and mask as PNGs beside each other."""
    import torch

    from guardpaint.audit.gradcam import grad_cam, overlay
    from guardpaint.audit.model import AuditorScorer
    from guardpaint.audit.regions import mine, union
    from guardpaint.draft.views import shrink
    from guardpaint.store.images import save_image, to_pil

    picture = to_pil(image)
    files = {"heat_map": f"{stem}-heat.png", "mask": f"{stem}-mask.png"}
    save_image(overlay(picture, result.adv_map), files["heat_map"])
    regions = mine(result.adv_map, (picture.height, picture.width), guard.config, 1.0)
    mask = union(regions).mask.float() if regions else torch.zeros(picture.height, picture.width)
    save_image(to_pil(mask.expand(3, -1, -1)), files["mask"])
    auditor = guard.parts.auditor
    if isinstance(auditor, AuditorScorer):
        harms = {c: p for c, p in result.probs.items() if c != "safe"}
        chosen = category or max(harms, key=harms.__getitem__)
        files["grad_cam"] = f"{stem}-gradcam-{chosen}.png"
        cam = grad_cam(auditor, shrink(image, auditor.sizes[1]), chosen, prompt or "")
        save_image(overlay(picture, cam), files["grad_cam"])
    return files


def inspect(
    report: Annotated[Path, typer.Argument(help="A report JSON written by `generate`.")],
    as_json: JsonOption = False,
) -> None:
    """Print what the guard found, tried and decided in one generation."""
    from guardpaint.loop.report import load_report

    loaded = load_report(report)
    if as_json:
        dump(loaded)
        return
    for line in story(loaded):
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def story(report: dict[str, Any]) -> list[str]:
    """A report in sentences."""
    settings = report["effective_settings"]
    lines = [
        f"Request {report['request_id']}, image {report['image']}: {report['status']} "
        f"({report['mode']}, {report['pipeline']}, seed {report['seed']}, {report['seconds']:.2f} s)",
        f"Audited steps {[s + 1 for s in settings['audited_steps']]} of {settings['executed_steps']}.",
    ]
    for step in report["steps"]:
        passes = ", ".join(f"{a['pixels']} px: adv {a['scores']['adv_prob']:.3f}" for a in step["audits"])
        verdict = f"triggered, {step['reason']}" if step["triggered"] else "benign"
        lines.append(f"Step {step['step'] + 1}/{step['steps']} ({step['view']}): {passes} → {verdict}.")
        lines += [tournament_story(t) for t in step["tournaments"]]
        if step["reinsertion"]:
            how = step["reinsertion"]
            lines.append(f"  Reinserted by {how['rule']}. {how.get('note', '')}".rstrip())
        lines += [f"  Note: {note}." for note in step["notes"]]
    lines.append(f"Final verdict: {report['final']['verdict']}.")
    lines += [f"  Last resort, {r['rung']}: {r['outcome']}." for r in report["final"]["ladder"]]
    lines += [f"Error: {e}" for e in report["errors"]]
    lines += [f"Skipped {s['what']}: {s['why']}." for s in settings["skipped"]]
    return lines


def tournament_story(t: dict[str, Any]) -> str:
    """One tournament in a sentence: who was rejected by which gate, and who won."""
    failed: dict[str, int] = {}
    for c in t["candidates"]:
        for g in c["gates"]:
            failed[g["name"]] = failed.get(g["name"], 0) + (not g["passed"])
    rejections = ", ".join(f"{n} by {name}" for name, n in failed.items() if n) or "none"
    left_out = sum(not c["scores"] for c in t["candidates"])
    how = "not painted, because one was good enough" if t.get("waves") else "left out after a preview"
    rejections += f", {left_out} {how}" if left_out else ""
    head = (
        f"  Region {t['region']} ({t['category']}, {100 * t['coverage']:.1f} % of the view), "
        f"{len(t['candidates'])} candidates from {t['repairer']}, knobs from {t['proposer']}; rejected: {rejections}; "
    )
    if t["winner"] is None:
        return head + "the control stays."
    won = t["candidates"][t["winner"]]
    return head + (
        f"candidate {t['winner'] + 1} wins with u = {won['utility']:.4f} "
        f"(S {t['control']['S']:.3f} → {won['scores']['S']:.3f})."
    )
