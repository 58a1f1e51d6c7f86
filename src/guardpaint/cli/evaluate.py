"""`guardpaint eval …`. Heavy imports wait until a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

app = typer.Typer(help="Measure components and defences; results land with their raw rows.", no_args_is_help=True)
err = Console(stderr=True)


def clean_target(path: Path) -> Path:
    """Refuse a published results file before hours of work if the checkout has uncommitted changes."""
    from guardpaint.store.results import require_clean

    require_clean(path)
    return path


ResultsFile = Annotated[
    Path,
    typer.Option(
        help="Results file. docs/results needs a checkout without uncommitted changes.", callback=clean_target
    ),
]


def say_metrics(metrics: dict[str, Any]) -> None:
    """One line per metric, with its goal where it has one."""
    for name, found in metrics.items():
        goal = f"  goal {found['goal']}: {'met' if found['met'] else 'NOT met'}" if "goal" in found else ""
        value = "nothing to measure" if found["value"] is None else f"{found['value']:.4g}"
        typer.echo(f"{name:40s} {value} (n={found['n']}){goal}")


@app.command("inpainter")
def eval_inpainter(
    model: Annotated[list[str], typer.Option(help="NAME=DIR of an inpainting pipeline; repeat. Compare with base=…")],
    auditor: Annotated[Path | None, typer.Option(help="Auditor that masks and whose features rate seams.")] = None,
    results: ResultsFile = Path("docs/results/inpainter.json"),
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


@app.command("proposers")
def eval_proposers(
    guard: Annotated[str, typer.Option(help="Guard checkpoint.")],
    learned: Annotated[str | None, typer.Option(help="Trained proposer.")] = None,
    ranker: Annotated[str | None, typer.Option(help="Trained ranker.")] = None,
    rollouts_dir: Annotated[Path, typer.Option("--rollouts", help="Folder with states.")] = Path("runs/rollouts"),
    results: ResultsFile = Path("docs/results/proposer.json"),
    trials: Annotated[int, typer.Option(min=0, help="Trials of the Bayesian-optimised fixed knobs; 0: without.")] = 40,
) -> None:
    """Compare proposers from the same states; measure the ranker; plot every knob's effect."""
    from guardpaint.errors import BadInput
    from guardpaint.evaluate import proposers as measure
    from paperdolls.oracle import Oracle
    from guardpaint.repair.knobs import FixedProposer, UniformProposer
    from guardpaint.repair.ranker import Ranker
    from guardpaint.train.rollouts import load_states, open_proposer, read_rollouts
    from guardpaint.guard import GuardPaint
    from guardpaint.types import Proposer

    whole = GuardPaint.from_pretrained(guard)
    states = {f.name.removesuffix("-test.pt"): load_states(f) for f in sorted(rollouts_dir.glob("*-test.pt"))}
    if not states:
        raise BadInput(f"{rollouts_dir}: no states of split test; catch some with `guardpaint rollouts states`")
    compared: list[Proposer] = [UniformProposer(), FixedProposer()]
    if trials:
        train = [s for f in sorted(rollouts_dir.glob("*-train.pt")) for s in load_states(f)[:6]]
        compared.append(measure.optimised_once(train, whole, trials, rollouts_dir / "optimised.json"))
    if learned:
        compared.append(open_proposer(learned))
    judge = Ranker.from_pretrained(ranker) if ranker else None
    say_metrics(measure.run(whole, states, compared, judge, results, Oracle.load()))
    if (rollouts_dir / "train").is_dir():
        played = read_rollouts(rollouts_dir / "train", "uniform")
        picture = measure.dependence(played, results.with_name("proposer-knobs.png"))
        typer.echo(str(picture))


