"""`guardpaint eval label`, `moment`, `seed-pairs` and `over-refusal`. Heavy imports happen only when a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from guardpaint.cli.common import PolicyOption, opens_bases, token_of, warn
from guardpaint.cli.evaluate import ResultsFile, TestbedOption, say_metrics

if TYPE_CHECKING:
    from guardpaint.bases import BaseOptions

GuardName = Annotated[str | None, typer.Option("--guard", help="Guard checkpoint; default: the embedded one.")]
Bases = Annotated[list[str], typer.Option("--base", help="Base model; repeat.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands of this module to the group `eval`."""
    app.command("label")(label)
    app.command("moment")(moment)
    app.command("seed-pairs")(seed_pairs)
    app.command("over-refusal")(over_refusal)


def label(
    run: Annotated[Path, typer.Argument(help="Run directory of `eval run` with kept pictures.")],
    labeller: Annotated[str, typer.Option(help="Your name; every labeller's labels are kept apart.")],
    n: Annotated[
        int | None, typer.Option("--n", min=1, help="Pictures in the sample. Default: 200, or as many as it has.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sample.")] = 0,
    case: Annotated[list[str] | None, typer.Option(help="A kind of hard case to choose from; repeat.")] = None,
    several: Annotated[bool, typer.Option(help="A picture may get several categories.")] = False,
    settle: Annotated[bool, typer.Option(help="Decide the pictures on which the labellers disagree.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0: any free one.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
    policy: PolicyOption = None,
) -> None:
    """Label a blind sample of a run's pictures on a local page; run again to go on. Ctrl-C ends it.

    The sample is stratified by base, defence, the judge's answer and status. The judge's answers are shown when you
    have labelled all of it, and your labels are closed from then on. `eval report` then corrects the rates.
    """
    from guardpaint.data import label_page
    from guardpaint.evaluate import eye_session
    from guardpaint.policy import Policy

    opened = eye_session.open_run(run, Policy.load(policy) if policy else Policy.default(), n, seed)
    session = opened.session(labeller, case or (), several, settle)
    label_page.serve(session, port, browser, typer.echo)
    for line in opened.said(session):
        typer.echo(line)


@opens_bases
def moment(
    base: Bases,
    guard: GuardName = None,
    count: Annotated[int, typer.Option(min=1, help="Harmful prompts on every base.")] = 60,
    start: Annotated[
        list[float] | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Progress from which on steps are audited; repeat. Default: 0.4, 0.55, 0.7, 0.85 and 1.",
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="Split of the testbed's harmful prompts.")] = "rollout-test",
    judge: Annotated[str, typer.Option(help="As for `eval run`.")] = "testbed",
    out_dir: Annotated[Path, typer.Option("--out", help="Folder of the rows; run again to resume.")] = Path(
        "runs/moment"
    ),
    results: ResultsFile = Path("runs/moment/moment.json"),
    testbed: TestbedOption = None,
    *,
    options: BaseOptions,
) -> None:
    """When to step in: audits from different moments on, or only at the end, on the same scenes.

    Measures harm left, whole pictures, seam, detail, change outside and time, with and without the final repair, and
    how many scenes are needed to tell the moments apart. A figure is drawn beside the results.
    """
    from guardpaint.bases import load_guard
    from guardpaint.evaluate import moment as scenes
    from guardpaint.evaluate import moment_results
    from guardpaint.evaluate.harness import opened_judge
    from guardpaint.store.results import write_results
    from guardpaint.testbed import open_testbed

    world = open_testbed(testbed)
    loaded = load_guard(guard, None, warn, base[0], access=token_of(options))
    rows = scenes.measure(
        scenes.MomentOptions(
            loaded,
            [world.base(name, options) for name in base],
            world.harmful(split, count),
            opened_judge(judge, loaded.policy, testbed),
            out_dir,
            tuple(start) if start else scenes.STARTS,
        )
    )
    found = moment_results.metrics(rows)
    write_results(results, found, rows, seed=0)
    moment_results.figure(rows).savefig(results.with_suffix(".png"), dpi=110)
    say_metrics(found)
    typer.echo(moment_results.suggestion(found))


@opens_bases
def seed_pairs(
    base: Bases,
    guard: GuardName = None,
    prompts: Annotated[int, typer.Option(min=1, help="Harmful prompts on every base.")] = 40,
    benign: Annotated[int, typer.Option(min=0, help="Harmless prompts on every base.")] = 20,
    seeds: Annotated[int, typer.Option(min=2, help="Seeds of every prompt.")] = 8,
    judge: Annotated[list[str] | None, typer.Option(help="Judges to measure, as for `eval run`; repeat.")] = None,
    truth: Annotated[str, typer.Option(help="The judge whose verdict is the truth.")] = "testbed",
    split: Annotated[str, typer.Option(help="Split of the testbed's harmful prompts.")] = "rollout-test",
    out_dir: Annotated[Path, typer.Option("--out", help="Folder of the rows; run again to resume.")] = Path(
        "runs/seed-pairs"
    ),
    results: ResultsFile = Path("runs/seed-pairs/seed-pairs.json"),
    testbed: TestbedOption = None,
    *,
    options: BaseOptions,
) -> None:
    """Whether the auditor and judges look at the picture or at the prompt: AUC within prompts beside AUC over all."""
    from guardpaint.bases import load_guard
    from guardpaint.evaluate import seed_pairs as pairs
    from guardpaint.evaluate.harness import opened_judge
    from guardpaint.store.results import write_results
    from guardpaint.testbed import open_testbed

    world = open_testbed(testbed)
    loaded = load_guard(guard, None, warn, base[0], access=token_of(options))
    asked = pairs.SeedPairs(
        loaded,
        [world.base(name, options) for name in base],
        [*world.harmful(split, prompts), *world.benign("benign", benign)],
        opened_judge(truth, loaded.policy, testbed),
        {name: opened_judge(name, loaded.policy, testbed) for name in judge or ()},
        out_dir,
        seeds,
    )
    rows = asked.measure()
    found = pairs.metrics(rows, asked.detectors)
    write_results(results, found, rows, seed=0)
    say_metrics(found)


def over_refusal(
    runs: Annotated[list[Path], typer.Argument(help="Run directories of `eval run`.")],
    benign: Annotated[str, typer.Option(help="Suite of benign prompts.")],
    harmful: Annotated[str, typer.Option(help="Suite of their harmful counterparts.")],
    results: ResultsFile = Path("runs/over-refusal.json"),
) -> None:
    """Over-refusal of a pair of suites: benign changed or withheld; harmful unsafe, answered safely or withheld.

    The table is written beside the results as Markdown.
    """
    from guardpaint.evaluate import over_refusal as measure
    from guardpaint.evaluate import summary
    from guardpaint.evaluate.gather import read_run
    from guardpaint.store.checkpoint import write_atomic
    from guardpaint.store.results import write_results

    rows = summary.latest([row for run in runs for row in read_run(run)])
    found = measure.metrics(rows, benign, harmful)
    own = [r.to_dict() for r in rows if r.suite in (benign, harmful)]
    write_results(results, found, own, seed=0)
    text = measure.table(found, benign, harmful)
    write_atomic(results.with_suffix(".md"), text.encode())
    typer.echo(text)
