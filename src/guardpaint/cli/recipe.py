"""`guardpaint recipe …`: the stages from a corpus to a measured guard, by one command that resumes."""

from __future__ import annotations

import errno
import shlex
from pathlib import Path
from typing import Annotated

import typer

from guardpaint.cli.common import err, out

app = typer.Typer(
    help="Reproduce a guard from its corpora: plan, run and rehearse all stages of a recipe.", no_args_is_help=True
)

RecipeFile = Annotated[Path, typer.Argument(help="Recipe, e.g. recipes/paper.yaml.")]
OutDir = Annotated[Path, typer.Option("--out", help="Folder of the recipe: corpus, models, guard, reports, logs.")]
StageOption = Annotated[list[str] | None, typer.Option("--stage", help="Run only this stage; may be repeated.")]
UntilOption = Annotated[str | None, typer.Option("--until", help="Stop after this stage.")]
ProcessesOption = Annotated[int, typer.Option(min=1, help="Processes of each training stage, by `accelerate launch`.")]


@app.command()
def plan(
    recipe: RecipeFile,
    out_dir: OutDir,
    stage: StageOption = None,
    until: UntilOption = None,
    processes: ProcessesOption = 1,
) -> None:
    """Print what every stage downloads and needs, what the estimates rest on, and the command lines."""
    from guardpaint.recipe import plan as plans
    from guardpaint.recipe.opening import open_engine

    engine = open_engine(recipe, out_dir, processes)
    plans.show(engine, engine.chosen(stage or (), until), out)


@app.command()
def run(
    recipe: RecipeFile,
    out_dir: OutDir,
    stage: StageOption = None,
    until: UntilOption = None,
    processes: ProcessesOption = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and what changed, and stop.")] = False,
) -> None:
    """Run the stages: finished ones are skipped, a cut one resumes, a changed setting runs its stage again.

    Exit codes: 0 done, 1 error, 3 the next stage is a person's, 130 interrupted.
    """
    from guardpaint.recipe import engine as engines
    from guardpaint.recipe import plan as plans
    from guardpaint.recipe.opening import open_engine

    words = ["guardpaint", "recipe", "run", str(recipe), "--out", str(out_dir)]
    words += [w for name in stage or () for w in ("--stage", name)] + (["--until", until] if until else [])
    words += ["--processes", str(processes)] if processes > 1 else []
    engine = open_engine(recipe, out_dir, processes, again=shlex.join(words))
    stages = engine.chosen(stage or (), until)
    plans.show(engine, stages, out, commands=dry_run)
    if dry_run:
        engine.announce(stages)
        return
    plans.check_access(engine, stages)
    plans.check_files(engine, stages)
    try:
        engine.run(stages)
    except engines.Interrupted as error:
        err.print(f"interrupted: {error}", style="yellow", markup=False, soft_wrap=True)
        raise typer.Exit(130) from error
    except engines.Waiting as error:
        err.print(str(error), style="yellow", markup=False, soft_wrap=True)
        raise typer.Exit(3) from error
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        err.print(f"error: the disk of {out_dir} is full; make room, then run {engine.launch.again}", markup=False)
        raise typer.Exit(1) from error
    typer.echo(f"{len(stages)} stages done in {out_dir}")


@app.command()
def rehearse(
    recipe: RecipeFile,
    out_dir: OutDir,
    overrides: Annotated[
        Path | None, typer.Option(help="What the rehearsal changes; default: rehearsal.yaml beside the recipe.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="File for the report (JSON); default: OUT/rehearsal.json.")
    ] = None,
    until: UntilOption = None,
) -> None:
    """Run every stage on small random models and local photographs, and report every setting that was overridden."""
    from guardpaint.recipe import rehearsal

    again = shlex.join(["guardpaint", "recipe", "rehearse", str(recipe), "--out", str(out_dir)])
    found = rehearsal.run(recipe, out_dir, overrides, until, again=again, say=typer.echo)
    path = rehearsal.write(found, report or out_dir / "rehearsal.json")
    typer.echo(found.sentence())
    typer.echo(str(path))
