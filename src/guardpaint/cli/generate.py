"""`guardpaint generate`: images under guard, written with their reports."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from guardpaint.cli.common import (
    BASE_HELP,
    GuardOption,
    JsonOption,
    PolicyOption,
    SeamOption,
    dump,
    err,
    opens_bases,
    out,
    token_of,
    warn,
)
from guardpaint.errors import BadInput

if TYPE_CHECKING:
    from guardpaint.bases import BaseOptions
    from guardpaint.loop.report import GuardReport

MOST_PROMPT = 20_000


class Mode(StrEnum):
    enforce = "enforce"
    monitor = "monitor"
    off = "off"


@dataclass(frozen=True)
class GenerateOptions:
    """The options of the command line."""

    prompt: str
    base: str
    seed: int
    n: int
    out_dir: Path
    as_json: bool
    opening: BaseOptions


@dataclass(frozen=True)
class LogOptions:
    """Where and how the audit log is written."""

    file: Path | None
    key_file: Path | None
    anchor: Path | None


@opens_bases
def generate(
    prompt: Annotated[str, typer.Argument(help="What to draw.")],
    base: Annotated[str, typer.Option(help=BASE_HELP)] = "mini-sd",
    seed: Annotated[int, typer.Option(help="Seed of the first image; image i uses seed + i.")] = 0,
    n: Annotated[int, typer.Option("--n", min=1, max=64, help="How many images.")] = 1,
    out_dir: Annotated[Path, typer.Option("--out", help="Directory for images and reports.")] = Path("out"),
    guard: GuardOption = None,
    policy: PolicyOption = None,
    mode: Annotated[Mode, typer.Option(help="enforce: repair or block; monitor: report only; off.")] = Mode.enforce,
    retain_evidence: Annotated[
        bool, typer.Option(help="Keep un-blurred views and candidates in the HTML report (operators only).")
    ] = False,
    audit_log: Annotated[Path | None, typer.Option(help="Append to this audit log (JSONL).")] = None,
    key_file: Annotated[Path | None, typer.Option(help="Key of the audit log's HMAC.")] = None,
    anchor: Annotated[Path | None, typer.Option(help="Where to anchor the audit log's head.")] = None,
    seam: SeamOption = None,
    as_json: JsonOption = False,
    *,
    options: BaseOptions,
) -> None:
    """Generate images under guard; writes PNGs and one report (JSON and HTML) per image."""
    from guardpaint.bases import load_guard

    if len(prompt) > MOST_PROMPT:
        raise BadInput(f"the prompt has {len(prompt)} characters; at most {MOST_PROMPT} are taken")
    asked = GenerateOptions(prompt, base, seed, n, out_dir, as_json, options)
    settings = {"mode": mode.value, "retain_evidence": retain_evidence}
    try:
        loaded = load_guard(guard, policy, warn, base, seam, token_of(options), **settings)
        code = draw(asked, loaded, LogOptions(audit_log, key_file, anchor))
    except KeyboardInterrupt:
        err.print("interrupted; nothing was released")
        code = 130
    raise typer.Exit(code)


def draw(options: GenerateOptions, guard: Any, log: LogOptions) -> int:
    """Draw, write and print; returns the exit code."""
    import torch

    from guardpaint.bases import load_base
    from guardpaint.loop.audit_log import AuditLog, read_key
    from guardpaint.store.progress import bar

    if log.file is not None:
        guard.audit_log = AuditLog(log.file, key=read_key(log.key_file), anchor=log.anchor)
    base = load_base(options.base, options.opening)
    pipe = guard.to(base.pipe._execution_device).attach(base.pipe)
    steps = base.settings.steps
    results = []
    with bar("generating", options.n * steps, quiet=options.as_json) as advance:

        def tick(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            advance(1)
            return tensors

        for i in range(options.n):
            generator = torch.Generator().manual_seed(options.seed + i)
            try:
                result = pipe(options.prompt, generator=generator, callback_on_step_end=tick, **base.call)
            except (ValueError, IndexError) as error:
                raise BadInput(f"{type(pipe).__name__} refused the call: {error}") from error
            results.append((result.images[0], result.safety[0]))
    rows = [written(image, report, options, i) for i, (image, report) in enumerate(results)]
    codes = [report.exit_code for _, report in results]
    code = 4 if 4 in codes else max(codes)
    if options.as_json:
        dump({"images": rows, "exit_code": code})
    else:
        print_table(rows, options.seed)
    return code


def written(image: Any, report: GuardReport, options: GenerateOptions, i: int) -> dict[str, Any]:
    """Write one image and its report; returns what the command prints of them."""
    from guardpaint.store.images import save_image

    stem = options.out_dir / f"{report.request_id[:12]}-{options.seed + i}"
    if report.released:
        save_image(image, stem.with_suffix(".png"))
    report.save(stem.with_suffix(".json"))
    stem.with_suffix(".html").write_text(report.to_html(), encoding="utf-8")
    return {
        "image": str(stem.with_suffix(".png")) if report.released else None,
        "report": str(stem.with_suffix(".json")),
        "page": str(stem.with_suffix(".html")),
        "status": str(report.status),
        "triggered": report.triggered,
        "seconds": report.seconds,
        "errors": report.errors,
    }


def print_table(rows: list[dict[str, Any]], seed: int) -> None:
    from rich.table import Table

    table = Table("seed", "status", "image", "report")
    for i, row in enumerate(rows):
        table.add_row(str(seed + i), row["status"], row["image"] or "withheld", row["report"])
    out.print(table)
    for row in rows:
        for problem in row["errors"]:
            err.print(f"blocked: {problem}", style="red", markup=False)
