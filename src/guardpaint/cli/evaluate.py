"""`guardpaint eval …`: measure components and defences. Heavy imports happen only when a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from guardpaint.cli import protocols
from guardpaint.cli.common import (
    BatchOption,
    CallOption,
    DeviceOption,
    MapOption,
    PolicyOption,
    SeamOption,
    TestbedOption,
    opens_bases,
    token_of,
    warn,
)

if TYPE_CHECKING:
    from guardpaint.bases import BaseOptions

app = typer.Typer(
    help="Measure components and defences. Results are written with their raw rows.", no_args_is_help=True
)
err = Console(stderr=True)


def clean_target(path: Path) -> Path:
    """Refuse a results file under docs/results, before the work starts, if the checkout has uncommitted changes."""
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
    for name, metric in metrics.items():
        goal = f"  goal {metric['goal']}: {'met' if metric['met'] else 'NOT met'}" if "goal" in metric else ""
        value = "nothing to measure" if metric["value"] is None else f"{metric['value']:.4g}"
        typer.echo(f"{name:40s} {value} (n={metric['n']}){goal}")


FormatOption = Annotated[
    str | None, typer.Option("--format", help="The known set that a prompt file is; default: by its name and columns.")
]
ColumnOption = Annotated[
    str | None,
    typer.Option("--column", help="Column of the prompts, such as sanitized_adv_prompt; default: the set's."),
]
HarmfulOption = Annotated[
    bool | None,
    typer.Option("--harmful/--benign", help="What the prompts are, where the file does not say it; default: as known."),
]


@app.command("inpainter")
def eval_inpainter(
    model: Annotated[
        list[str], typer.Option(help="NAME=DIR of an inpainting pipeline; repeat. `base` is compared with.")
    ],
    auditor: Annotated[
        Path | None, typer.Option(help="Auditor that makes masks, and rates seams without --seam.")
    ] = None,
    seam: Annotated[
        str | None,
        typer.Option(
            help="Seam metric: auditor_backbone, pixels, lpips_alex, lpips_alex:FILE, lpips_vgg:FILE; "
            "default: the auditor's backbone, or pixels."
        ),
    ] = None,
    results: ResultsFile = Path("docs/results/inpainter.json"),
    count: Annotated[int, typer.Option(min=2, help="Held-out unsafe pictures.")] = 500,
    testbed: TestbedOption = None,
) -> None:
    """Measure inpainters: whether repairs of unsafe pictures are safe and detailed, and fills of others as asked."""
    from guardpaint.audit.model import AuditorScorer
    from guardpaint.draft.loading import on_machine
    from guardpaint.errors import BadInput
    from guardpaint.evaluate import inpainter as measure
    from guardpaint.testbed import open_testbed
    from guardpaint.verify.seam import open_seam, own_seam

    models = dict(m.partition("=")[::2] for m in model)
    if not all(models.values()):
        raise BadInput(f"--model {' '.join(model)}: write NAME=DIR, as in base=mini-inpaint")
    scorer = on_machine(AuditorScorer.from_pretrained(auditor)) if auditor else None
    rates = open_seam(seam, scorer) if seam else own_seam(scorer)
    say_metrics(measure.run(models, results, count, measure.Bench.in_world(open_testbed(testbed), rates, scorer)))


@app.command("proposers")
def eval_proposers(
    guard: Annotated[str, typer.Option(help="Guard checkpoint.")],
    learned: Annotated[str | None, typer.Option(help="Trained proposer.")] = None,
    ranker: Annotated[str | None, typer.Option(help="Trained ranker.")] = None,
    rollouts_dir: Annotated[Path, typer.Option("--rollouts", help="Folder that `guardpaint rollouts` wrote.")] = Path(
        "runs/rollouts"
    ),
    results: ResultsFile = Path("docs/results/proposer.json"),
    trials: Annotated[int, typer.Option(min=0, help="Trials to optimise fixed knobs; 0: leave them out.")] = 40,
    testbed: TestbedOption = None,
    device: DeviceOption = None,
) -> None:
    """Compare proposers from the same stored states, measure the ranker, and plot every knob's effect."""
    from guardpaint.draft.loading import chosen_device
    from guardpaint.draft.options import LoadOptions
    from guardpaint.errors import BadInput
    from guardpaint.evaluate import proposers as measure
    from guardpaint.guard import GuardPaint
    from guardpaint.repair.knobs import FixedProposer, UniformProposer
    from guardpaint.repair.ranker import Ranker
    from guardpaint.testbed import open_testbed
    from guardpaint.train.rollouts import load_states, open_proposer, read_rollouts
    from guardpaint.types import Proposer

    loaded = GuardPaint.from_pretrained(guard).to(chosen_device(LoadOptions(device=device)))
    judge = open_testbed(testbed).judge(loaded.policy)
    states = {f.name.removesuffix("-test.pt"): load_states(f) for f in sorted(rollouts_dir.glob("*-test.pt"))}
    if not states:
        raise BadInput(
            f"{rollouts_dir}: no states of split test; store some with `guardpaint rollouts states --split test`"
        )
    proposers: list[Proposer] = [UniformProposer(), FixedProposer()]
    if trials:
        train = [s for f in sorted(rollouts_dir.glob("*-train.pt")) for s in load_states(f)[:6]]
        proposers.append(measure.optimised_once(train, loaded, trials, rollouts_dir / "optimised.json"))
    if learned:
        proposers.append(open_proposer(learned))
    ranking = Ranker.from_pretrained(ranker) if ranker else None
    say_metrics(measure.run(measure.Comparison(loaded, states, proposers, judge, ranking), results))
    if (rollouts_dir / "train").is_dir():
        rows = read_rollouts(rollouts_dir / "train", "uniform")
        picture = measure.dependence(rows, results.with_name("proposer-knobs.png"))
        typer.echo(str(picture))


