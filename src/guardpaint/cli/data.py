"""`guardpaint data …`: commands that make training data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from guardpaint.cli.common import DeviceOption, TokenOption, given, opens_bases

if TYPE_CHECKING:
    from guardpaint.bases import BaseOptions
    from guardpaint.draft.options import LoadOptions

app = typer.Typer(
    help="Training data: corpora and views for the auditor, pairs for the inpainter.", no_args_is_help=True
)

Folder = Annotated[Path, typer.Argument(help="The corpus folder.")]
LabelerOption = Annotated[
    str,
    typer.Option(
        help="vlm:MODEL (any image-text-to-text model), shieldgemma:MODEL, detector:MODEL, or endpoint:URL#MODEL."
    ),
]
KNOWN_HELP = (
    "vlm:MODEL (any image-text-to-text model), shieldgemma:MODEL, detector:MODEL, or endpoint:URL#MODEL. For a corpus "
    "that is labelled already: folders:MAP.yaml, where the file says `folder: category` for the folders that images "
    "lie in, or column:NAME, for a column that a source keeps (`keep: [NAME]` in the manifest); column:NAME#MAP.yaml "
    "if its values are not names of categories."
)
ReferenceOption = Annotated[
    Path, typer.Option(help="Hand labels: the file of `data hand-label`, or a CSV with the columns key, label, case.")
]
TestbedOption = Annotated[
    str | None, typer.Option("--testbed", help="Testbed whose pictures are used: a name or a YAML file.")
]
TinyOption = Annotated[Path | None, typer.Option(help="Tiny decoder; if given, it decodes half of the views.")]
ProcessesOption = Annotated[int, typer.Option(min=1, help="Parallel processes or jobs, each with the whole model.")]
RayOption = Annotated[
    bool, typer.Option("--ray", help="Use a Ray cluster that shares the folder, instead of local processes.")
]
PolicyOption = Annotated[
    Path | None, typer.Option(help="Policy file, or a shipped one such as paper; default: the embedded policy.")
]


def load_policy(path: Path | None) -> Any:
    """The policy of a file, or the default one."""
    from guardpaint.policy import Policy

    return Policy.load(path) if path is not None else Policy.default()


def opening_of(device: str | None, token: str | None) -> LoadOptions:
    """Where a model goes, and the hub's token for it."""
    from guardpaint.draft.options import LoadOptions

    return LoadOptions(device=device, token=given(token))


def load_decoder(path: Path | None) -> Any:
    """The tiny decoder in a folder, or None without a path."""
    if path is None:
        return None
    from guardpaint.draft.loading import load_tiny

    return load_tiny(path).float()


@app.command()
def ingest(
    manifest: Annotated[Path, typer.Argument(help="Manifest of sources, e.g. configs/data/world.yaml.")],
    out_dir: Annotated[Path, typer.Option("--out", help="The corpus folder; rows are added to an existing one.")],
    source: Annotated[list[str] | None, typer.Option(help="Only this source; may be repeated.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of rows per source.")] = None,
    token: TokenOption = None,
) -> None:
    """Read sources into a corpus; run again to resume after an interruption."""
    from guardpaint.data.sources import ingest as read
    from guardpaint.data.sources import load_manifest
    from guardpaint.data.store import BROKEN, Corpus
    from guardpaint.errors import BadInput
    from guardpaint.testbed import open_dataset

    sources = load_manifest(manifest)
    names = [s.name for s in sources]
    unknown = [s for s in source or [] if s not in names]
    if unknown:
        raise BadInput(f"source {unknown[0]!r}: {manifest} has {', '.join(names)}")
    chosen = [s for s in sources if not source or s.name in source]
    corpus, token = Corpus(out_dir), given(token)
    for name, counts in read(chosen, corpus, limit, open_dataset=open_dataset, token=token).items():
        typer.echo(f"{name}: " + ", ".join(f"{n} {what}" for what, n in counts.items()))
    if broken := corpus.broken():
        first = "; ".join(f"{b['source']} row {b['row']}: {b['problem']}" for b in broken[:3])
        typer.echo(f"{len(broken)} images cannot be read and are left out ({first}); all are in {out_dir / BROKEN}")


