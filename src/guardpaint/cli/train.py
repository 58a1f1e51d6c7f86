"""`guardpaint train …`: one command per component. Heavy imports wait until a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Train components; every run resumes where it stopped.", no_args_is_help=True)

Config = Annotated[Path, typer.Option(help="Training config, one of configs/train/*.yaml.")]
Out = Annotated[Path, typer.Option("--out", help="Run directory: checkpoints, loss curve, samples.")]
Minutes = Annotated[float | None, typer.Option(help="Stop after this many minutes; run again to go on.")]


@app.command("vae")
def train_vae(
    config: Config,
    out: Out,
    minutes: Minutes = None,
    warm: Annotated[Path | None, typer.Option(help="Start from the weights of this finished autoencoder.")] = None,
) -> None:
    """Train an autoencoder of the paper-doll world; when done, writes it with its model card to OUT/model."""
    from paperdolls.models import vae

    vae.run(config, out, minutes, warm)


@app.command("generator")
def train_generator(
    config: Config,
    vae: Annotated[Path, typer.Option(help="A finished autoencoder: OUT/model of `train vae`.")],
    out: Out,
    minutes: Minutes = None,
    warm: Annotated[
        Path | None,
        typer.Option(help="Start from this finished pipeline (inpaint and sdxl: a mini-sd; flux: a mini-sd3)."),
    ] = None,
    teacher: Annotated[
        Path | None,
        typer.Option(help="Learn what this finished pipeline says under guidance (flux: a mini-sd3)."),
    ] = None,
    words: Annotated[
        Path | None, typer.Option(help="Start with the T5 of this finished reader: OUT/model of `train reader`.")
    ] = None,
) -> None:
    """Train a base model of the paper-doll world (the config says which); when done, writes it to OUT/model."""
    from paperdolls.models import generator

    generator.run(config, vae, out, minutes, warm, teacher, words=words)


@app.command("reader")
def train_reader(config: Config, out: Out, minutes: Minutes = None) -> None:
    """Teach a T5 to read the world's captions, for a generator to start with."""
    from paperdolls.models import reader

    reader.run(config, out, minutes)


@app.command("distil")
def train_distil(
    config: Config,
    teacher: Annotated[Path, typer.Option(help="Run directory of the finished mini-sd3.")],
    out: Out,
    minutes: Minutes = None,
) -> None:
    """Distil many guided steps into four unguided ones (mini-sd3-turbo), as a LoRA."""
    from paperdolls.models import distil

    distil.run(config, teacher, out, minutes)


@app.command("tiny")
def train_tiny(
    config: Config,
    vae: Annotated[Path, typer.Option(help="The full autoencoder whose latents it decodes.")],
    out: Out,
    minutes: Minutes = None,
) -> None:
    """Train a tiny decoder for one latent space: what audits look through."""
    from paperdolls.models import tiny_decoder

    tiny_decoder.run(config, vae, out, minutes)


@app.command("auditor")
def train_auditor(
    config: Config,
    views: Annotated[
        Path, typer.Option(help="Folder of views made by `guardpaint data views` or `data corpus-views`.")
    ],
    out: Out,
    minutes: Minutes = None,
    warm: Annotated[Path | None, typer.Option(help="Start from the weights of this auditor of the same shape.")] = None,
    policy: Annotated[Path | None, typer.Option(help="Policy whose categories it tells; default: embedded.")] = None,
) -> None:
    """Train the Auditor-Scorer; the best checkpoint by macro-F1 goes to OUT/model."""
    from guardpaint.policy import Policy
    from guardpaint.train import auditor

    auditor.run(config, views, out, minutes, warm, policy=Policy.load(policy) if policy else None)


@app.command("oracle")
def train_oracle(
    config: Config,
    vae: Annotated[list[Path], typer.Option(help="Autoencoder whose round trips it should know; may be repeated.")],
    out: Out,
    minutes: Minutes = None,
    warm: Annotated[Path | None, typer.Option(help="Start from the weights of this finished oracle.")] = None,
    soft: Annotated[
        Path | None, typer.Option(help="A saved mini-sd: part of the scenes is shown as it would guess them.")
    ] = None,
    drawn: Annotated[
        Path | None, typer.Option(help="Folder of views of split oracle: part of the scenes as the bases drew them.")
    ] = None,
) -> None:
    """Train the oracle that judges paper-doll pictures in evaluations; the guard never uses it."""
    from paperdolls.models import oracle

    oracle.run(config, vae, out, minutes, warm, soft=soft, drawn=drawn)


Inpainter = Annotated[str, typer.Option(help="Inpainting pipeline to start from: a directory, or mini-inpaint.")]
PairsFolder = Annotated[Path, typer.Option(help="Folder of `data pairs`, encoded by `data latents`.")]


@app.command("stack")
def train_stack(
    runs: Annotated[list[Path], typer.Argument(help="Finished runs of sft, kto or bco, in the order they were made.")],
    out: Out,
) -> None:
    """Join the LoRAs of several alignment stages into one that diffusers loads."""
    from guardpaint.train import stack

    typer.echo(str(stack.run(runs, out)))


@app.command("sft")
def train_sft(config: Config, inpainter: Inpainter, pairs: PairsFolder, out: Out, minutes: Minutes = None) -> None:
    """Refusal SFT: fill unsafe regions safely although the prompt asks for the unsafe."""
    align("sft", config, inpainter, pairs, out, minutes)


@app.command("kto")
def train_kto(config: Config, inpainter: Inpainter, pairs: PairsFolder, out: Out, minutes: Minutes = None) -> None:
    """KTO alignment, the baseline that BCO is compared with."""
    align("kto", config, inpainter, pairs, out, minutes)


@app.command("bco")
def train_bco(config: Config, inpainter: Inpainter, pairs: PairsFolder, out: Out, minutes: Minutes = None) -> None:
    """BCO alignment: better than the reference on safe content, worse on unsafe; plots its dynamics."""
    align("bco", config, inpainter, pairs, out, minutes)


def align(method: str, config: Path, inpainter: str, pairs: Path, out: Path, minutes: float | None) -> None:
    from guardpaint.train import align as stage

    stage.run(method, config, inpainter, pairs, out, minutes)


Rollouts = Annotated[Path, typer.Option(help="Folder of `guardpaint rollouts`.")]


@app.command("proposer")
def train_proposer(
    config: Config,
    rollouts: Rollouts,
    out: Out,
    minutes: Minutes = None,
    guard: Annotated[str | None, typer.Option(help="On-line: the guard whose auditor and inpainter play.")] = None,
) -> None:
    """Train the tournament proposer, from stored tournaments or by playing new ones (the config says which)."""
    from guardpaint.train import proposer

    proposer.run(config, rollouts, out, minutes, guard)


@app.command("ranker")
def train_ranker(config: Config, rollouts: Rollouts, out: Out, minutes: Minutes = None) -> None:
    """Train the ranker that leaves weak candidates out after a preview."""
    from guardpaint.train import ranker

    ranker.run(config, rollouts, out, minutes)
