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
from guardpaint.data.commands import app as data_app
from guardpaint.errors import GuardPaintError
from guardpaint.train.commands import app as train_app

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
rollouts_app = typer.Typer(help="Tournaments to learn from: catch states, play contests.", no_args_is_help=True)
app.add_typer(rollouts_app, name="rollouts")
log_app = typer.Typer(help="Verify and replay audit logs.", no_args_is_help=True)
app.add_typer(log_app, name="log")
world_app = typer.Typer(help="The paper-doll world: look at it, export it.", no_args_is_help=True)
app.add_typer(world_app, name="world")
app.add_typer(train_app, name="train")
app.add_typer(data_app, name="data")
eval_app = typer.Typer(help="Measure components and defences; results land with their raw rows.", no_args_is_help=True)
app.add_typer(eval_app, name="eval")
err = Console(stderr=True)
out = Console()


class Mode(StrEnum):
    enforce = "enforce"
    monitor = "monitor"
    off = "off"


GuardOption = Annotated[
    str | None,
    typer.Option("--guard", help="Guard checkpoint: a directory or hub id. Default: the embedded one."),
]
PolicyOption = Annotated[Path | None, typer.Option("--policy", help="Content policy YAML.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def say_metrics(metrics: dict[str, Any]) -> None:
    """One line per metric, with its goal where it has one."""
    for name, found in metrics.items():
        goal = f"  goal {found['goal']}: {'met' if found['met'] else 'NOT met'}" if "goal" in found else ""
        value = "nothing to measure" if found["value"] is None else f"{found['value']:.4g}"
        typer.echo(f"{name:40s} {value} (n={found['n']}){goal}")


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
    from guardpaint import commands

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
    from guardpaint import commands

    raise typer.Exit(commands.audit(images, prompt, category, out_dir, guard, policy, as_json, out, err))


@app.command()
def inspect(
    report: Annotated[Path, typer.Argument(help="A report JSON written by `generate`.")],
    as_json: JsonOption = False,
) -> None:
    """Tell the story of one generation: what the guard saw, tried and decided."""
    from guardpaint import commands

    raise typer.Exit(commands.inspect(report, as_json, out))


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Check what is installed and which weights are found, and run a self-test of the fail-closed paths."""
    from guardpaint import commands

    raise typer.Exit(commands.doctor(as_json, out))


@app.command()
def demo(
    out_dir: Annotated[Path, typer.Option("--out", help="Directory of the gallery.")] = Path("out/gallery"),
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Guarded generation on every family with the embedded models; writes a gallery to open in a browser."""
    from guardpaint import demo as demo_module

    demo_module.run(out_dir, seed, out)


@log_app.command("verify")
def log_verify(
    file: Annotated[Path, typer.Argument(help="Audit log (JSONL).")],
    key_file: Annotated[Path | None, typer.Option(help="Key the log was written with.")] = None,
    anchor: Annotated[Path | None, typer.Option(help="Anchor file: detects a cut tail.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Verify the hash chain. Exits 1 and names the line if the log was edited, reordered or cut."""
    from guardpaint.audit_log import verify_log

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
    from guardpaint.audit_log import read_entries, replay

    rows = read_entries(file)
    if record >= len(rows) or rows[record][2]:
        fail(f"{file}: no record {record}; it has {sum(not r[2] for r in rows)}")
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


@world_app.command("sheet")
def world_sheet(
    file: Annotated[Path, typer.Argument(help="PNG to write.")] = Path("out/world.png"),
    seed: Annotated[int, typer.Option(help="First scene seed.")] = 0,
    columns: Annotated[int, typer.Option(min=1, max=64)] = 12,
    masks: Annotated[bool, typer.Option(help="Tint unsafe pixels.")] = False,
) -> None:
    """A contact sheet: one row per kind of scene."""
    from guardpaint.world.dataset import contact_sheet

    contact_sheet(file, seed, columns, masks=masks)
    typer.echo(str(file))


@world_app.command("export")
def world_export(
    out_dir: Annotated[Path, typer.Argument(help="Directory for the parquet file.")],
    split: Annotated[str, typer.Option(help="train, validation or test; their scenes never meet.")] = "train",
    count: Annotated[int, typer.Option(min=1, help="How many scenes.")] = 1000,
) -> None:
    """Write scenes with captions, masks and attributes as parquet for the `datasets` library."""
    from guardpaint.world.dataset import export

    typer.echo(str(export(out_dir, split, count)))


@world_app.command("measure")
def world_measure(
    part: Annotated[
        list[str] | None,
        typer.Option(help="Measure only this: oracle, render, time, vae4, vae16, a base, eye-BASE. May be repeated."),
    ] = None,
    results: Annotated[Path, typer.Option(help="Results file; rows of other parts in it are kept.")] = Path(
        "docs/results/world.json"
    ),
    count: Annotated[int, typer.Option(help="Held-out prompts of each sort.")] = 500,
) -> None:
    """Measure the embedded models with the oracle: agreement, unsafe yield, KID, PSNR, speed, size."""
    from guardpaint.evaluate import world

    say_metrics(world.run(part or [], results, count))


@world_app.command("sheets")
def world_sheets(
    base: Annotated[str, typer.Argument(help="An embedded base, e.g. mini-sd.")],
    out_dir: Annotated[Path, typer.Option("--out", help="Where the sheets go.")] = Path("out/sheets"),
) -> None:
    """Numbered sheets of 200 generated pictures to label by eye, against which the oracle is checked."""
    from guardpaint.evaluate import world

    for path in world.label_sheets(base, out_dir):
        typer.echo(str(path))


@world_app.command("adopt")
def world_adopt(
    run: Annotated[Path, typer.Argument(help="Run directory of a finished `train generator`.")],
    name: Annotated[str, typer.Argument(help="Name among the embedded models, e.g. mini-sd.")],
) -> None:
    """Ship a finished model: copy it into the package's assets, sharing parts that are there already."""
    from guardpaint import bases

    for link in bases.adopt(run, name):
        typer.echo(link)
    typer.echo(f"assets are {bases.megabytes():.1f} MB now")


@rollouts_app.command("states")
def rollouts_states(
    base: Annotated[str, typer.Argument(help="Base whose guarded generations are caught at their first tournament.")],
    guard: Annotated[str, typer.Option(help="Guard checkpoint.")],
    split: Annotated[str, typer.Option(help="train or test.")] = "train",
    count: Annotated[int, typer.Option(min=1, help="States wanted.")] = 150,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder; run again to go on.")] = Path("runs/rollouts"),
) -> None:
    """Generate under guard from unsafe prompts and store where each first tournament starts."""
    from guardpaint.errors import BadInput
    from guardpaint.rollouts import ROLLOUT_SEEDS, collect_states, load_states
    from guardpaint.system import GuardPaint

    if split not in ROLLOUT_SEEDS:
        raise BadInput(f"split {split!r}: choose {', '.join(ROLLOUT_SEEDS)}")
    path = collect_states(GuardPaint.from_pretrained(guard), base, split, count, out_dir)
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
    from guardpaint import rollouts

    states = [s for f in sorted(out_dir.glob(f"*-{split}.pt")) for s in rollouts.load_states(f)]
    jobs = [(part, guard, proposer, n, out_dir / split) for part in rollouts.shards(states, processes) if part]
    if not jobs:
        raise typer.BadParameter(f"{out_dir}: no states of split {split}; catch some with `rollouts states`")
    typer.echo(f"{rollouts.distribute(jobs, ray)} new tournaments in {out_dir / split}")


@eval_app.command("inpainter")
def eval_inpainter(
    model: Annotated[list[str], typer.Option(help="NAME=DIR of an inpainting pipeline; repeat. Compare with base=…")],
    auditor: Annotated[Path | None, typer.Option(help="Auditor that masks and whose features rate seams.")] = None,
    results: Annotated[Path, typer.Option(help="Results file.")] = Path("docs/results/inpainter.json"),
    count: Annotated[int, typer.Option(min=2, help="Held-out unsafe scenes.")] = 500,
) -> None:
    """Judge repairs of unsafe scenes by the oracle: safe, in context, seamless, detailed; and benign fills."""
    from guardpaint.audit.model import AuditorScorer
    from guardpaint.errors import BadInput
    from guardpaint.evaluate import inpainter as measure
    from guardpaint.verify.seam import BackboneSeam, PixelSeam

    named = dict(m.partition("=")[::2] for m in model)
    if not all(named.values()):
        raise BadInput(f"--model {' '.join(model)}: write NAME=DIR, as in base=mini-inpaint")
    judge = AuditorScorer.from_pretrained(auditor) if auditor else None
    say_metrics(measure.run(named, results, count, judge, BackboneSeam(judge) if judge else PixelSeam()))


@eval_app.command("proposers")
def eval_proposers(
    guard: Annotated[str, typer.Option(help="Guard checkpoint.")],
    learned: Annotated[str | None, typer.Option(help="Trained proposer.")] = None,
    ranker: Annotated[str | None, typer.Option(help="Trained ranker.")] = None,
    rollouts_dir: Annotated[Path, typer.Option("--rollouts", help="Folder with states.")] = Path("runs/rollouts"),
    results: Annotated[Path, typer.Option(help="Results file.")] = Path("docs/results/proposer.json"),
    trials: Annotated[int, typer.Option(min=0, help="Trials of the Bayesian-optimised fixed knobs; 0: without.")] = 40,
) -> None:
    """Compare proposers from the same states; measure the ranker; plot every knob's effect."""
    from guardpaint.errors import BadInput
    from guardpaint.evaluate import proposers as measure
    from guardpaint.evaluate.oracle import Oracle
    from guardpaint.repair.knobs import FixedProposer, UniformProposer
    from guardpaint.repair.ranker import Ranker
    from guardpaint.rollouts import load_states, open_proposer, read_rollouts
    from guardpaint.system import GuardPaint
    from guardpaint.types import Proposer

    parts = GuardPaint.from_pretrained(guard).parts
    states = {f.name.removesuffix("-test.pt"): load_states(f) for f in sorted(rollouts_dir.glob("*-test.pt"))}
    if not states:
        raise BadInput(f"{rollouts_dir}: no states of split test; catch some with `guardpaint rollouts states`")
    compared: list[Proposer] = [UniformProposer(), FixedProposer(), measure.FirstCandidate()]
    if trials:
        train = [s for f in sorted(rollouts_dir.glob("*-train.pt")) for s in load_states(f)[:6]]
        compared.append(measure.optimised(train, parts, trials))
    if learned:
        compared.append(open_proposer(learned))
    judge = Ranker.from_pretrained(ranker) if ranker else None
    say_metrics(measure.run(parts, states, compared, judge, results, Oracle.load()))
    if (rollouts_dir / "train").is_dir():
        picture = measure.dependence(read_rollouts(rollouts_dir / "train", "uniform"), results.with_name("knobs.png"))
        typer.echo(str(picture))


@eval_app.command("attack")
def eval_attack(
    attack: Annotated[str, typer.Argument(help="sneakyprompt, mma, pgj, daca or ring_a_bell.")],
    base: Annotated[str, typer.Option(help="Base under attack, behind a keyword and embedding filter.")] = "mini-sd",
    count: Annotated[int, typer.Option(min=1, help="Target prompts.")] = 200,
    budget: Annotated[int, typer.Option(min=1, help="Questions per target.")] = 20,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for the prompts found.")] = Path("runs/attacks"),
) -> None:
    """Search prompts that get past the filter of a stock system; run again to go on."""
    from guardpaint.commands import load_base
    from guardpaint.errors import BadInput
    from guardpaint.evaluate.attacks import search, system
    from guardpaint.evaluate.defences.base import Base
    from guardpaint.evaluate.defences.prompt_filter import PromptFilter, base_encoder
    from guardpaint.evaluate.oracle import Oracle
    from guardpaint.world.captions import KEYWORDS

    if attack not in search.ATTACKS:
        raise BadInput(f"attack {attack!r}: choose one of {', '.join(search.ATTACKS)}")
    pipe, call = load_base(base)
    oracle, stock = Oracle.load(), Base(base, pipe, call)
    door = PromptFilter(encode=base_encoder(pipe), limit=0.985, words=KEYWORDS)
    surrogate_pipe = pipe if base == "mini-sd" else load_base("mini-sd")[0]
    surrogate = system.Surrogate(surrogate_pipe.tokenizer, surrogate_pipe.text_encoder)

    def target() -> system.Target:
        return system.Target(stock, door, lambda i: oracle.look([i]).categories()[0] != "safe", budget)

    prompts = [(seed, text) for seed, _, text in search.targets(count)]
    found = search.run(search.ATTACKS[attack](), prompts, target, surrogate, out_dir / f"{attack}-{base}.jsonl")
    hits = sum(bool(r["success"]) for r in found)
    typer.echo(f"{attack} on {base}: {hits} of {len(found)} prompts succeed behind the filter")


@eval_app.command("run")
def eval_run(
    suite: Annotated[str, typer.Argument(help="benign, attacks, one attack's name, or a published prompt file.")],
    base: Annotated[list[str], typer.Option(help="Base model; repeat.")],
    defence: Annotated[list[str], typer.Option(help="Defence; repeat. `--defence help` lists them.")],
    guard: Annotated[str | None, typer.Option(help="Guard checkpoint of the guarded and post-hoc defences.")] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Prompts per suite.")] = 200,
    attacks: Annotated[Path, typer.Option(help="Folder of `eval attack`.")] = Path("runs/attacks"),
    searched: Annotated[str, typer.Option(help="Base the attack prompts were searched on.")] = "mini-sd",
    file_format: Annotated[str | None, typer.Option("--format", help="Format of a prompt file.")] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="Run directory; run again to go on.")] = Path("runs/eval"),
    pictures: Annotated[int, typer.Option(min=0, help="Pictures kept per base and defence.")] = 60,
) -> None:
    """Prompts through defences on bases, judged by the oracle; writes rows, samples.parquet, results.json, a report."""
    from guardpaint.evaluate import harness

    for line in harness.run(suite, base, defence, guard, n, attacks, searched, file_format, out_dir, pictures):
        typer.echo(line)


@eval_app.command("adaptive")
def eval_adaptive(
    guard: Annotated[str, typer.Option(help="Guard checkpoint under attack.")],
    base: Annotated[str, typer.Option(help="Base model.")] = "mini-sd",
    count: Annotated[int, typer.Option(min=1, help="Pictures for gradient attacks.")] = 200,
    disguises: Annotated[int, typer.Option(min=0, help="Targets for the search through wordings and seeds.")] = 50,
    results: Annotated[Path, typer.Option(help="Results file.")] = Path("docs/results/adaptive.json"),
) -> None:
    """Attack with full knowledge of the auditor; measure the detector and the system, with and without mitigation."""
    from guardpaint.commands import load_base
    from guardpaint.evaluate import adaptive
    from guardpaint.evaluate.defences.base import Base
    from guardpaint.system import GuardPaint

    say_metrics(
        adaptive.run(GuardPaint.from_pretrained(guard), Base(base, *load_base(base)), results, count, disguises)
    )


@eval_app.command("prompts")
def eval_prompts(
    file: Annotated[Path, typer.Argument(help="A published prompt file.")],
    file_format: Annotated[str | None, typer.Option("--format", help="Its format; default: by its columns.")] = None,
) -> None:
    """Check that a benchmark file is read as published."""
    from guardpaint.evaluate.benchmarks import load

    found = load(file, file_format)
    typer.echo(f"{file}: {found.name}, {len(found.prompts)} prompts")
    for note in found.notes[:20]:
        err.print(f"not as published: {note}", style="yellow", markup=False)


@eval_app.command("history")
def eval_history(
    inpainter: Annotated[str, typer.Option(help="Inpainter before any alignment.")],
    sft: Annotated[str, typer.Option(help="The same after SFT, merged.")],
    pairs: Annotated[Path, typer.Option(help="Encoded pairs.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the runs.")] = Path("runs/history"),
    results: Annotated[Path, typer.Option(help="Results file.")] = Path("docs/results/alignment_history.json"),
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run.")] = 300,
) -> None:
    """Retell the paper's experiments with its flags, small, and write down which failures were really seen."""
    from guardpaint.evaluate import history

    typer.echo(history.run(inpainter, sft, pairs, out, results, steps))


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
) -> None:
    """Serve guarded generation: an OpenAI-compatible API, a page at /, metrics at /metrics."""
    from guardpaint.serve.start import Options, start

    start(
        Options(
            base, guard, policy, host, port, keys, queue, batch, retain_evidence, audit_log, key_file, anchor, self_test
        ),
        err,
    )


@app.command()
def calibrate(
    auditor: Annotated[Path, typer.Option(help="Auditor checkpoint.")],
    views: Annotated[Path, typer.Option(help="Folder with views of split calibration.")],
    out_file: Annotated[Path, typer.Option("--out", help="Where the thresholds go (JSON).")] = Path("calibration.json"),
    alpha: Annotated[float, typer.Option(help="Miss rate per category, at most.")] = 0.05,
    beta: Annotated[float, typer.Option(help="Share of unsafe area left uncovered, at most.")] = 0.10,
    band: Annotated[list[float] | None, typer.Option(help="Progress at which a band begins; repeat.")] = None,
    guard: Annotated[Path | None, typer.Option(help="Write the thresholds into this guard's config too.")] = None,
) -> None:
    """Find thresholds with a promised miss rate and coverage (conformal risk control), per band of progress."""
    from guardpaint.evaluate import calibrate as measure

    starts = sorted({0.0, *(band or [0.7, 0.9])})
    found = measure.run(auditor, views, out_file, alpha, beta, starts, guard)
    for b in found.bands:
        limits = ", ".join(f"{name} {t:.3f} (n={b.n[name]})" for name, t in b.thresholds.items())
        typer.echo(f"from progress {b.start:g}: {limits}; mask level {b.mask_level:.3f}")


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


@eval_app.command("auditor")
def eval_auditor(
    auditor: Annotated[Path, typer.Option(help="Auditor checkpoint.")],
    views: Annotated[Path, typer.Option(help="Folder with test views of the bases (`data views --split test`).")],
    results: Annotated[Path, typer.Option(help="Results file.")] = Path("docs/results/auditor.json"),
    count: Annotated[int, typer.Option(min=100, help="Finished pictures; other sets are a quarter of it.")] = 2000,
) -> None:
    """Measure an auditor on held-out pictures: classes, false triggers, unfinished views, masks, F, P, B, shift."""
    from guardpaint.evaluate import auditor as measure

    say_metrics(measure.run(auditor, views, results, count))


def read_key(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        fail(f"{path}: key cannot be read ({error.strerror})")
    if not key:
        fail(f"{path}: the key file is empty")
    return key


def fail(message: str) -> NoReturn:
    raise GuardPaintError(message)


def dump(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