@app.command()
def caption(
    corpus: Folder,
    labeler: LabelerOption,
    batch: int = 8,
    policy: PolicyOption = None,
    device: DeviceOption = None,
    token: TokenOption = None,
) -> None:
    """Write prompts for images that came without one. Captions never decide a label."""
    from guardpaint.data import labelling
    from guardpaint.data.labelers import Asking, open_labeler
    from guardpaint.data.store import Corpus
    from guardpaint.errors import BadInput

    model = open_labeler(labeler, Asking(load_policy(policy)), opening_of(device, token))
    if not hasattr(model, "caption"):
        raise BadInput(f"labeler {labeler!r} cannot write captions; use vlm:MODEL or endpoint:URL#MODEL")
    labelling.caption(store := Corpus(corpus), model, batch)
    rows = {r["key"]: r for r in store.lines(labelling.CAPTIONS)}.values()
    failed, without = sum(bool(r.get("problem")) for r in rows), sum(r["prompt"] is None for r in rows)
    typer.echo(
        f"{len(rows) - without} captions; the model refused {without - failed} pictures and failed on {failed}"
        + (", which the next run tries again" if failed else "")
    )


@app.command()
def label(
    corpus: Folder,
    labeler: Annotated[str, typer.Option(help=KNOWN_HELP)],
    style: Annotated[str, typer.Option(help="How to ask: single, reasoned (a reason first) or examples.")] = "single",
    examples: Annotated[
        Path | None,
        typer.Option(help='Worked examples for the style examples: JSONL of {"description": …, "scores": {…}}.'),
    ] = None,
    passes: Annotated[int, typer.Option(min=1, help="Self-consistency: ask this many times and take the mean.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Images per call.")] = 8,
    retry: Annotated[bool, typer.Option(help="Ask again for images whose answer was unreadable.")] = False,
    name: Annotated[str | None, typer.Option(help="Name of the labeler in the labels file; default: its own.")] = None,
    only: Annotated[
        Path | None, typer.Option(help="CSV of hand labels: label its pictures only, to compare labelers on them.")
    ] = None,
    several: Annotated[bool, typer.Option(help="Tell the labeler that a picture may have several categories.")] = False,
    policy: PolicyOption = None,
    processes: ProcessesOption = 1,
    ray: RayOption = False,
    device: DeviceOption = None,
    token: TokenOption = None,
) -> None:
    """Score every image against the policy and print the name of the labels file; run again to resume."""
    from guardpaint.data import labelling
    from guardpaint.data.known_labels import open_known
    from guardpaint.data.labelers import Asking, open_labeler
    from guardpaint.data.questions import read_examples
    from guardpaint.data.spreading import PER_PROCESS, SpreadLabeler
    from guardpaint.data.store import Corpus

    rules = load_policy(policy)
    asking = Asking(rules, style, passes, examples=read_examples(examples, rules) if examples else (), several=several)
    store, known = Corpus(corpus), open_known(labeler, rules)
    opening = opening_of(device, token)
    model: Any
    if known is None and (processes > 1 or ray):
        model, batch = SpreadLabeler(labeler, asking, batch, processes, ray, opening=opening), processes * PER_PROCESS
    else:
        model = known if known is not None else open_labeler(labeler, asking, opening)
    keys = set(labelling.read_reference(only, rules)) if only else None
    question = known.question() if known is not None else f"{asking.text()}/{passes}"
    file = labelling.label(store, model, question, batch, retry, keys=keys, name=name)
    typer.echo(f"{file}: {labelling.summary(store.lines(file))}")


