"""The `guardpaint world` commands. Each command does its heavy imports itself, so that `--help` stays fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from guardpaint.cli.evaluate import ResultsFile, say_metrics

Pictures = Annotated[
    Path | None,
    typer.Option(
        help="Folder in which generated pictures are kept; those that the same weights drew before are reused."
    ),
]
Size = Annotated[int, typer.Option(help="Side of the pictures in pixels: 64 or 128.")]
app = typer.Typer(help="The paper-doll world: look at it, export it, measure its models.", no_args_is_help=True)


@app.command("sheet")
def world_sheet(
    file: Annotated[Path, typer.Argument(help="PNG to write.")] = Path("out/world.png"),
    seed: Annotated[int, typer.Option(help="First scene seed.")] = 0,
    columns: Annotated[int, typer.Option(min=1, max=64, help="Scenes per row.")] = 12,
    masks: Annotated[bool, typer.Option(help="Tint unsafe pixels.")] = False,
    size: Size = 64,
) -> None:
    """Write a contact sheet with one row per kind of scene."""
    from paperdolls.dataset import contact_sheet

    contact_sheet(file, seed, columns, masks=masks, size=size)
    typer.echo(str(file))


@app.command("export")
def world_export(
    out_dir: Annotated[Path, typer.Argument(help="Directory for the parquet file.")],
    split: Annotated[str, typer.Option(help="train, validation or test; they share no scenes.")] = "train",
    count: Annotated[int, typer.Option(min=1, help="Number of scenes.")] = 1000,
    size: Size = 64,
) -> None:
    """Write scenes with captions, masks and attributes as parquet for the `datasets` library."""
    from paperdolls.dataset import export

    typer.echo(str(export(out_dir, split, count, size)))


@app.command("measure")
def world_measure(
    part: Annotated[
        list[str] | None,
        typer.Option(help="Measure only this: oracle, render, time, vae4, vae16, a base, eye-BASE. May be repeated."),
    ] = None,
    results: ResultsFile = Path("docs/results/world.json"),
    count: Annotated[int, typer.Option(help="Held-out prompts of each sort, benign and unsafe.")] = 500,
    pictures: Pictures = None,
) -> None:
    """Measure the embedded models with the oracle: agreement, unsafe yield, KID, PSNR, speed, size.

    Rows of other parts in the results file are kept.
    """
    from paperdolls import measure as world

    say_metrics(world.run(part or [], results, count, pictures))


@app.command("sheets")
def world_sheets(
    base: Annotated[str, typer.Argument(help="An embedded base, e.g. mini-sd.")],
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for the sheets.")] = Path("out/sheets"),
    pictures: Pictures = None,
) -> None:
    """Write numbered sheets of 200 generated pictures. A person labels them, and the labels check the oracle."""
    from paperdolls import measure as world

    for path in world.label_sheets(base, out_dir, kept=pictures):
        typer.echo(str(path))


@app.command("adopt")
def world_adopt(
    run: Annotated[
        Path, typer.Argument(help="Folder of a finished stage, e.g. runs/mini-sd/garments; its model is copied.")
    ],
    name: Annotated[str, typer.Argument(help="Name among the embedded models, e.g. mini-sd.")],
    size: Annotated[
        int | None, typer.Option(help="For an auditor: audit at this size only, one of those it was trained at.")
    ] = None,
) -> None:
    """Ship a finished model: copy it into the package's assets; parts that are there already become links."""
    from paperdolls import bases

    if size is not None:
        bases.check_size(run / "model", size)
    for link in bases.adopt(run, name):
        typer.echo(link)
    if size is not None:
        bases.one_size(bases.ASSETS / name, size)
    typer.echo(f"assets are {bases.megabytes():.1f} MB now")


@app.command("guard")
def world_guard(
    calibration: Annotated[
        Path | None, typer.Option(help="File that `guardpaint calibrate` wrote; the guard takes its thresholds.")
    ] = None,
    proposer: Annotated[
        str, typer.Option(help="learned (mini-proposer), uniform, or optimised (needs --knobs).")
    ] = "uniform",
    knobs: Annotated[
        Path | None, typer.Option(help="The optimised.json of `eval proposers`: fixed knobs for every repair.")
    ] = None,
    keep: Annotated[
        int, typer.Option(min=0, help="Candidates that mini-ranker keeps after seeing previews; 0 keeps all.")
    ] = 0,
    f_gate: Annotated[
        str,
        typer.Option(help="absolute, or relative: a repair need not match the prompt better than the control does."),
    ] = "relative",
) -> None:
    """Assemble the package's default guard from the embedded auditor, inpainter and tiny decoders."""
    from guardpaint.config import GuardConfig
    from guardpaint.evaluate.auditor import read_calibration
    from guardpaint.store.checkpoint import read_json
    from paperdolls import bases

    settings = {**GuardConfig().to_dict(), "keep": keep, "f_gate": f_gate}
    if proposer not in ("learned", "uniform") and knobs is None:
        raise typer.BadParameter(f"proposer {proposer!r}: choose learned or uniform, or give its knobs with --knobs")
    if knobs is not None and proposer in ("learned", "uniform"):
        raise typer.BadParameter(f"proposer {proposer!r} takes no --knobs: use --proposer optimised")
    if calibration is not None:
        settings |= bases.calibrated_settings(read_calibration(calibration))
        if settings["mask_threshold"] != "calibrated":
            typer.echo("the calibrated mask level is missing or too low to use: the guard masks by percentile")
    GuardConfig.from_dict(settings)
    fixed = read_json(knobs)["knobs"] if knobs else None
    typer.echo(str(bases.assemble_guard(settings, proposer=proposer, knobs=fixed)))


@app.command("fast-guard")
def world_fast_guard(
    waves: Annotated[str, typer.Option(help="Sizes of the first waves, such as 1 or 1+2.")] = "1",
    wave_safety: Annotated[
        float, typer.Option(help="S from which on a first candidate is good enough (`guardpaint calibrate-waves`).")
    ] = 0.9,
) -> None:
    """Assemble the guard with cheap repairs from the default one and the distilled inpainter."""
    from guardpaint.config import GuardConfig
    from paperdolls import bases

    changes: dict[str, Any] = {"waves": waves, "wave_safety": wave_safety, "regions_together": "on"}
    GuardConfig(**changes)
    typer.echo(str(bases.assemble_fast_guard(changes)))
