"""What the commands do, once torch may be imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from paperdolls import bases
from guardpaint.testing import small
from guardpaint.audit.gradcam import grad_cam, overlay
from guardpaint.audit.model import AuditorScorer
from guardpaint.audit.regions import mine, union
from guardpaint.loop.audit_log import AuditLog, read_key
from guardpaint.cli.main import dump
from guardpaint.testing.doubles import AlwaysSafe, AlwaysUnsafe, PaintsFlat, Raises
from guardpaint.errors import BadInput
from guardpaint.store.images import load_image, save_image
from guardpaint.policy import Policy
from guardpaint.loop.verdict import from_pil, to_pil
from guardpaint.loop.report import load_report
from guardpaint.guard import GuardPaint

ASSETS = Path(__file__).parent / "assets"
UNTRAINED = "the guard `tiny` is random-initialised: its verdicts mean nothing"
PAPER_DOLLS = "the embedded guard knows paper dolls only; give one trained on real pictures with --guard"
MOST_PROMPT = 20_000


@dataclass(frozen=True)
class GenerateOptions:
    prompt: str
    base: str
    seed: int
    n: int
    steps: int | None
    size: int | None
    out_dir: Path
    guard: str | None
    policy: Path | None
    mode: str
    retain_evidence: bool
    audit_log: Path | None
    key_file: Path | None
    anchor: Path | None
    as_json: bool


def load_guard(
    name: str | None, policy: Path | None, err: Console, base: str | None = None, **config: Any
) -> GuardPaint:
    """A guard from a checkpoint, the embedded default, or random-initialised (`tiny`) to try the plumbing."""
    if name is None and base is not None and base not in bases.NAMES and not base.startswith("tiny-"):
        known = ", ".join(bases.shipped())
        raise BadInput(
            f"base {base!r}: not one of {known}; any other needs --guard, the embedded one knows paper dolls only"
        )
    if name is None and base is None:
        err.print(f"note: {PAPER_DOLLS}", style="yellow")
    if name != "tiny":
        return GuardPaint.from_pretrained(name or bases.GUARD, policy=policy, **config)
    err.print(f"note: {UNTRAINED}", style="yellow")
    guard = small.guard(**config)
    return guard if policy is None else guard.configured(policy=Policy.load(policy))


def load_base(name: str) -> tuple[Any, dict[str, Any]]:
    """A base pipeline and how to call it: an embedded or a small random one by name, a directory, or a hub id."""
    if name.startswith("tiny-"):
        return small.pipeline(name.removeprefix("tiny-")), {"height": small.PIXELS, "width": small.PIXELS}
    if name in bases.NAMES:
        return bases.load_base(name), bases.settings(name)
    from diffusers import DiffusionPipeline

    path = Path(name)
    if not path.is_dir() and (path.exists() or name.count("/") != 1 or name.startswith((".", "/", "~"))):
        known = ", ".join((*bases.shipped(), *(f"tiny-{family}" for family in small.BASES)))
        raise BadInput(f"base {name!r}: not one of {known}, not a directory, not a hub id owner/name")
    try:
        pipe = DiffusionPipeline.from_pretrained(name)
    except Exception as error:
        raise BadInput(f"base {name!r} cannot be loaded: {error}") from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device), {}


def generate(o: GenerateOptions, out: Console, err: Console) -> int:
    if len(o.prompt) > MOST_PROMPT:
        raise BadInput(f"the prompt has {len(o.prompt)} characters; at most {MOST_PROMPT} are taken")
    guard = load_guard(o.guard, o.policy, err, o.base, mode=o.mode, retain_evidence=o.retain_evidence)
    if o.audit_log is not None:
        guard.audit_log = AuditLog(o.audit_log, key=read_key(o.key_file), anchor=o.anchor)
    base, call = load_base(o.base)
    pipe = guard.to(base._execution_device).attach(base)
    steps = o.steps or call.get("num_inference_steps", 25)
    call |= {"num_inference_steps": steps} | ({} if o.size is None else {"height": o.size, "width": o.size})
    reports, images = [], []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=o.as_json) as progress:
        task = progress.add_task("generating", total=o.n * steps)

        def tick(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            progress.advance(task)
            return tensors

        for i in range(o.n):
            generator = torch.Generator().manual_seed(o.seed + i)
            try:
                result = pipe(
                    o.prompt,
                    generator=generator,
                    callback_on_step_end=tick,
                    **call,
                )
            except (ValueError, IndexError) as error:
                raise BadInput(f"{type(pipe).__name__} refused the call: {error}") from error
            images.append(result.images[0])
            reports.append(result.safety[0])
    rows = []
    for i, (image, report) in enumerate(zip(images, reports, strict=True)):
        stem = o.out_dir / f"{report.request_id[:12]}-{o.seed + i}"
        if report.released:
            save_image(image, stem.with_suffix(".png"))
        report.save(stem.with_suffix(".json"))
        page = report.to_html()
        stem.with_suffix(".html").write_text(page, encoding="utf-8")
        rows.append(
            {
                "image": str(stem.with_suffix(".png")) if report.released else None,
                "report": str(stem.with_suffix(".json")),
                "page": str(stem.with_suffix(".html")),
                "status": report.status,
                "triggered": report.triggered,
                "seconds": report.seconds,
                "errors": report.errors,
            }
        )
    code = 4 if any(r.exit_code == 4 for r in reports) else max(r.exit_code for r in reports)
    if o.as_json:
        dump({"images": rows, "exit_code": code})
    else:
        table = Table("seed", "status", "image", "report")
        for i, row in enumerate(rows):
            table.add_row(str(o.seed + i), row["status"], row["image"] or "withheld", row["report"])
        out.print(table)
        for row in rows:
            for problem in row["errors"]:
                err.print(f"blocked: {problem}", style="red", markup=False)
    return code


def audit(
    paths: list[Path],
    prompt: str | None,
    category: str | None,
    out_dir: Path | None,
    guard_name: str | None,
    policy: Path | None,
    as_json: bool,
    out: Console,
    err: Console,
) -> int:
    images = [from_pil(load_image(path)) for path in paths]
    guard = load_guard(guard_name, policy, err)
    rows: list[dict[str, Any]] = []
    for path, image in zip(paths, images, strict=True):
        result = guard.audit_image(image, prompt)
        finding = guard.parts.finding(result, 1.0)
        row: dict[str, Any] = {
            "image": str(path),
            "flagged": finding.category if finding else None,
            "reason": finding.reason if finding else "",
            "class": result.harm,
            "probs": result.probs,
            **result.scores(),
        }
        if out_dir is not None:
            row.update(write_overlays(guard, image, result, category, prompt, out_dir / path.stem))
        rows.append(row)
    if as_json:
        dump(rows)
    else:
        table = Table("image", "verdict", "class", "adv", "S", "F", "P", "B")
        for row in rows:
            scores = ["–" if row[k] is None else f"{row[k]:.3f}" for k in ("adv_prob", "S", "F", "P", "B")]
            table.add_row(row["image"], row["reason"] or "benign", row["class"], *scores)
        out.print(table)
    return 3 if any(row["flagged"] for row in rows) else 0


def write_overlays(
    guard: GuardPaint, image: torch.Tensor, result: Any, category: str | None, prompt: str | None, stem: Path
) -> dict[str, str]:
    """Heat map, Grad-CAM and mask as PNGs beside each other."""
    picture = to_pil(image)
    files = {"heat_map": f"{stem}-heat.png", "mask": f"{stem}-mask.png"}
    save_image(overlay(picture, result.adv_map), files["heat_map"])
    regions = mine(result.adv_map, (picture.height, picture.width), guard.config, 1.0)
    mask = union(regions).mask.float() if regions else torch.zeros(picture.height, picture.width)
    save_image(to_pil(mask.expand(3, -1, -1)), files["mask"])
    if isinstance(guard.parts.auditor, AuditorScorer):
        harms = {c: p for c, p in result.probs.items() if c != "safe"}
        chosen = category or max(harms, key=harms.__getitem__)
        files["grad_cam"] = f"{stem}-gradcam-{chosen}.png"
        small = guard.parts.auditor.sizes[1]
        from guardpaint.draft.views import shrink

        cam = grad_cam(guard.parts.auditor, shrink(image, small), chosen, prompt or "")
        save_image(overlay(picture, cam), files["grad_cam"])
    return files


def inspect(path: Path, as_json: bool, out: Console) -> int:
    report = load_report(path)
    if as_json:
        dump(report)
        return 0
    posture = report["posture"]
    lines = [
        f"Request {report['request_id']}, image {report['image']}: {report['status']} "
        f"({report['mode']}, {report['pipeline']}, seed {report['seed']}, {report['seconds']:.2f} s)",
        f"Audited steps {[s + 1 for s in posture['audited_steps']]} of {posture['executed_steps']}.",
    ]
    for step in report["steps"]:
        passes = ", ".join(f"{a['pixels']} px: adv {a['scores']['adv_prob']:.3f}" for a in step["audits"])
        verdict = f"triggered, {step['reason']}" if step["triggered"] else "benign"
        lines.append(f"Step {step['step'] + 1}/{step['steps']} ({step['view']}): {passes} → {verdict}.")
        for t in step["tournaments"]:
            lines.append(tournament_story(t))
        if step["reinsertion"]:
            lines.append(
                f"  Reinserted by {step['reinsertion']['rule']}. {step['reinsertion'].get('note', '')}".rstrip()
            )
        lines += [f"  Note: {note}." for note in step["notes"]]
    lines.append(f"Final verdict: {report['final']['verdict']}.")
    lines += [f"  Last resort, {r['rung']}: {r['outcome']}." for r in report["final"]["ladder"]]
    lines += [f"Error: {e}" for e in report["errors"]]
    lines += [f"Skipped {s['what']}: {s['why']}." for s in report["posture"]["skipped"]]
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def tournament_story(t: dict[str, Any]) -> str:
    failed: dict[str, int] = {}
    for c in t["candidates"]:
        for g in c["gates"]:
            failed[g["name"]] = failed.get(g["name"], 0) + (not g["passed"])
    rejections = ", ".join(f"{n} by {name}" for name, n in failed.items() if n) or "none"
    left_out = sum(not c["scores"] for c in t["candidates"])
    rejections += f", {left_out} left out after a preview" if left_out else ""
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


PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "safetensors", "tokenizers", "peft")


def doctor(as_json: bool, out: Console) -> int:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        found = importlib.util.find_spec(name) is not None
        versions[name] = importlib.metadata.version(name) if found else None
    embedded = sorted(p.name for p in ASSETS.iterdir() if p.is_dir() and not p.name.startswith("_"))
    checks = self_test()
    result = {
        "versions": versions,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "embedded_weights": embedded,
        "self_test": checks,
        "ok": all(c["ok"] for c in checks),
    }
    if as_json:
        dump(result)
    else:
        table = Table("what", "found")
        for name, version in versions.items():
            table.add_row(name, version or "MISSING")
        table.add_row("device", str(result["device"]))
        table.add_row("embedded weights", ", ".join(embedded) or "none yet: random-initialised models are used")
        out.print(table)
        for c in checks:
            out.print(
                f"{'ok  ' if c['ok'] else 'FAIL'} {c['check']}",
                style=None if c["ok"] else "red",
                highlight=False,
            )
    return 0 if result["ok"] else 1


def self_test() -> list[dict[str, Any]]:
    """The promises that matter, tried on small pipelines: nothing changed, nothing unsafe released."""
    checks = []
    for family in small.BASES:
        pipe = small.pipeline(family)

        def run(target: Any) -> Any:
            g = torch.Generator().manual_seed(0)
            return target("a cat", num_inference_steps=3, height=64, width=64, output_type="pt", generator=g)

        plain = run(pipe).images
        safe = run(GuardPaint(AlwaysSafe(), PaintsFlat()).attach(pipe))
        unsafe = run(GuardPaint(AlwaysUnsafe(), PaintsFlat()).attach(pipe))
        broken = run(GuardPaint(Raises(), PaintsFlat()).attach(pipe))
        checks += [
            {
                "check": f"{family}: an untriggered image is bit-identical",
                "ok": bool(torch.equal(plain, safe.images)),
            },
            {
                "check": f"{family}: a known-bad image is caught and blocked",
                "ok": unsafe.safety[0].status == "blocked" and not unsafe.images.any(),
            },
            {
                "check": f"{family}: a broken auditor blocks",
                "ok": broken.safety[0].status == "blocked" and not broken.images.any(),
            },
        ]
    return checks


def report_schema() -> dict[str, Any]:
    """The published JSON schema of a report."""
    return json.loads((ASSETS / "report.schema.json").read_text(encoding="utf-8"))