@app.command()
def calibrate(
    corpus: Folder,
    labels: Annotated[str, typer.Option(help="Labels file in the corpus, or a pattern for one.")],
    reference: ReferenceOption,
    miss_cost: Annotated[float, typer.Option(help="Cost of a miss relative to a false alarm.")] = 1.0,
    margin: Annotated[float, typer.Option(help="Half the width of the dead zone around each threshold.")] = 0.1,
    policy: PolicyOption = None,
) -> None:
    """Find the thresholds that fit hand labels best and write them to thresholds.json in the corpus."""
    from dataclasses import asdict

    from guardpaint.data import labelling
    from guardpaint.data.store import Corpus
    from guardpaint.store.checkpoint import write_json

    rules = load_policy(policy)
    store = Corpus(corpus)
    answers = {r["key"]: r["scores"] for r in store.lines(store.one(labels))}
    thresholds = labelling.calibrate(answers, labelling.read_reference(reference, rules), rules, miss_cost, margin)
    write_json(corpus / "thresholds.json", asdict(thresholds))
    typer.echo(", ".join(f"{h} {t:.3f}" for h, t in thresholds.harms.items()) + f"; dead zone ±{margin}")


@app.command()
def compare(
    corpus: Folder,
    labels: Annotated[
        list[str], typer.Option(help="Labels file in the corpus, or a pattern for one; repeat for several.")
    ],
    reference: ReferenceOption,
    out: Annotated[Path | None, typer.Option(help="Write the table to OUT.md, OUT.csv and OUT.json.")] = None,
    name: Annotated[
        list[str] | None, typer.Option(help="Name of a labeler in the table, in the order of --labels.")
    ] = None,
    miss_cost: Annotated[float, typer.Option(help="Cost of a miss relative to a false alarm.")] = 1.0,
    margin: Annotated[
        float, typer.Option(help="Half the width of the dead zone; scores in it are counted as abstentions.")
    ] = 0.1,
    policy: PolicyOption = None,
) -> None:
    """Print the paper's table of labelers on the hard cases: P, R, F1, κ, errors, abstentions, time, failure modes."""
    from guardpaint.data import comparison, labelling
    from guardpaint.data.store import Corpus
    from guardpaint.errors import BadInput

    rules, store = load_policy(policy), Corpus(corpus)
    if name and len(name) != len(labels):
        raise BadInput(f"{len(name)} --name for {len(labels)} --labels: give one for each, or none")
    files = [store.one(file) for file in labels]
    answers = {}
    for title, file in zip(name or files, files, strict=True):
        answers[title] = {r["key"]: r for r in store.lines(file)}
        if not answers[title]:
            raise BadInput(f"{corpus / file}: no labels; run `guardpaint data label` first")
    rows = comparison.compare(answers, labelling.read_reference(reference, rules), rules, miss_cost, margin)
    typer.echo(comparison.table(rows))
    if out is not None:
        about = {
            "reference": str(reference),
            "files": dict(zip(answers, files, strict=True)),
            "policy": rules.digest(),
        }
        for path in comparison.write_table(rows, out, about):
            typer.echo(str(path))


