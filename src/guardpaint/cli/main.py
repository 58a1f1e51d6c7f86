"""The command line. Heavy imports wait until a command needs them.

Exit codes: 0 clean or repaired · 1 error · 2 usage · 3 blocked · 4 released although flagged.
"""

from __future__ import annotations

import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from guardpaint import __version__
from guardpaint.cli.data import app as data_app
from guardpaint.errors import BadConfig, GuardPaintError
from guardpaint.cli.evaluate import app as eval_app
from guardpaint.cli.train import app as train_app
from paperdolls.commands import app as world_app

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its notes about optional packages are not our user's
EXIT_HELP = (
    "Exit codes: 0 clean or repaired (or blurred), 1 error, 2 usage, 3 at least one image blocked, "
    "4 at least one image released although flagged."
)
app = typer.Typer(
    help="GuardPaint: safety for text-to-image diffusion that repairs the picture while it is being made.",
    epilog=EXIT_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
rollouts_app = typer.Typer(help="Tournaments to learn from: catch states, play tournaments.", no_args_is_help=True)
app.add_typer(rollouts_app, name="rollouts")
log_app = typer.Typer(help="Verify and replay audit logs.", no_args_is_help=True)
app.add_typer(log_app, name="log")
app.add_typer(world_app, name="world")
app.add_typer(train_app, name="train")
app.add_typer(data_app, name="data")
app.add_typer(eval_app, name="eval")
err = Console(stderr=True)
out = Console()


class Mode(StrEnum):
    enforce = "enforce"
    monitor = "monitor"
    off = "off"


GuardOption = Annotated[
    str | None,
    typer.Option("--guard", help="Guard: a directory, a hub id, or tiny (random). Default: the embedded one."),
]
PolicyOption = Annotated[Path | None, typer.Option("--policy", help="Content policy YAML.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def main() -> None:
    """Entry point: known errors become one line and exit code 1."""
    try:
        app()
    except GuardPaintError as error:
        err.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        sys.exit(1)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command(epilog=EXIT_HELP)
def generate(
    prompt: Annotated[str, typer.Argument(help="What to draw.")],
    base: Annotated[
        str,
        typer.Option(
            help="Base model: an embedded one (mini-sd, mini-sd3 …; `guardpaint doctor` lists them), a small random "
            "one (tiny-sd, tiny-sdxl, tiny-sd3, tiny-flux), a directory, or a hub id."
        ),
    ] = "mini-sd",
    seed: Annotated[int, typer.Option(help="Seed of the first image; image i uses seed + i.")] = 0,
    n: Annotated[int, typer.Option("--n", min=1, max=64, help="How many images.")] = 1,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Denoising steps; default: what the base was made for, else 25.")
    ] = None,
    size: Annotated[
        int | None, typer.Option(min=8, help="Height and width in pixels; default: the base's own.")
    ] = None,
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
    as_json: JsonOption = False,
) -> None:
    """Generate images under guard; writes PNGs and one report (JSON and HTML) per image."""
    from guardpaint.cli import generate as commands

    options = commands.GenerateOptions(
        prompt, base, seed, n, steps, size, out_dir, guard, policy, mode.value, retain_evidence, audit_log,
        key_file, anchor, as_json,
    )  # fmt: skip
    try:
        code = commands.generate(options, out, err)
    except KeyboardInterrupt:
        err.print("interrupted; nothing was released")
        code = 130
    raise typer.Exit(code)


@app.command()
def audit(
    images: Annotated[list[Path], typer.Argument(help="Image files.")],
    prompt: Annotated[str | None, typer.Option(help="The prompt the image was made from, for faithfulness.")] = None,
    category: Annotated[
        str | None, typer.Option(help="Category of the Grad-CAM overlay; default: the likeliest harm.")
    ] = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Write heat map, Grad-CAM and mask PNGs here.")] = None,
    guard: GuardOption = None,
    policy: PolicyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score finished images: scores, class, heat-map overlay and mask. Exits 3 if any image is flagged."""
    from guardpaint.cli import generate as commands

    raise typer.Exit(commands.audit(images, prompt, category, out_dir, guard, policy, as_json, out, err))


@app.command()
def inspect(
    report: Annotated[Path, typer.Argument(help="A report JSON written by `generate`.")],
    as_json: JsonOption = False,
) -> None:
    """Tell the story of one generation: what the guard saw, tried and decided."""
    from guardpaint.cli import generate as commands

    raise typer.Exit(commands.inspect(report, as_json, out))


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Check what is installed and which weights are found, and run a self-test of the fail-closed paths."""
    from guardpaint.cli import generate as commands

    raise typer.Exit(commands.doctor(as_json, out))


@app.command()
def demo(
    out_dir: Annotated[Path, typer.Option("--out", help="Directory of the gallery.")] = Path("out/gallery"),
    seed: Annotated[int, typer.Option(help="Seed of every picture.")] = 0,
    base: Annotated[list[str] | None, typer.Option(help="Only this embedded base; may be repeated.")] = None,
) -> None:
    """Every embedded base, unguarded and guarded with the same seeds; writes a gallery to open in a browser."""
    from guardpaint.cli import demo as demo_module

    demo_module.run(out_dir, seed, out, base)


@log_app.command("verify")
def log_verify(
    file: Annotated[Path, typer.Argument(help="Audit log (JSONL).")],
    key_file: Annotated[Path | None, typer.Option(help="Key the log was written with.")] = None,
    anchor: Annotated[Path | None, typer.Option(help="Anchor file: detects a cut tail.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Verify the hash chain. Exits 1 and names the line if the log was edited, reordered or cut."""
    from guardpaint.loop.audit_log import read_key, verify_log

    state = verify_log(file, key=read_key(key_file), anchor=anchor)
    if as_json:
        typer.echo(json.dumps(vars(state)))
    elif state.ok:
        typer.echo(f"{file}: {state.records} records, chain intact")
        if not state.anchored:
            typer.echo("no anchor given: a cut tail would not be noticed")
        if not state.keyed:
            typer.echo("no key given: a rewritten chain would not be noticed")
    else:
        fail(f"{file}: {state.problems[0]}")
    raise typer.Exit(0 if state.ok else 1)


@log_app.command("replay")
def log_replay(
    file: Annotated[Path, typer.Argument(help="Audit log (JSONL).")],
    record: Annotated[int, typer.Option(min=0, help="Record number, from 0.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Recompute gates, utilities and winners of one record from its recorded scores."""
    from guardpaint.loop.audit_log import read_entries, replay

    rows = read_entries(file)
    if record >= len(rows) or rows[record][2]:
        fail(f"{file}: no record {record}; it has {sum(not r[2] for r in rows)}")
    if "report" not in rows[record][1]:
        fail(f"{file}: record {record} is an event, not a picture: {json.dumps(rows[record][1].get('event'))}")
    problems = replay(rows[record][1]["report"])
    tournaments = sum(len(s["tournaments"]) for s in rows[record][1]["report"]["steps"])
    if as_json:
        typer.echo(json.dumps({"record": record, "tournaments": tournaments, "problems": problems}))
    elif problems:
        for p in problems:
            typer.echo(p, err=True)
    else:
        typer.echo(f"record {record}: {tournaments} tournaments recomputed, every decision follows from its scores")
    raise typer.Exit(1 if problems else 0)


@rollouts_app.command("states")
def rollouts_states(
    base: Annotated[str, typer.Argument(help="Base whose guarded generations are caught at their first tournament.")],
    guard: Annotated[str, typer.Option(help="Guard checkpoint.")],
    split: Annotated[str, typer.Option(help="train or test.")] = "train",
    count: Annotated[int, typer.Option(min=1, help="States wanted.")] = 150,
    attacks: Annotated[
        Path | None, typer.Option(help="Folder of `eval attack`: its prompts take turns with those of the world.")
    ] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder; run again to go on.")] = Path("runs/rollouts"),
) -> None:
    """Generate under guard from unsafe prompts and store where each first tournament starts."""
    from guardpaint.errors import BadInput
    from guardpaint.train.rollouts import ROLLOUT_SEEDS, attack_prompts, collect_states, load_states
    from guardpaint.guard import GuardPaint

    if split not in ROLLOUT_SEEDS:
        raise BadInput(f"split {split!r}: choose {', '.join(ROLLOUT_SEEDS)}")
    prompts = attack_prompts(attacks) if attacks else ()
    path = collect_states(GuardPaint.from_pretrained(guard), base, split, count, out_dir, prompts)
    typer.echo(f"{path}: {len(load_states(path))} states")


@rollouts_app.command("play")
def rollouts_play(
    guard: Annotated[str, typer.Option(help="Guard checkpoint.")],
    proposer: Annotated[
        str, typer.Option(help="uniform, fixed, strong, or a trained proposer's directory.")
    ] = "uniform",
    split: Annotated[str, typer.Option(help="train or test.")] = "train",
    n: Annotated[int, typer.Option("--n", min=2, max=64, help="Candidates per tournament.")] = 7,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder of the states; run again to go on.")] = Path(
        "runs/rollouts"
    ),
    processes: Annotated[int, typer.Option(min=1, help="Processes side by side.")] = 1,
    ray: Annotated[bool, typer.Option("--ray", help="Spread over a Ray cluster instead.")] = False,
) -> None:
    """Play one tournament from every stored state; rows go to OUT/SPLIT as parquet."""
    from guardpaint.train import rollouts
    from guardpaint.store.jobs import spread

    states = [s for f in sorted(out_dir.glob(f"*-{split}.pt")) for s in rollouts.load_states(f)]
    jobs = [(part, guard, proposer, n, out_dir / split) for part in rollouts.shards(states, processes) if part]
    if not jobs:
        raise typer.BadParameter(f"{out_dir}: no states of split {split}; catch some with `rollouts states`")
    typer.echo(f"{sum(spread(rollouts.work, jobs, processes, ray))} new tournaments in {out_dir / split}")


@app.command()
def serve(
    base: Annotated[str, typer.Option(help="Base model: an embedded one, a directory, or a hub id.")] = "mini-sd",
    guard: GuardOption = None,
    policy: PolicyOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    keys: Annotated[
        Path | None, typer.Option(help="JSON file of API keys; needed on any address but loopback.")
    ] = None,
    queue: Annotated[int, typer.Option(min=1, help="Pictures that may wait.")] = 32,
    batch: Annotated[int, typer.Option(min=1, help="Compatible pictures drawn together.")] = 4,
    retain_evidence: Annotated[bool, typer.Option(help="Keep un-blurred evidence for operators.")] = False,
    audit_log: Annotated[
        Path | None, typer.Option(help="Append to this audit log; unwritable: nothing is released.")
    ] = None,
    key_file: Annotated[Path | None, typer.Option(help="Key of the audit log's HMAC.")] = None,
    anchor: Annotated[Path | None, typer.Option(help="Where to anchor the audit log's head.")] = None,
    self_test: Annotated[Path | None, typer.Option(help="A known-bad picture that /ready must see caught.")] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Deploy on a Ray cluster: RAY_ADDRESS, or this machine.")] = False,
    replicas: Annotated[int, typer.Option(min=1, help="With --ray: generators to begin with.")] = 1,
    most_replicas: Annotated[int | None, typer.Option(min=1, help="With --ray: generators under load.")] = None,
) -> None:
    """Serve guarded generation: an OpenAI-compatible API, a page at /, metrics at /metrics."""
    try:
        from guardpaint.serve.start import Options, start, start_cluster
    except ImportError as error:
        raise BadConfig("serving needs more packages: pip install 'guardpaint[serve]'") from error

    options = Options(
        base, guard, policy, host, port, keys, queue, batch, retain_evidence, audit_log, key_file, anchor, self_test
    )
    if ray:
        start_cluster(options, replicas, most_replicas or replicas, err)
    else:
        start(options, err)


@app.command()
def calibrate(
    auditor: Annotated[Path, typer.Option(help="Auditor checkpoint.")],
    views: Annotated[Path, typer.Option(help="Folder with views of split calibration.")],
    out_file: Annotated[Path, typer.Option("--out", help="Where the thresholds go (JSON).")] = Path("calibration.json"),
    alpha: Annotated[float, typer.Option(help="Miss rate per category, at most.")] = 0.05,
    beta: Annotated[float, typer.Option(help="Share of unsafe area left uncovered, at most.")] = 0.10,
    band: Annotated[list[float] | None, typer.Option(help="Progress at which a band begins; repeat.")] = None,
    guard: Annotated[Path | None, typer.Option(help="Write the thresholds into this guard's config too.")] = None,
    policy: Annotated[Path | None, typer.Option(help="Policy the auditor was trained for; default: embedded.")] = None,
) -> None:
    """Find thresholds with a promised miss rate and coverage (conformal risk control), per band of progress."""
    from guardpaint.evaluate import calibrate as measure
    from guardpaint.policy import Policy

    starts = sorted({0.0, *(band or [0.7, 0.9])})
    rules = Policy.load(policy) if policy else Policy.default()
    found = measure.run(auditor, views, out_file, measure.Promise(alpha, beta, starts), guard, rules)
    for b in found.bands:
        limits = ", ".join(f"{name} {t:.3f} (n={b.n[name]})" for name, t in b.thresholds.items())
        level = "the configuration's (no masks are known)" if b.mask_level is None else f"{b.mask_level:.3f}"
        typer.echo(f"from progress {b.start:g}: {limits}; mask level {level}")


@app.command()
def drift(
    calibration: Annotated[Path, typer.Argument(help="The file `guardpaint calibrate` wrote.")],
    log: Annotated[Path, typer.Argument(help="An audit log (JSONL).")],
) -> None:
    """Do live scores still look like the calibration's? Exit code 1 when it is time to calibrate anew."""
    from guardpaint.evaluate import calibrate as measure

    index, n = measure.drift(calibration, log)
    word = "calibrate anew" if index > 0.25 else "worth a look" if index > 0.1 else "as calibrated"
    typer.echo(f"stability index {index:.3f} over {n} audits: {word}")
    raise typer.Exit(1 if index > 0.25 else 0)


def fail(message: str) -> NoReturn:
    raise GuardPaintError(message)


def dump(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
