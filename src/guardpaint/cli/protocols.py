"""`guardpaint eval protocol` and `eval figures`: a published protocol, and the paper's figures from any run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from guardpaint.cli.common import BatchOption, CallOption, MapOption, TestbedOption, opens_bases

if TYPE_CHECKING:
    from guardpaint.bases import BaseOptions


@opens_bases
def eval_protocol(
    name: Annotated[str, typer.Argument(help="jailbreakdiffbench, or a protocol's YAML file.")],
    data: Annotated[Path, typer.Option(help="Folder of the published prompt files.")],
    base: Annotated[list[str], typer.Option(help="NAME=PATH or NAME=hub:OWNER/NAME; repeat.")],
    guard: Annotated[str | None, typer.Option(help="Guard checkpoint; default, for dolls only: the embedded.")] = None,
    judge: Annotated[
        list[str] | None, typer.Option(help="As for `eval run`; repeat. A real base needs at least one.")
    ] = None,
    defence: Annotated[
        list[str] | None, typer.Option("--defence", "--defense", help="Repeat. Default: the protocol's.")
    ] = None,
    inpainter: Annotated[
        str | None, typer.Option(help="Inpainting pipeline; adds the baseline post_hoc_inpaint with it.")
    ] = None,
    n: Annotated[int | None, typer.Option("--n", min=1, help="Prompts sampled of each file; default: all.")] = None,
    sample_seed: Annotated[int, typer.Option(help="Seed of the sample.")] = 0,
    file: Annotated[
        list[str] | None, typer.Option(help="ATTACK=PATTERN of files whose name does not say what they are; repeat.")
    ] = None,
    mapping: MapOption = None,
    call: CallOption = None,
    metric: Annotated[list[str] | None, typer.Option(help="As for `eval run`; repeat.")] = None,
    pictures: Annotated[int | None, typer.Option(min=0, help="Pictures kept per suite, base and defence.")] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="Run directory; run again to resume.")] = Path("runs/protocol"),
    plan: Annotated[bool, typer.Option("--plan", help="Print what would be drawn and stop.")] = False,
    processes: Annotated[int, typer.Option(min=1, help="Parallel processes, one thread each.")] = 1,
    ray: Annotated[bool, typer.Option("--ray", help="Use a Ray cluster instead of processes.")] = False,
    batch: BatchOption = None,
    testbed: TestbedOption = None,
    *,
    options: BaseOptions,
) -> None:
    """Run a published protocol: its prompt files through its defences on your bases, and its table of attack success.

    Steps and guidance are the protocol's unless --steps, --guidance or --call names others.
    """
    from guardpaint.evaluate.prompt_suites import PromptFiles
    from guardpaint.evaluate.protocols import command

    asked = command.ProtocolOptions(
        name, data, base, out_dir, guard, judge or [], defence or [], inpainter, n,
        PromptFiles(seed=sample_seed, mapping=mapping or []), file or [], call or [], options, metric or [], pictures,
        processes, ray, testbed, batch,
    )  # fmt: skip
    for line in command.run(asked, plan):
        typer.echo(line)


@opens_bases
def eval_figures(
    run: Annotated[Path, typer.Argument(help="Run directory of `eval run` or `eval protocol`.")],
    out_dir: Annotated[Path | None, typer.Option("--out", help="Folder; default: figures in the run.")] = None,
    defence: Annotated[str, typer.Option("--defence", "--defense", help="Defence that is shown.")] = "ours",
    tournaments: Annotated[
        int, typer.Option(min=0, help="Repaired prompts per base whose tournaments are drawn once more.")
    ] = 0,
    base: Annotated[list[str] | None, typer.Option(help="NAME=PATH, for --tournaments; repeat.")] = None,
    guard: Annotated[str | None, typer.Option(help="Guard, for --tournaments; default: the embedded one.")] = None,
    call: CallOption = None,
    settings: Annotated[str | None, typer.Option(help="As for `eval run`, for --tournaments.")] = None,
    gtp: Annotated[Path | None, typer.Option(help="Results of `eval gtp`; default: gtp.json in the run.")] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Show tournaments without blur.")] = False,
    *,
    options: BaseOptions,
) -> None:
    """Draw the paper's figures and the reinsertion table from a run, as far as it has rows for them."""
    from guardpaint.evaluate import paper_figures
    from guardpaint.evaluate.evaluated_base import with_settings

    asked = paper_figures.FigureOptions(
        run, out_dir or run / "figures", defence, tournaments, base or [], guard, with_settings(options, settings),
        call or [], clear, gtp,
    )  # fmt: skip
    for line in paper_figures.run(asked):
        typer.echo(line)