@app.command("hand-label")
def hand_label(
    pictures: Annotated[
        Path, typer.Argument(help="A corpus, a folder of pictures, or the rows.jsonl of an evaluation.")
    ],
    labeller: Annotated[str, typer.Option(help="Your name; every labeller's labels are kept apart.")],
    out: Annotated[Path, typer.Option(help="JSONL file of labels, the same for all labellers; it is added to.")],
    case: Annotated[
        list[str] | None, typer.Option(help="A kind of hard case to choose from, e.g. swimwear; repeat for several.")
    ] = None,
    keys: Annotated[Path | None, typer.Option(help="Text file with the keys of the pictures to label.")] = None,
    count: Annotated[int, typer.Option(min=0, help="Only so many pictures, chosen by their keys; 0: all.")] = 0,
    several: Annotated[bool, typer.Option(help="A picture may get several categories.")] = False,
    settle: Annotated[bool, typer.Option(help="Decide the pictures on which the labellers disagree.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0: any free one.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
    policy: PolicyOption = None,
) -> None:
    """Label pictures by eye on a local page with the keyboard; run again to go on. Ctrl-C ends it."""
    from guardpaint.data import label_page
    from guardpaint.errors import BadInput

    try:
        wanted = set(keys.read_text(encoding="utf-8").split()) if keys is not None else None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{keys}: cannot be read ({error})") from error
    items = label_page.find_items(pictures, wanted, count)
    session = label_page.Session(items, load_policy(policy), labeller, out, case or (), several, settle)
    label_page.serve(session, port, browser, typer.echo)
    typer.echo(f"{session.left()} pictures left; {out}")


@app.command()
def agreement(
    labels: Annotated[Path, typer.Argument(help="Labels file of `data hand-label`.")], policy: PolicyOption = None
) -> None:
    """Print how far labellers agree (Cohen's κ), where they differ, and how many pictures are left to settle."""
    from guardpaint.data import hand_labels
    from guardpaint.errors import BadInput

    found = hand_labels.read_labels(labels, load_policy(policy))
    if not found:
        raise BadInput(f"{labels}: no labels; make some with `guardpaint data hand-label`")
    for pair in hand_labels.agreements(found):
        typer.echo(pair.text())
        for one, two, n in pair.differences:
            typer.echo(f"  {n} × {pair.labellers[0]} {one}, {pair.labellers[1]} {two}")
    counts = hand_labels.summary(found)
    typer.echo(
        f"{counts['reference']} pictures in the reference, {counts['disputed']} disputed, {counts['settled']} settled, "
        f"{counts['unsure']} answers unsure"
    )


@app.command()
def build(
    corpus: Folder,
    labels: Annotated[str, typer.Option(help="Labels file in the corpus, or a pattern for one.")],
    thresholds: Annotated[
        Path | None, typer.Option(help="Thresholds file; default: thresholds.json in the corpus.")
    ] = None,
    seed: int = 0,
    several: Annotated[
        bool,
        typer.Option(help="Keep every harm over its threshold, not just the strongest; views and training use all."),
    ] = False,
    captions: Annotated[
        bool, typer.Option("--captions", help="Fail unless `data caption` has written captions.jsonl.")
    ] = False,
) -> None:
    """Decide labels, drop the dead zone, group near-duplicates, split 70/15/15; write splits and a dataset card."""
    from guardpaint.data import card
    from guardpaint.data.labelling import Thresholds
    from guardpaint.data.store import Corpus
    from guardpaint.errors import BadInput
    from guardpaint.store.checkpoint import read_json

    if captions and not (corpus / card.CAPTIONS).exists():
        raise BadInput(
            f"{corpus / card.CAPTIONS}: missing; run `guardpaint data caption` first, or leave --captions out"
        )
    store, cuts = Corpus(corpus), Thresholds(**read_json(thresholds or corpus / "thresholds.json"))
    labels = store.one(labels)
    facts = card.build(store, labels, cuts, seed, several=several)
    typer.echo(f"{facts['images']} images, {facts['splits']}, left out {facts['left_out']}")
    typer.echo(str(card.write_card(store, labels, cuts, facts)))


@app.command()
@opens_bases
def views(
    base: Annotated[str, typer.Argument(help="A base of the testbed, e.g. mini-sd.")],
    out_dir: Annotated[Path, typer.Option("--out", help="Folder of views.")],
    split: Annotated[str, typer.Option(help="train, validation, test, calibration or oracle.")] = "train",
    count: Annotated[
        int, typer.Option(min=0, help="Re-noised scenes; each gives an x̂0 view and a stepped view.")
    ] = 4000,
    redrawn: Annotated[int, typer.Option(min=0, help="Scenes that are half noised and finished by the base.")] = 0,
    trajectories: Annotated[
        int, typer.Option(min=0, help="Whole generations; each gives a random step and the end.")
    ] = 0,
    judge: Annotated[
        Path | None, typer.Option(help="Auditor that labels finished trajectories; required with --trajectories.")
    ] = None,
    tiny: TinyOption = None,
    testbed: TestbedOption = None,
    *,
    options: BaseOptions,
) -> None:
    """Make views of a testbed's own pictures with exact ground truth; run again to resume."""
    import torch

    from guardpaint.audit.model import AuditorScorer
    from guardpaint.errors import BadInput
    from guardpaint.testbed import AuditorLessons, need, open_testbed

    lessons = need(open_testbed(testbed), AuditorLessons, "data views")
    torch.set_num_threads(1)
    if trajectories and judge is None:
        raise BadInput(
            "--trajectories needs an auditor trained on finished pictures to label them: name it with --judge"
        )
    counts = {"renoised": count, "redrawn": redrawn, "trajectories": trajectories}
    auditor = AuditorScorer.from_pretrained(judge) if judge is not None else None
    typer.echo(str(lessons.make_views(base, out_dir, split, counts, load_decoder(tiny), auditor, options)))


@app.command("corpus-views")
@opens_bases
def corpus_views(
    corpus: Folder,
    base: Annotated[
        str,
        typer.Option(help="Base whose unfinished pictures are shown: a folder, hub:OWNER/NAME or an embedded base."),
    ],
    out_dir: Annotated[Path, typer.Option("--out", help="Folder of views; not one with views of testbeds.")],
    split: Annotated[
        list[str], typer.Option(help="train, validation, test, or calibration (half of test); repeat for several.")
    ] = ["train"],  # noqa: B006 (read only)
    name: Annotated[str | None, typer.Option(help="Name of the base in file names; default: from its path.")] = None,
    pixels: Annotated[int, typer.Option(min=16, help="Side of a view in pixels: the auditor's larger size.")] = 384,
    coarse: Annotated[
        int, typer.Option(min=8, help="The auditor's smaller size, and the size of glances with it.")
    ] = 224,
    batch: Annotated[int, typer.Option(min=1, help="Pictures per call.")] = 8,
    tiny: TinyOption = None,
    policy: PolicyOption = None,
    processes: ProcessesOption = 1,
    ray: RayOption = False,
    *,
    options: BaseOptions,
) -> None:
    """Make views of a corpus split by `data build`: each picture at a random step of a base; run again to resume."""
    from dataclasses import replace

    from guardpaint.data import corpus_views as make
    from guardpaint.data.spreading import ViewJob, make_views
    from guardpaint.data.store import Corpus
    from guardpaint.store.jobs import spread

    store = Corpus(corpus)
    job = ViewJob(corpus, base, out_dir, split, load_policy(policy), options, name, pixels, coarse, batch, tiny)
    jobs = [replace(job, share=(k, processes)) for k in range(processes)]
    for said in spread(make_views, jobs, processes, ray):
        typer.echo("\n".join(said))
    if left := make.without_prompt(store):
        typer.echo(
            f"{left} pictures of the corpus have no prompt and are left out; add some with `guardpaint data caption`"
        )


def mask_maker(auditor: Path | None, device: Any) -> tuple[Any, Any]:
    """The auditor in a folder with the default mask settings, or the embedded guard's auditor with that guard's."""
    if auditor is not None:
        from guardpaint.audit.model import AuditorScorer

        return AuditorScorer.from_pretrained(auditor).to(device), None
    from guardpaint.guard import GuardPaint

    guard = GuardPaint.embedded().to(device)
    return guard.parts.auditor, guard.config


@app.command()
def pairs(
    out: Annotated[Path, typer.Argument(help="Folder for the pairs; run again to resume.")],
    split: Annotated[str, typer.Option(help="With a testbed: train, validation or test.")] = "train",
    count: Annotated[int, typer.Option(min=2, help="With a testbed: unsafe pictures, equally many per harm.")] = 2000,
    safe: Annotated[int, typer.Option(min=0, help="With a testbed: safe pictures in addition.")] = 1000,
    masks: Annotated[str, typer.Option(help="auditor, or truth: a testbed's true masks, to compare.")] = "auditor",
    auditor: Annotated[Path | None, typer.Option(help="Makes the masks; default with a testbed: its guard's.")] = None,
    corpus: Annotated[Path | None, typer.Option(help="Labelled corpus to use instead of a testbed.")] = None,
    inpainter: Annotated[Path | None, typer.Option(help="With a corpus: pipeline that paints the targets.")] = None,
    rewriter: Annotated[str | None, typer.Option(help="With a corpus: vlm:… or endpoint:…, writes prompts.")] = None,
    policy: PolicyOption = None,
    testbed: TestbedOption = None,
    device: DeviceOption = None,
    token: TokenOption = None,
) -> None:
    """Make pairs for the inpainter: unsafe picture, mask, safe version, unsafe prompt."""
    from guardpaint.audit.model import AuditorScorer
    from guardpaint.draft.loading import chosen_device
    from guardpaint.errors import BadInput
    from guardpaint.testbed import InpainterLessons, need, open_testbed

    if masks not in ("auditor", "truth"):
        raise BadInput(f"masks={masks!r}: choose auditor or truth")
    if masks == "truth" and (corpus is not None or auditor is not None):
        raise BadInput("--masks truth needs a testbed, which knows the true masks, and takes no --auditor")
    opening = opening_of(device, token)
    place = chosen_device(opening)
    if corpus is None:
        lessons = need(open_testbed(testbed), InpainterLessons, "data pairs without --corpus")
        judge, config = (None, None) if masks == "truth" else mask_maker(auditor, place)
        typer.echo(f"{lessons.make_pairs(out, split, count, safe, judge, config)} new pairs in {out}")
        return
    from guardpaint.data.pairs import from_labelled

    if auditor is None or inpainter is None:
        raise BadInput("--corpus needs --auditor for the masks and --inpainter for the targets")
    judge = AuditorScorer.from_pretrained(auditor).to(place)
    counts = from_labelled(out, corpus, judge, inpainter, load_policy(policy), rewriter, opening)
    typer.echo(", ".join(f"{n} {what}" for what, n in counts.items()))


@app.command()
def review(out: Annotated[Path, typer.Argument(help="Folder of pairs.")]) -> None:
    """Write the HTML page on which a person accepts or rejects pairs, and print its path."""
    from guardpaint.data.pairs import review_page

    typer.echo(str(review_page(out)))


@app.command()
def approve(
    out: Annotated[Path, typer.Argument(help="Folder of pairs.")],
    approvals: Annotated[Path, typer.Argument(help="approvals.json, saved by the review page.")],
) -> None:
    """Store the decisions of a review in the pairs."""
    from guardpaint.data import pairs as make

    typer.echo(f"{make.approve(out, approvals)} decisions written")


@app.command()
def latents(
    out: Annotated[Path, typer.Argument(help="Folder of pairs.")],
    inpainter: Annotated[str, typer.Option(help="Inpainting pipeline: a directory, or mini-inpaint.")] = "mini-inpaint",
    policy: PolicyOption = None,
) -> None:
    """Encode the approved pairs of every split; held-out pairs that are also in the training split are left out."""
    from guardpaint.bases import load_inpainter
    from guardpaint.data.pairs import PairStore
    from guardpaint.train.pair_latents import encode_pairs

    store = PairStore(out)
    pipe = load_inpainter(inpainter)
    for split in dict.fromkeys(p.split for p in store.rows()):
        typer.echo(str(encode_pairs(store, split, pipe, load_policy(policy))))