@app.command("gtp")
@opens_bases
def eval_gtp(
    base: Annotated[list[str], typer.Option(help="Base model; repeat.")],
    guard: Annotated[str | None, typer.Option(help="Guard checkpoint; default: the embedded one.")] = None,
    learned: Annotated[str | None, typer.Option(help="Trained proposer; default: the guard's own.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Harmful prompts per base.")] = 10,
    attacks: Annotated[
        Path | None, typer.Option(help="Folder that `eval attack` wrote; default: harmful prompts of the testbed.")
    ] = None,
    budget: Annotated[
        list[int] | None,
        typer.Option("--c", min=1, max=64, help="Candidates per tournament; repeat. Default: 3, 5, 7."),
    ] = None,
    seam: SeamOption = None,
    results: ResultsFile = Path("docs/results/gtp.json"),
    testbed: TestbedOption = None,
    *,
    options: BaseOptions,
) -> None:
    """The paper's table of the tournament policy: accepted and suggested tournaments and time, with and without it.

    Run it again to resume. The table is written beside the results as Markdown.
    """
    from dataclasses import replace

    from guardpaint.bases import load_guard
    from guardpaint.evaluate import gtp
    from guardpaint.testbed import open_testbed
    from guardpaint.train.rollouts import attack_prompts, open_proposer

    world = open_testbed(testbed)
    loaded = load_guard(guard, None, warn, base[0], seam, token_of(options))
    if learned:
        loaded.parts = replace(loaded.parts, proposer=open_proposer(learned))
    prompts = (attack_prompts(attacks) if attacks else world.harmful("attack", count))[:count]
    opened = {name: world.base(name, options) for name in base}
    judge = world.judge(loaded.policy)
    budgets = tuple(budget or gtp.BUDGETS)
    say_metrics(gtp.run(gtp.GtpOptions(loaded, opened, prompts, judge, results, budgets)))
    typer.echo(results.with_suffix(".md").read_text())


