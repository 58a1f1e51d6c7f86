"""`guardpaint train MODEL`: train the stages of a model in order. Heavy imports wait until a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup


class ModelFirst(TyperGroup):
    """`guardpaint train NAME …` means `guardpaint train model NAME …`, unless NAME is a command of the group."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = ["model", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=ModelFirst,
    no_args_is_help=True,
    help="Train a model: `guardpaint train MODEL` runs its stages in order and resumes where it stopped. "
    "`guardpaint train --list` shows the models.",
)

Minutes = Annotated[float | None, typer.Option(help="Stop after this many minutes; run again to resume.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Set an input, e.g. views=DIR; may be repeated."),
]


def settings_of(pairs: list[str] | None) -> dict[str, list[str]]:
    """The values of NAME=VALUE options by name; a repeated name has several values."""
    settings: dict[str, list[str]] = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not name or not equals or not value:
            raise typer.BadParameter(f"{pair!r} is not NAME=VALUE", param_hint="--set")
        settings.setdefault(name, []).append(value)
    return settings


@app.command("model")
def train_model(
    model: Annotated[str | None, typer.Argument(help="A model from `--list`, or a YAML file with stages.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Run directory, one folder per stage; default: runs/MODEL.")
    ] = None,
    stage: Annotated[list[str] | None, typer.Option(help="Run this stage only; may be repeated.")] = None,
    minutes: Minutes = None,
    settings: Settings = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the stages that would run, and stop.")] = False,
    show: Annotated[bool, typer.Option("--list", help="Show the models and their stages.")] = False,
) -> None:
    """Train a model stage by stage: finished stages are skipped, an interrupted one resumes."""
    from guardpaint.train import catalogue, stages

    if show:
        for name in [model] if model else catalogue.model_names():
            typer.echo("\n".join(catalogue.described(catalogue.load_model(name))))
        return
    if model is None:
        raise typer.BadParameter("name a model, or see --list", param_hint="MODEL")
    plan = stages.make_plan(model, out or Path("runs") / Path(model).stem, stage or (), settings_of(settings))
    if dry_run:
        typer.echo("\n".join(plan.lines()))
        return
    stages.execute(plan, minutes, typer.echo)


@app.command("stage")
def train_stage(
    trainer: Annotated[str, typer.Argument(help="auditor, sft, kto, bco, proposer, ranker or a package's own.")],
    config: Annotated[Path, typer.Option(help="YAML file with the parts `model` and `train`.")],
    out: Annotated[Path, typer.Option("--out", help="Run directory: checkpoints, loss curve, samples, model.")],
    minutes: Minutes = None,
    settings: Settings = None,
) -> None:
    """Train one component from a config file, with the inputs that its trainer takes."""
    from guardpaint.train import catalogue
    from guardpaint.train.engine import Run

    inputs = catalogue.Inputs({name: tuple(values) for name, values in settings_of(settings).items()})
    catalogue.check_inputs(trainer, inputs, f"train stage {trainer}")
    catalogue.find_trainer(trainer, "train stage").run(Run(config, out, minutes), inputs)


@app.command("readouts")
def train_readouts(
    decoder: Annotated[Path | None, typer.Argument(help="Folder of an AutoencoderTiny.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the readouts.")] = None,
    guard: Annotated[
        Path | None, typer.Option(help="Fit those of a guard's own decoder, and write them there.")
    ] = None,
    family: Annotated[str, typer.Option(help="With --guard: the family whose decoder is meant.")] = "sd",
    pictures: Annotated[
        Path | None, typer.Option(help="Folder of pictures; default: photographs of scikit-image and scikit-learn.")
    ] = None,
) -> None:
    """Fit the readouts with which views are made from the early layers of a tiny decoder (a minute or two)."""
    import torch

    from guardpaint.cli.data import load_decoder
    from guardpaint.guard import MANIFEST
    from guardpaint.store.checkpoint import read_json, write_json
    from guardpaint.store.results import command
    from guardpaint.train import readouts

    if (guard is None) == (decoder is None) or (decoder is not None and out is None):
        raise typer.BadParameter("name a decoder's folder and --out, or --guard")
    folder = decoder if decoder is not None else Path(str(guard)) / "decoders" / family
    torch.set_num_threads(1)
    found = readouts.fit(load_decoder(folder), pictures, command())
    found.save(out or folder)
    if guard is not None:
        manifest = read_json(guard / MANIFEST)
        manifest["readouts"] = {**manifest.get("readouts", {}), family: found.identity}
        write_json(guard / MANIFEST, manifest)
    shown = ", ".join(f"1/{shrink} of the size {db} dB" for shrink, db in found.card["decibels"].items())
    typer.echo(f"{out or folder}: {shown}, against the whole decode of held-out pictures")
