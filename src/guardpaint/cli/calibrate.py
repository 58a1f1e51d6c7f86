"""`guardpaint calibrate` sets thresholds with a bounded miss rate; `guardpaint drift` says whether they still hold."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from guardpaint.cli.common import DeviceOption


def calibrate(
    auditor: Annotated[Path | None, typer.Option(help="A trained auditor, calibrated on --views.")] = None,
    views: Annotated[Path | None, typer.Option(help="Folder with views of split calibration.")] = None,
    pictures: Annotated[
        Path | None,
        typer.Option(help="Harmless pictures: sets the levels of any auditor and approver of --guard on them."),
    ] = None,
    unsafe: Annotated[
        Path | None, typer.Option(help="Labelled harmful pictures: one subfolder for each category.")
    ] = None,
    alarms: Annotated[float, typer.Option(help="With --pictures: largest share of harmless pictures flagged.")] = 0.05,
    misses: Annotated[float, typer.Option(help="With --unsafe: largest share of a category that may pass.")] = 0.10,
    may_raise: Annotated[
        bool, typer.Option("--raise", help="A level may rise above its publisher's although misses are not measured.")
    ] = False,
    out_file: Annotated[Path, typer.Option("--out", help="File for the thresholds (JSON).")] = Path("calibration.json"),
    alpha: Annotated[float, typer.Option(help="Highest miss rate per category.")] = 0.05,
    beta: Annotated[float, typer.Option(help="Highest share of unsafe area left uncovered.")] = 0.10,
    band: Annotated[
        list[float] | None, typer.Option(help="Progress at which a band begins; repeat. Default: 0.7, 0.9.")
    ] = None,
    guard: Annotated[Path | None, typer.Option(help="Write the thresholds into this guard's config too.")] = None,
    policy: Annotated[Path | None, typer.Option(help="Policy the auditor was trained for; default: embedded.")] = None,
    device: DeviceOption = None,
) -> None:
    """Set thresholds with finite-sample bounds, in one of two ways.

    A trained auditor: --auditor and --views bound misses and coverage per band of progress. Any other guard: --guard
    and --pictures bound false alarms on your own harmless pictures, and with --unsafe misses too. Pictures in one
    subfolder, such as crops of one photograph, count as one.
    """
    from guardpaint.errors import BadInput
    from guardpaint.policy import Policy

    if pictures is not None:
        if guard is None or auditor is not None or views is not None:
            raise BadInput("--pictures sets the levels of a whole guard: name its folder with --guard, and no --views")
        calibrate_pictures(guard, pictures, unsafe, (alarms, misses, may_raise), device)
        return
    if auditor is None or views is None:
        raise BadInput("name --auditor and --views for a trained auditor, or --guard and --pictures for any other")
    from guardpaint.evaluate import calibrate as measure

    starts = sorted({0.0, *(band or [0.7, 0.9])})
    rules = Policy.load(policy) if policy else Policy.default()
    calibration = measure.run(auditor, views, out_file, measure.Promise(alpha, beta, starts), guard, rules)
    for b in calibration.bands:
        limits = ", ".join(f"{name} {t:.3f} (n={b.n[name]})" for name, t in b.thresholds.items())
        level = "as configured (no masks are known)" if b.mask_level is None else f"{b.mask_level:.3f}"
        typer.echo(f"from progress {b.start:g}: {limits}; mask level {level}")


def calibrate_pictures(
    guard: Path, pictures: Path, unsafe: Path | None, goals: tuple[float, float, bool], device: str | None
) -> None:
    """Set the levels of a guard's parts and print them."""
    from guardpaint.evaluate import picture_calibration as measure

    levels = measure.run(guard, pictures, unsafe, measure.Goals(*goals), device)
    for role, chosen in levels.parts.items():
        for category, one in chosen.items():
            missed = "misses not measured"
            if one.misses is not None:
                missed = f"{one.misses['value']:.3f} of {one.misses['n']} missed"
            change = f"{one.published:.4f} -> {one.level:.4f} ({one.why})"
            typer.echo(f"{role}, {category}: {change}; {rate(one.alarms)}; {missed}")
    typer.echo(f"the whole guard: {rate(levels.alarms)}")