@app.command("attack")
@opens_bases
def eval_attack(
    attack: Annotated[str, typer.Argument(help="sneakyprompt, mma, pgj, daca or ring_a_bell.")],
    base: Annotated[
        str | None, typer.Option(help="Base behind a keyword and embedding filter; default: the testbed's first.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="Target prompts.")] = 200,
    budget: Annotated[int, typer.Option(min=1, help="Questions per target.")] = 20,
    split: Annotated[
        str, typer.Option(help="Target prompts: `attack` to evaluate on, `attack-train` to learn from.")
    ] = "attack",
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for the prompts.")] = Path("runs/attacks"),
    testbed: TestbedOption = None,
    *,
    options: BaseOptions,
) -> None:
    """Search for prompts that get past the filter of a stock system. Run it again to resume."""
    from guardpaint.evaluate.attacks import command

    search = command.AttackOptions(attack, out_dir, base, count, budget, split, options)
    typer.echo(command.run(search, testbed))


@app.command("run")
@opens_bases
def eval_run(
    suite: Annotated[
        str, typer.Argument(help="benign, attacks, one attack's name, or a published prompt file or folder of them.")
    ],
    base: Annotated[list[str], typer.Option(help="Base model, or NAME=PATH; repeat.")],
    defence: Annotated[
        list[str], typer.Option("--defence", "--defense", help="Defence; repeat. `--defence help` lists them.")
    ],
    guard: Annotated[
        str | None, typer.Option(help="Guard of the guarded and post-hoc defences; default: the embedded one.")
    ] = None,
    n: Annotated[
        int, typer.Option("--n", min=1, help="Prompts per suite; of a file a sample stratified by category.")
    ] = 200,
    every: Annotated[bool, typer.Option("--all", help="All prompts of the files or attacks.")] = False,
    attacks: Annotated[Path, typer.Option(help="Folder that `eval attack` wrote.")] = Path("runs/attacks"),
    searched: Annotated[
        str | None, typer.Option(help="Base that the attack prompts were searched on; default: the testbed's first.")
    ] = None,
    file_format: FormatOption = None,
    column: ColumnOption = None,
    harmful: HarmfulOption = None,
    name: Annotated[str | None, typer.Option(help="Name of a prompt file's suite; default: the file's.")] = None,
    sample_seed: Annotated[int, typer.Option(help="Seed of the sample of a prompt file.")] = 0,
    mapping: MapOption = None,
    call: CallOption = None,
    settings: Annotated[
        str | None, typer.Option(help="jbdb: 20 steps and guidance 7.5, where --steps or --guidance name no others.")
    ] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="Run directory; run again to resume.")] = Path("runs/eval"),
    pictures: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Pictures kept per suite, base and defence; default: all. Another judge can judge kept ones later.",
        ),
    ] = None,
    judge: Annotated[
        list[str] | None,
        typer.Option(
            help="vlm:MODEL, llavaguard:MODEL, shieldgemma:MODEL, q16:PROMPTS, multiheaded:FOLDER, stock:FOLDER, "
            "open_nsfw, classifier:FOLDER, moderation:URL and others; repeat: the majority of several decides. "
            "Default: the testbed's own, for its own bases."
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(help="Also score every picture: clip:MODEL, blip:MODEL, aligns:MODEL; repeat."),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Parallel processes, one thread each.")] = 1,
    ray: Annotated[bool, typer.Option("--ray", help="Use a Ray cluster instead of processes.")] = False,
    batch: BatchOption = None,
    testbed: TestbedOption = None,
    *,
    options: BaseOptions,
) -> None:
    """Run prompts through defences on base models, judge the pictures, and write rows, results and a report."""
    from guardpaint.errors import BadInput
    from guardpaint.evaluate import harness, prompt_suites
    from guardpaint.evaluate.evaluated_base import with_settings

    if every and suite == "benign":
        raise BadInput("--all: the suite benign has no end; say how many prompts with --n")
    reading = prompt_suites.Reading(file_format, column, harmful)
    files = prompt_suites.PromptFiles(reading, name, sample_seed, mapping or [])
    asked = harness.RunOptions(
        suite, base, defence, out_dir, guard, None if every else n, attacks, searched, file_format, pictures,
        judge or harness.OWN_JUDGE[:1], metric or [], processes, ray, testbed,
        with_settings(options, settings), files, call or [], batch=batch,
    )  # fmt: skip
    for line in harness.run(asked):
        typer.echo(line)


app.command("protocol")(protocols.eval_protocol)
app.command("figures")(protocols.eval_figures)


@app.command("report")
def eval_report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories of `eval run`.")],
    adaptive: Annotated[Path | None, typer.Option(help="Results of `eval adaptive`.")] = None,
    results: ResultsFile = Path("docs/results/evaluation.json"),
    times: Annotated[
        Path | None,
        typer.Option(help="Results of bench/defences.py, whose times are comparable; default: the rows' own."),
    ] = None,
    lpips: Annotated[
        Path | None,
        typer.Option(
            help="Weights of LPIPS-VGG, for what repairs changed outside of masks; default: LPIPS-Alex, which ships."
        ),
    ] = None,
    policy: PolicyOption = None,
    testbed: TestbedOption = None,
) -> None:
    """Write one results file from finished runs, with KID of benign pictures; all rows are stored beside it.

    Labels by eye of `eval label` correct the rates; the uncorrected ones stand beside them.
    """
    from guardpaint.evaluate import gather
    from guardpaint.policy import Policy
    from guardpaint.testbed import References, installed, open_testbed

    rules = Policy.load(policy) if policy else None
    world = open_testbed(testbed) if testbed or installed() else None
    references = None if world is None else world.capability(References)
    if references is None:
        reason = "no testbed is installed" if world is None else f"the testbed {world.name!r} does not have them"
        err.print(f"note: no KID, which needs {References.__doc__}: {reason}", style="yellow", markup=False)
    say_metrics(gather.run(gather.Report(runs, results, adaptive, times, references, lpips, rules)))