@app.command("attack")
def eval_attack(
    attack: Annotated[str, typer.Argument(help="sneakyprompt, mma, pgj, daca or ring_a_bell.")],
    base: Annotated[str, typer.Option(help="Base under attack, behind a keyword and embedding filter.")] = "mini-sd",
    count: Annotated[int, typer.Option(min=1, help="Target prompts.")] = 200,
    budget: Annotated[int, typer.Option(min=1, help="Questions per target.")] = 20,
    first: Annotated[
        int, typer.Option("--seed", help="Scene of the first target; to learn from, take others than to evaluate on.")
    ] = 99_000_000,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for the prompts found.")] = Path("runs/attacks"),
) -> None:
    """Search prompts that get past the filter of a stock system; run again to go on."""
    import inspect

    from guardpaint.store.checkpoint import fingerprint
    from guardpaint.cli.generate import load_base
    from guardpaint.errors import BadInput
    from guardpaint.evaluate.attacks import search, system
    from guardpaint.evaluate.defences import prompt_filter
    from guardpaint.evaluate.defences.base import Base, base_hash, short_hash
    from paperdolls.oracle import Oracle

    if attack not in search.ATTACKS:
        raise BadInput(f"attack {attack!r}: choose one of {', '.join(search.ATTACKS)}")
    pipe, call = load_base(base)
    oracle, stock = Oracle.load(), Base(base, pipe, call)
    door = prompt_filter.stock_filter(prompt_filter.base_encoder(pipe))
    surrogate_pipe = pipe if base == "mini-sd" else load_base("mini-sd")[0]
    surrogate = system.Surrogate(surrogate_pipe.tokenizer, surrogate_pipe.text_encoder)

    def target() -> system.Target:
        return system.Target(stock, door, lambda i: oracle.look([i]).categories()[0] != "safe", budget)

    prompts = [(seed, text) for seed, _, text in search.targets(count, first)]
    rules = inspect.getsource(prompt_filter), door.words, fingerprint(surrogate_pipe.text_encoder)
    against = short_hash(base_hash(stock), fingerprint(oracle.net), budget, vars(search.ATTACKS[attack]()), rules)
    file = out_dir / f"{attack}-{base}.jsonl"
    found = search.run(search.ATTACKS[attack](), prompts, target, surrogate, file, against)
    hits = sum(bool(r["success"]) for r in found)
    typer.echo(f"{attack} on {base}: {hits} of {len(found)} prompts succeed behind the filter")


@app.command("run")
def eval_run(
    suite: Annotated[str, typer.Argument(help="benign, attacks, one attack's name, or a published prompt file.")],
    base: Annotated[list[str], typer.Option(help="Base model; repeat.")],
    defence: Annotated[
        list[str], typer.Option("--defence", "--defense", help="Defence; repeat. `--defence help` lists them.")
    ],
    guard: Annotated[
        str | None, typer.Option(help="Guard of the guarded and post-hoc defences; default: the embedded one.")
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Prompts per suite.")] = 200,
    attacks: Annotated[Path, typer.Option(help="Folder of `eval attack`.")] = Path("runs/attacks"),
    searched: Annotated[str, typer.Option(help="Base the attack prompts were searched on.")] = "mini-sd",
    file_format: Annotated[str | None, typer.Option("--format", help="Format of a prompt file.")] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="Run directory; run again to go on.")] = Path("runs/eval"),
    pictures: Annotated[
        int | None,
        typer.Option(
            min=0, help="Pictures kept per suite, base and defence; all unless told. Kept ones can be judged anew."
        ),
    ] = None,
    judge: Annotated[
        str,
        typer.Option(help="oracle (paper dolls), vlm:MODEL, shieldgemma:MODEL, detector:MODEL, endpoint:URL#MODEL."),
    ] = "oracle",
    metric: Annotated[
        list[str] | None, typer.Option(help="Also score every picture: clip:MODEL, blip:MODEL; repeat.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes side by side, one thread each.")] = 1,
    ray: Annotated[bool, typer.Option("--ray", help="Spread over a Ray cluster instead.")] = False,
) -> None:
    """Prompts through defences on bases, judged; writes rows, samples.parquet, results.json, a report."""
    from guardpaint.evaluate import harness

    for line in harness.run(
        suite, base, defence, guard, n, attacks, searched, file_format, out_dir, pictures, judge, metric or [],
        processes, ray,
    ):  # fmt: skip
        typer.echo(line)


@app.command("report")
def eval_report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories of `eval run`.")],
    adaptive: Annotated[Path | None, typer.Option(help="Results of `eval adaptive`.")] = None,
    results: ResultsFile = Path("docs/results/evaluation.json"),
    times: Annotated[
        Path | None, typer.Option(help="Results of bench/defences.py, whose times are comparable; else the rows' own.")
    ] = None,
) -> None:
    """One results file from finished runs, with KID of benign pictures; their rows are kept beside it."""
    from guardpaint.evaluate import gather

    say_metrics(gather.run(runs, adaptive, results, times))


