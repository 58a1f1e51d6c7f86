"""`guardpaint eval label`, `moment`, `seed-pairs` and `over-refusal`: what people see, and when and whom to trust."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from guardpaint.cli.common import PolicyOption


def add_to(app: typer.Typer) -> None:
    """Add the commands of this module to the group `eval`."""
    app.command("label")(label)


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
