"""`guardpaint data …`: the corpus pipeline as commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Corpora for the auditor: read, caption, label, calibrate, split.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(help="The corpus folder.")]
LabelerOption = Annotated[
    str,
    typer.Option(
        help="vlm:MODEL (any image-text-to-text model), shieldgemma:MODEL, detector:MODEL, or endpoint:URL#MODEL."
    ),
]
TestbedOption = Annotated[
    str | None, typer.Option("--testbed", help="Testbed whose pictures to use: a name or a YAML file.")
]
TinyOption = Annotated[Path | None, typer.Option(help="Tiny decoder: half of the views go through it.")]
PolicyOption = Annotated[Path | None, typer.Option(help="Policy file; default: the embedded one.")]


def load_policy(path: Path | None) -> Any:
    from guardpaint.policy import Policy

    return Policy.load(path) if path is not None else Policy.default()


def load_decoder(path: Path | None) -> Any:
    """A tiny decoder, if one is named."""
    if path is None:
        return None
    from diffusers import AutoencoderTiny

    return AutoencoderTiny.from_pretrained(path).float().eval()


@app.command()
def ingest(
    manifest: Annotated[Path, typer.Argument(help="Manifest of sources, e.g. configs/data/world.yaml.")],
    out_dir: Annotated[Path, typer.Option("--out", help="The corpus folder; an existing one is added to.")],
    source: Annotated[list[str] | None, typer.Option(help="Only this source; may be repeated.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many rows of each source.")] = None,
) -> None:
    """Read sources into a corpus; run again to go on after an interruption."""
    from guardpaint.data.sources import ingest as read
    from guardpaint.data.sources import load_manifest
    from guardpaint.data.store import Corpus
    from guardpaint.errors import BadInput
    from guardpaint.testbed import open_dataset

    sources = load_manifest(manifest)
    names = [s.name for s in sources]
    unknown = [s for s in source or [] if s not in names]
    if unknown:
        raise BadInput(f"source {unknown[0]!r}: {manifest} has {', '.join(names)}")
    chosen = [s for s in sources if not source or s.name in source]
    for name, seen in read(chosen, Corpus(out_dir), limit, open_dataset=open_dataset).items():
        typer.echo(f"{name}: " + ", ".join(f"{n} {what}" for what, n in seen.items()))


@app.command()
def caption(corpus: Folder, labeler: LabelerOption, batch: int = 8, policy: PolicyOption = None) -> None:
    """Write prompts for images that came without one. Captions never decide a label."""
    from guardpaint.data import labelling
    from guardpaint.data.labelers import Asking, open_labeler
    from guardpaint.data.store import Corpus
    from guardpaint.errors import BadInput

    model = open_labeler(labeler, Asking(load_policy(policy)))
    if not hasattr(model, "caption"):
        raise BadInput(f"labeler {labeler!r} cannot write captions; use vlm:MODEL or endpoint:URL#MODEL")
    labelling.caption(Corpus(corpus), model, batch)


@app.command()
def label(
    corpus: Folder,
    labeler: LabelerOption,
    style: Annotated[str, typer.Option(help="single, reasoned (a reason first) or examples.")] = "single",
    examples: Annotated[
        Path | None, typer.Option(help='Worked examples for that style: JSONL of {"description": …, "scores": {…}}.')
    ] = None,
    passes: Annotated[int, typer.Option(min=1, help="Self-consistency: ask so often and take the mean.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Images per call.")] = 8,
    retry: Annotated[bool, typer.Option(help="Ask again where the answer could not be read.")] = False,
    policy: PolicyOption = None,
) -> None:
    """Score every image against the policy; run again to go on. Prints the name of the labels file."""
    from guardpaint.data import labelling
    from guardpaint.data.labelers import Asking, open_labeler
    from guardpaint.data.questions import read_examples
    from guardpaint.data.store import Corpus

    rules = load_policy(policy)
    asking = Asking(rules, style, passes, examples=read_examples(examples, rules) if examples else ())
    store = Corpus(corpus)
    name = labelling.label(store, open_labeler(labeler, asking), f"{asking.text()}/{passes}", batch, retry)
    rows = store.lines(name)
    bad = sum(r["scores"] is None for r in rows)
    typer.echo(f"{name}: {len(rows)} answers, {bad} unreadable")


@app.command()
def calibrate(
    corpus: Folder,
    labels: Annotated[str, typer.Option(help="Labels file in the corpus.")],
    reference: Annotated[Path, typer.Option(help="CSV of hand labels: key, label, case.")],
    miss_cost: Annotated[float, typer.Option(help="Cost of a miss, in false alarms.")] = 1.0,
    margin: Annotated[float, typer.Option(help="Half width of the dead zone.")] = 0.1,
    policy: PolicyOption = None,
) -> None:
    """Find the thresholds that fit hand labels best; writes thresholds.json into the corpus."""
    from dataclasses import asdict

    from guardpaint.data import labelling
    from guardpaint.data.store import Corpus
    from guardpaint.store.checkpoint import write_json

    rules = load_policy(policy)
    store = Corpus(corpus)
    answers = {r["key"]: r["scores"] for r in store.lines(labels)}
    found = labelling.calibrate(answers, labelling.read_reference(reference, rules), rules, miss_cost, margin)
    write_json(corpus / "thresholds.json", asdict(found))
    typer.echo(", ".join(f"{h} {t:.3f}" for h, t in found.harms.items()) + f"; dead zone ±{margin}")


@app.command()
def compare(
    corpus: Folder,
    labels: Annotated[list[str], typer.Option(help="Labels file in the corpus; give several.")],
    reference: Annotated[Path, typer.Option(help="CSV of hand labels: key, label, case.")],
    policy: PolicyOption = None,
) -> None:
    """A table of labelers on the hard cases: false alarms, misses, unreadable answers, failure modes."""
    from guardpaint.data import labelling
    from guardpaint.data.store import Corpus

    rules, store = load_policy(policy), Corpus(corpus)
    found = {name: {r["key"]: r for r in store.lines(name)} for name in labels}
    rows = labelling.compare(found, labelling.read_reference(reference, rules), rules)
    typer.echo(labelling.table(rows))


@app.command()
def build(
    corpus: Folder,
    labels: Annotated[str, typer.Option(help="Labels file in the corpus.")],
    thresholds: Annotated[Path | None, typer.Option(help="Default: thresholds.json in the corpus.")] = None,
    seed: int = 0,
) -> None:
    """Decide labels, drop the dead zone, group near-duplicates, split 70/15/15; writes splits and a dataset card."""
    from guardpaint.data import card
    from guardpaint.data.labelling import Thresholds
    from guardpaint.data.store import Corpus
    from guardpaint.store.checkpoint import read_json

    store, cuts = Corpus(corpus), Thresholds(**read_json(thresholds or corpus / "thresholds.json"))
    facts = card.build(store, labels, cuts, seed)
    typer.echo(f"{facts['images']} images, {facts['splits']}, left out {facts['left_out']}")
    typer.echo(str(card.write_card(store, labels, cuts, facts)))


@app.command()
def views(
    base: Annotated[str, typer.Argument(help="A base of the testbed, e.g. mini-sd.")],
    out_dir: Annotated[Path, typer.Option("--out", help="Folder of views.")],
    split: Annotated[str, typer.Option(help="train, validation, test, calibration or oracle.")] = "train",
    count: Annotated[int, typer.Option(min=0, help="Re-noised scenes, each giving an x̂0 and a stepped view.")] = 4000,
    redrawn: Annotated[int, typer.Option(min=0, help="Scenes half noised and drawn on to the end by the base.")] = 0,
    trajectories: Annotated[int, typer.Option(min=0, help="Whole generations, a random step and the end of each.")] = 0,
    judge: Annotated[
        Path | None, typer.Option(help="Auditor that labels finished trajectories; needed for trajectories.")
    ] = None,
    tiny: TinyOption = None,
    testbed: TestbedOption = None,
) -> None:
    """Make views of a testbed's own pictures with exact ground truth; run again to go on."""
    import torch

    from guardpaint.audit.model import AuditorScorer
    from guardpaint.errors import BadInput
    from guardpaint.testbed import AuditorLessons, need, open_testbed

    lessons = need(open_testbed(testbed), AuditorLessons, "data views")
    torch.set_num_threads(1)
    if trajectories and judge is None:
        raise BadInput("trajectories are labelled by an auditor trained on finished pictures: name it with --judge")
    counts = {"renoised": count, "redrawn": redrawn, "trajectories": trajectories}
    auditor = AuditorScorer.from_pretrained(judge) if judge is not None else None
    typer.echo(str(lessons.make_views(base, out_dir, split, counts, load_decoder(tiny), auditor)))


