"""`guardpaint rollouts …`: store states of guarded generations and play tournaments from them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from guardpaint.cli.common import DeviceOption, opens_bases

if TYPE_CHECKING:
    from guardpaint.bases import BaseOptions

app = typer.Typer(
    help="Training data for the proposer and the ranker: stored states and tournaments played from them.",
    no_args_is_help=True,
)


@app.command()
@opens_bases
def states(
    base: Annotated[str, typer.Argument(help="Base that generates under guard, up to the first tournament.")],
    guard: Annotated[str, typer.Option(help="Guard checkpoint.")],
    split: Annotated[list[str], typer.Option(help="train or test; repeat for both.")] = ["train"],  # noqa: B006
    count: Annotated[int, typer.Option(min=1, help="Number of states to store.")] = 150,
    attacks: Annotated[
        Path | None,
        typer.Option(help="Output folder of `eval attack`; its prompts alternate with those of the testbed."),
    ] = None,
    testbed: Annotated[
        str | None, typer.Option(help="Testbed whose harmful prompts are used: a name or a YAML file.")
    ] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for the states; run again to resume.")] = Path(
        "runs/rollouts"
    ),
    *,
    options: BaseOptions,
) -> None:
    """Generate under guard from unsafe prompts and store the state in which each first tournament starts."""
    from guardpaint.guard import GuardPaint
    from guardpaint.testbed import open_testbed
    from guardpaint.train import rollouts

    world = open_testbed(testbed)
    attack_prompts = rollouts.attack_prompts(attacks) if attacks else ()
    prompts = {part: rollouts.rollout_prompts(world, part, 3 * count, attack_prompts) for part in split}
    loaded = GuardPaint.from_pretrained(guard, token=options.load.token)
    opened = world.base(base, options)
    for part in split:
        path = rollouts.state_file(out_dir, base, part)
        number = rollouts.collect_states(loaded, opened, prompts[part], count, path)
        typer.echo(f"{path}: {number} states")


@app.command()
def play(
    guard: Annotated[str, typer.Option(help="Guard checkpoint.")],
    proposer: Annotated[
        str, typer.Option(help="uniform, fixed, strong, or a trained proposer's directory.")
    ] = "uniform",
    split: Annotated[str, typer.Option(help="train or test.")] = "train",
    n: Annotated[int, typer.Option("--n", min=2, max=64, help="Candidates per tournament.")] = 7,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder of the states; run again to resume.")] = Path(
        "runs/rollouts"
    ),
    processes: Annotated[int, typer.Option(min=1, help="Number of parallel processes.")] = 1,
    ray: Annotated[bool, typer.Option("--ray", help="Use a Ray cluster instead of local processes.")] = False,
    device: DeviceOption = None,
) -> None:
    """Play one tournament from every stored state and write its row to OUT/SPLIT as parquet."""
    from guardpaint.errors import BadInput
    from guardpaint.store.jobs import spread
    from guardpaint.train import rollouts

    stored = [s for f in sorted(out_dir.glob(f"*-{split}.pt")) for s in rollouts.load_states(f)]
    jobs = [(part, guard, proposer, n, out_dir / split, device) for part in rollouts.shards(stored, processes) if part]
    if not jobs:
        raise BadInput(f"{out_dir}: no states of split {split}; catch some with `guardpaint rollouts states`")
    typer.echo(f"{sum(spread(rollouts.work, jobs, processes, ray))} new tournaments in {out_dir / split}")