def rate(alarms: dict[str, Any]) -> str:
    """A share of false alarms in words, with its interval."""
    low, high = alarms["ci"]
    return f"{alarms['value']:.3f} [{low:.3f}, {high:.3f}] of {alarms['n']} harmless flagged"


def calibrate_scope(
    guard: Annotated[Path, typer.Argument(help="Folder of the guard; the scope is written into it.")],
    pixels: Annotated[tuple[int, int], typer.Option(help="Smallest and largest side of pictures that it will see.")],
    guidance: Annotated[tuple[float, float], typer.Option(help="Lowest and highest guidance scale.")] = (1.0, 8.0),
    steps: Annotated[tuple[int, int], typer.Option(help="Fewest and most denoising steps.")] = (4, 100),
    side: Annotated[int, typer.Option(help="Shorter side of the pictures that the auditor learned from.")] = 512,
    alarms: Annotated[float, typer.Option(help="Share of harmless large pictures that tiles alone may flag.")] = 0.05,
    count: Annotated[int, typer.Option(help="Known pictures that large ones are made of.")] = 200,
    out: Annotated[Path, typer.Option(help="File for the measured rates (JSON, rows beside it).")] = Path("scope.json"),
    testbed: Annotated[
        str | None, typer.Option(help="Testbed with known pictures; default: the installed one.")
    ] = None,
    device: DeviceOption = None,
) -> None:
    """Set the settings that a guard is made for, and the threshold with which it audits larger pictures in tiles.

    Pictures larger than --side are audited in overlapping tiles too. Outside of the scope a service refuses, and the
    library warns and records it.
    """
    from guardpaint.config import Scope
    from guardpaint.evaluate import scope as measure

    wanted = Scope(side, pixels, guidance, steps)
    found = measure.run(guard, wanted, out, alarms=alarms, count=count, testbed=testbed, device=device)
    typer.echo(f"tiles of {side} pixels, lowered by {found.tile_offset:g} logits; rates in {out}")


def calibrate_waves(
    guard: Annotated[Path, typer.Argument(help="Folder of the guard; waves and their limit are written into it.")],
    first: Annotated[int, typer.Option(help="Candidates of the first wave.")] = 1,
    count: Annotated[int, typer.Option(help="Tournaments to play in full, over all bases.", min=10)] = 300,
    tolerance: Annotated[float, typer.Option(help="By how much the share of unsafe winners may rise.")] = 0.01,
    base: Annotated[list[str] | None, typer.Option(help="Base model; repeat. Default: all of the testbed.")] = None,
    out: Annotated[Path, typer.Option(help="File for the measured rates (JSON, rows beside it).")] = Path("waves.json"),
    testbed: Annotated[str | None, typer.Option(help="Testbed with bases and a judge; default: the installed.")] = None,
) -> None:
    """Find the S from which on the first candidates are good enough to end a tournament, and turn waves on.

    Most tournaments then paint one candidate and not five. The judge of the testbed says how safe the early choice is.
    """
    from guardpaint.evaluate import waves as measure

    limit = measure.run(guard, out, first=first, count=count, tolerance=tolerance, bases=base or [], testbed=testbed)
    typer.echo(f"a first wave of {first} ends the tournament from S = {limit:g} on; rates in {out}")


def drift(
    calibration: Annotated[Path, typer.Argument(help="The file `guardpaint calibrate` wrote.")],
    log: Annotated[Path, typer.Argument(help="An audit log (JSONL).")],
) -> None:
    """Compare the scores in an audit log with those of the calibration. Exit code 1 means: calibrate again."""
    from guardpaint.evaluate import calibrate as measure

    index, n = measure.drift(calibration, log)
    advice = "calibrate again" if index > 0.25 else "worth a look" if index > 0.1 else "as calibrated"
    typer.echo(f"stability index {index:.3f} over {n} audits: {advice}")
    raise typer.Exit(1 if index > 0.25 else 0)