@app.command("corpus-views")
def corpus_views(
    corpus: Folder,
    base: Annotated[str, typer.Option(help="Base whose unfinished pictures to show: a folder, a hub id, or embedded.")],
    out_dir: Annotated[Path, typer.Option("--out", help="Folder of views, apart from those of testbeds.")],
    split: Annotated[str, typer.Option(help="train, validation, test, or calibration: half of test.")] = "train",
    size: Annotated[int | None, typer.Option(min=16, help="Pixels it draws, square; default: its own size.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps it is called with; default: its own.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Its guidance; default: its own.")] = None,
    pixels: Annotated[int, typer.Option(min=16, help="Pixels of a view: the auditor's larger size.")] = 384,
    batch: Annotated[int, typer.Option(min=1, help="Pictures per call.")] = 8,
    tiny: TinyOption = None,
    policy: PolicyOption = None,
) -> None:
    """Views of a corpus that `data build` has split: every picture at a random step of a base; run again to go on."""
    from guardpaint.bases import load_base
    from guardpaint.data import corpus_views as make
    from guardpaint.data.store import Corpus
    from guardpaint.data.views import ViewedBase

    found = load_base(base)
    call = make.settings(found.pipe, dict(found.call), size, steps, guidance)
    decoder = load_decoder(tiny)
    viewed = ViewedBase(found.pipe, call, None if decoder is None else decoder.to(found.pipe._execution_device))
    where = str(Path(base).resolve()) if Path(base).is_dir() else base
    name = "_".join(Path(where).parts[-2:]).strip("/").replace("-", "_")
    store = Corpus(corpus)
    plan = make.ViewPlan(viewed, name, pixels, batch, f"{where} {tiny}")
    new = make.make(store, plan, out_dir, split, load_policy(policy))
    typer.echo(f"{new} new files of split {split} in {out_dir}; called with {call}")
    if left := make.without_prompt(store):
        typer.echo(f"{left} pictures of the corpus have no prompt and are left out: `guardpaint data caption`")