@app.command("fid")
def eval_fid(
    reference: Annotated[Path, typer.Argument(help="Folder of pictures.")],
    made: Annotated[Path, typer.Argument(help="Folder of other pictures.")],
    features: Annotated[str, typer.Option(help="CLIP vision model, a path or hub id, whose features are compared.")],
) -> None:
    """Fréchet distance between two folders of pictures in a vision model's feature space."""
    from guardpaint.evaluate import real_metrics as real

    net = real.VisionFeatures.from_pretrained(features)
    typer.echo(f"{real.fid(net, real.pictures_in(reference), real.pictures_in(made)):.4f}")


@app.command("adaptive")
def eval_adaptive(
    guard: Annotated[str, typer.Option(help="Guard checkpoint under attack.")],
    base: Annotated[str, typer.Option(help="Base model.")] = "mini-sd",
    count: Annotated[int, typer.Option(min=1, help="Pictures for gradient attacks.")] = 200,
    disguises: Annotated[int, typer.Option(min=0, help="Targets for the search through wordings and seeds.")] = 50,
    results: ResultsFile = Path("docs/results/adaptive.json"),
) -> None:
    """Attack with full knowledge of the auditor; measure the detector and the system, with and without mitigation."""
    from guardpaint.cli.generate import load_base
    from guardpaint.evaluate import adaptive
    from guardpaint.evaluate.defences.base import Base
    from guardpaint.guard import GuardPaint

    say_metrics(
        adaptive.run(GuardPaint.from_pretrained(guard), Base(base, *load_base(base)), results, count, disguises)
    )


@app.command("prompts")
def eval_prompts(
    file: Annotated[Path, typer.Argument(help="A published prompt file.")],
    file_format: Annotated[str | None, typer.Option("--format", help="Its format; default: by its columns.")] = None,
) -> None:
    """Check that a benchmark file is read as published."""
    from guardpaint.data.prompt_files import load

    found = load(file, file_format)
    typer.echo(f"{file}: {found.name}, {len(found.prompts)} prompts")
    for note in found.notes[:20]:
        err.print(f"not as published: {note}", style="yellow", markup=False)


@app.command("history")
def eval_history(
    inpainter: Annotated[str, typer.Option(help="Inpainter before any alignment.")],
    sft: Annotated[str, typer.Option(help="The same after SFT, merged.")],
    pairs: Annotated[Path, typer.Option(help="Encoded pairs.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the runs.")] = Path("runs/history"),
    results: ResultsFile = Path("docs/results/alignment_history.json"),
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run.")] = 300,
) -> None:
    """Retell the paper's experiments with its flags, small, and write down which failures were really seen."""
    from guardpaint.evaluate import history

    typer.echo(history.run(inpainter, sft, pairs, out, results, steps))


@app.command("auditor")
def eval_auditor(
    auditor: Annotated[Path, typer.Option(help="Auditor checkpoint.")],
    views: Annotated[Path, typer.Option(help="Folder with test views of the bases (`data views --split test`).")],
    results: ResultsFile = Path("docs/results/auditor.json"),
    count: Annotated[int, typer.Option(min=100, help="Finished pictures; other sets are a quarter of it.")] = 2000,
    calibration: Annotated[
        Path | None, typer.Option(help="File of `guardpaint calibrate`: its mask level is measured.")
    ] = None,
) -> None:
    """Measure an auditor on held-out pictures: classes, false triggers, unfinished views, masks, F, P, B, shift."""
    from guardpaint.evaluate import auditor as measure

    say_metrics(measure.run(auditor, views, results, count, calibration=calibration))


@app.command("corpus-auditor")
def eval_corpus_auditor(
    auditor: Annotated[Path, typer.Option(help="Auditor checkpoint.")],
    views: Annotated[Path, typer.Option(help="Folder of `data corpus-views`, with split test.")],
    results: ResultsFile,
    count: Annotated[int | None, typer.Option(min=1, help="At most so many views of a file; default: all.")] = None,
    policy: Annotated[Path | None, typer.Option(help="Policy the auditor was trained for; default: embedded.")] = None,
) -> None:
    """Measure an auditor on a labelled corpus: classes, false triggers, F, detection over progress."""
    from guardpaint.evaluate import corpus_auditor as measure
    from guardpaint.policy import Policy

    rules = Policy.load(policy) if policy else Policy.default()
    say_metrics(measure.run(auditor, views, results, rules, count))