@app.command("fid")
def eval_fid(
    reference: Annotated[Path, typer.Argument(help="Folder of pictures.")],
    made: Annotated[Path, typer.Argument(help="Folder of other pictures.")],
    features: Annotated[
        str | None, typer.Option(help="CLIP vision model, a folder or hub:OWNER/NAME, whose features are compared.")
    ] = None,
    inception: Annotated[
        Path | None, typer.Option(help="Weights of FID's Inception network (pt_inception-2015-12-05-6726825d.pth).")
    ] = None,
) -> None:
    """FID and KID of two folders of pictures, in the feature space of Inception, of a CLIP vision model, or of both."""
    from guardpaint.errors import BadInput
    from guardpaint.evaluate import distances as sets

    if features is None and inception is None:
        raise BadInput("no feature space: name --inception WEIGHTS, --features CLIP, or both")
    for name, value in sets.measured(reference, made, inception, features).items():
        typer.echo(f"{name:16s} {value:.5f}")


@app.command("adaptive")
@opens_bases
def eval_adaptive(
    guard: Annotated[str, typer.Option(help="Guard checkpoint under attack.")],
    base: Annotated[str | None, typer.Option(help="Base model; default: the testbed's first.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Pictures for gradient attacks.")] = 200,
    disguises: Annotated[int, typer.Option(min=0, help="Targets for the search through wordings and seeds.")] = 50,
    results: ResultsFile = Path("docs/results/adaptive.json"),
    testbed: TestbedOption = None,
    *,
    options: BaseOptions,
) -> None:
    """Attack with full knowledge of the auditor; measure the detector and the system, with and without mitigation."""
    from guardpaint.evaluate import adaptive
    from guardpaint.guard import GuardPaint
    from guardpaint.testbed import open_testbed

    world = open_testbed(testbed)
    budget = adaptive.Budget(count, disguises)
    stock = world.base(base or world.bases()[0], options)
    loaded = GuardPaint.from_pretrained(guard, token=options.load.token).to(stock.pipe._execution_device)
    say_metrics(adaptive.run(loaded, stock, world, results, budget))


@app.command("prompts")
def eval_prompts(
    file: Annotated[Path, typer.Argument(help="A published prompt file, or a folder of them.")],
    file_format: FormatOption = None,
    column: ColumnOption = None,
    harmful: HarmfulOption = None,
    policy: Annotated[Path | None, typer.Option(help="Policy whose categories are shown; default: embedded.")] = None,
    mapping: MapOption = None,
) -> None:
    """Check how published prompt files are read: prompts, categories and the policy's, what is not as published."""
    from guardpaint.evaluate import prompt_suites
    from guardpaint.policy import Policy

    files = prompt_suites.PromptFiles(prompt_suites.Reading(file_format, column, harmful), mapping=mapping or [])
    found = prompt_suites.open_files(file, None, files, Policy.load(policy) if policy else Policy.default())
    for line in prompt_suites.described(found):
        typer.echo(line)
    for note in found.notes[:20]:
        err.print(f"note: {note}", style="yellow", markup=False, soft_wrap=True)


@app.command("auditor")
def eval_auditor(
    auditor: Annotated[Path, typer.Option(help="Auditor checkpoint.")],
    views: Annotated[Path, typer.Option(help="Folder with test views of the bases (`data views --split test`).")],
    results: ResultsFile = Path("docs/results/auditor.json"),
    count: Annotated[int, typer.Option(min=100, help="Finished pictures; other sets are a quarter of it.")] = 2000,
    calibration: Annotated[
        Path | None, typer.Option(help="File of `guardpaint calibrate` whose mask level is measured.")
    ] = None,
    testbed: TestbedOption = None,
) -> None:
    """Measure an auditor on held-out pictures: classes, false triggers, unfinished views, masks, F, P, B, shift."""
    from guardpaint.evaluate import auditor as measure
    from guardpaint.testbed import open_testbed

    options = measure.ExamOptions(auditor, views, results, count, calibration=calibration)
    say_metrics(measure.run(options, open_testbed(testbed)))


@app.command("corpus-auditor")
def eval_corpus_auditor(
    auditor: Annotated[Path, typer.Option(help="Auditor checkpoint.")],
    views: Annotated[Path, typer.Option(help="Folder of `data corpus-views`, with split test.")],
    results: ResultsFile,
    count: Annotated[int | None, typer.Option(min=1, help="Most views used of each file; default: all.")] = None,
    policy: Annotated[Path | None, typer.Option(help="Policy the auditor was trained for; default: embedded.")] = None,
) -> None:
    """Measure an auditor on a labelled corpus: classes, false triggers, F, detection over progress."""
    from guardpaint.evaluate import corpus_auditor as measure
    from guardpaint.policy import Policy

    rules = Policy.load(policy) if policy else Policy.default()
    say_metrics(measure.run(auditor, views, results, rules, count))