@app.command()
def pairs(
    out: Annotated[Path, typer.Argument(help="Folder for the pairs; run again to go on.")],
    split: Annotated[str, typer.Option(help="Testbed: train, validation or test.")] = "train",
    count: Annotated[int, typer.Option(min=2, help="Testbed: unsafe pictures, the harms in equal parts.")] = 2000,
    safe: Annotated[int, typer.Option(min=0, help="Testbed: ordinary pictures beside them.")] = 1000,
    auditor: Annotated[Path | None, typer.Option(help="Auditor whose masks to use; without: the true ones.")] = None,
    corpus: Annotated[Path | None, typer.Option(help="Labelled corpus instead of a testbed.")] = None,
    inpainter: Annotated[Path | None, typer.Option(help="Corpus: inpainting pipeline that paints the targets.")] = None,
    rewriter: Annotated[
        str | None, typer.Option(help="Corpus: vlm:MODEL or endpoint:URL#MODEL for safe prompts.")
    ] = None,
    policy: PolicyOption = None,
    testbed: TestbedOption = None,
) -> None:
    """Make pairs for the inpainter: unsafe picture, mask, safe version, unsafe prompt."""
    from guardpaint.audit.model import AuditorScorer
    from guardpaint.errors import BadInput
    from guardpaint.testbed import InpainterLessons, need, open_testbed

    if corpus is None:
        lessons = need(open_testbed(testbed), InpainterLessons, "data pairs without --corpus")
        masks = AuditorScorer.from_pretrained(auditor) if auditor else None
        typer.echo(f"{lessons.make_pairs(out, split, count, safe, masks)} new pairs in {out}")
        return
    from guardpaint.data.pairs import from_labelled

    if auditor is None or inpainter is None:
        raise BadInput("a corpus needs --auditor and --inpainter")
    judge = AuditorScorer.from_pretrained(auditor)
    found = from_labelled(out, corpus, judge, inpainter, load_policy(policy), rewriter)
    typer.echo(", ".join(f"{n} {what}" for what, n in found.items()))


@app.command()
def review(out: Annotated[Path, typer.Argument(help="Folder of pairs.")]) -> None:
    """Write the page on which a person accepts or refuses pairs."""
    from guardpaint.data.pairs import review_page

    typer.echo(str(review_page(out)))


@app.command()
def approve(
    out: Annotated[Path, typer.Argument(help="Folder of pairs.")],
    approvals: Annotated[Path, typer.Argument(help="approvals.json, saved by the review page.")],
) -> None:
    """Write a person's decisions into the pairs."""
    from guardpaint.data import pairs as make

    typer.echo(f"{make.approve(out, approvals)} decisions written")


@app.command()
def latents(
    out: Annotated[Path, typer.Argument(help="Folder of pairs.")],
    inpainter: Annotated[str, typer.Option(help="Inpainting pipeline: a directory, or mini-inpaint.")] = "mini-inpaint",
    policy: PolicyOption = None,
) -> None:
    """Encode approved pairs of every split once; held-out pairs that training has already are left out."""
    from guardpaint.bases import load_inpainter
    from guardpaint.data.pairs import PairStore
    from guardpaint.train.pair_latents import encode_pairs

    store = PairStore(out)
    pipe = load_inpainter(inpainter)
    for split in dict.fromkeys(p.split for p in store.rows()):
        typer.echo(str(encode_pairs(store, split, pipe, load_policy(policy))))
