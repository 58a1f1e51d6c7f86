"""The finished dataset: `build` decides labels, groups and splits; `write_card` writes the dataset card.

guardpaint data build corpora/paper --labels labels-….jsonl --thresholds thresholds.json
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from guardpaint.data.hand_labels import PLUS
from guardpaint.data.labelling import CAPTIONS, Thresholds
from guardpaint.data.splits import counts, group, leaks, perceptual_hash, split
from guardpaint.data.store import Corpus
from guardpaint.errors import BadInput
from guardpaint.store.checkpoint import write_atomic
from guardpaint.store.images import save_image
from guardpaint.store.progress import track

SPLITS = "splits.jsonl"
SHEET = 24
"""Images per contact sheet."""


def build(
    corpus: Corpus, labels: str, thresholds: Thresholds, seed: int = 0, quiet: bool = False, several: bool = False
) -> dict[str, Any]:
    """Decide the label of every image, leave out the undecided ones, split by groups and write splits.jsonl.

    With `several` an image keeps every harm over its threshold in `labels`, and the strongest in `label`. Returns the
    counts that the dataset card shows.
    """
    answers = {r["key"]: r["scores"] for r in corpus.lines(labels)}
    if not answers:
        raise BadInput(f"{corpus.root / labels}: no labels; run `guardpaint data label` first")
    captions = {r["key"]: r["prompt"] for r in corpus.lines(CAPTIONS)}
    rows: list[dict[str, Any]] = []
    left_out: Counter[str] = Counter()
    for e in track(corpus, "hashing", len(corpus.keys()), quiet):
        if e.key not in answers:
            left_out["not labelled"] += 1
            continue
        label = thresholds.decide(answers[e.key])
        if label is None:
            left_out["unreadable" if answers[e.key] is None else "dead zone"] += 1
            continue
        prompt = e.prompt or captions.get(e.key)
        code = perceptual_hash(e.picture())
        harm = max(answers[e.key][h] for h in thresholds.harms)
        row = {"key": e.key, "source": e.source, "label": label, "score": harm, "prompt": prompt, "hash": str(code)}
        rows.append({**row, "labels": thresholds.every(answers[e.key]) or [label]} if several else row)
    if not rows:
        raise BadInput(f"{corpus.root}: no image has a decided label; left out: {dict(left_out)}")
    groups = group(rows)
    chosen = {r["key"]: PLUS.join(r.get("labels") or [r["label"]]) for r in rows}
    splits = split(chosen, groups, seed)
    assert not leaks(splits, groups)
    (corpus.root / SPLITS).unlink(missing_ok=True)
    corpus.append(SPLITS, [{**r, "group": groups[r["key"]], "split": splits[r["key"]]} for r in rows])
    return {
        "images": len(rows),
        "left_out": dict(left_out),
        "groups": len(set(groups.values())),
        "splits": counts(chosen, splits),
        "sources": dict(Counter(r["source"] for r in rows)),
        "without_prompt": sum(r["prompt"] is None for r in rows),
    }


def write_card(corpus: Corpus, labels: str, thresholds: Thresholds, facts: Mapping[str, Any]) -> Path:
    """Write README.md with score histograms and a contact sheet per class; returns its path."""
    answers = [r["scores"] for r in corpus.lines(labels) if r["scores"] is not None]
    histogram(answers, thresholds, corpus.root / "scores.png")
    sheets = contact_sheets(corpus)
    lines = ["# Dataset card", "", f"{facts['images']} images in {facts['groups']} groups of near-duplicates.", ""]
    lines += ["| split | " + " | ".join(classes := sorted({c for s in facts["splits"].values() for c in s})) + " |"]
    lines += ["|---|" + "---|" * len(classes)]
    for name, sizes in facts["splits"].items():
        lines.append(f"| {name} | " + " | ".join(str(sizes.get(c, 0)) for c in classes) + " |")
    lines += ["", "| source | images |", "|---|---|", *(f"| {s} | {n} |" for s, n in sorted(facts["sources"].items()))]
    left = ", ".join(f"{n} {why}" for why, n in sorted(facts["left_out"].items())) or "nothing"
    cuts = ", ".join(f"{h} {t:.3f}" for h, t in thresholds.harms.items())
    lines += [
        "",
        f"Left out: {left}. Without a prompt: {facts['without_prompt']}.",
        f"Labels: `{labels}`; thresholds {cuts}; dead zone ±{thresholds.margin}.",
        "",
        "![scores](scores.png)",
        *(f"\n## {name}\n\n![{name}]({path.name})" for name, path in sheets.items()),
        "",
    ]
    path = corpus.root / "README.md"
    write_atomic(path, "\n".join(lines).encode())
    return path


def histogram(answers: list[dict[str, float]], thresholds: Thresholds, path: Path) -> None:
    """Plot the score distribution of every harm with its threshold and dead zone."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BadInput("plots need matplotlib: pip install 'guardpaint[data]'") from error
    figure = Figure(figsize=(4 * len(thresholds.harms), 3), layout="constrained")
    axes = figure.subplots(1, len(thresholds.harms), squeeze=False)[0]
    for axis, (harm, cut) in zip(axes, thresholds.harms.items(), strict=True):
        axis.hist([a[harm] for a in answers], bins=40, range=(0, 1), color="#4477aa", log=True)
        axis.axvspan(cut - thresholds.margin, cut + thresholds.margin, color="#ee6677", alpha=0.25, label="dead zone")
        axis.axvline(cut, color="#ee6677")
        axis.set(title=harm, xlabel="score", ylabel="images")
        axis.legend()
    figure.savefig(path, dpi=110)


def contact_sheets(corpus: Corpus) -> dict[str, Path]:
    """Write a contact sheet of the first images of every class; unsafe images are blurred. Returns paths by class."""
    from PIL import ImageFilter

    labels = {r["key"]: r["label"] for r in corpus.lines(SPLITS)}
    tiles: dict[str, list[Image.Image]] = {}
    for e in corpus:
        sheet_tiles = tiles.setdefault(labels[e.key], []) if e.key in labels else None
        if sheet_tiles is not None and len(sheet_tiles) < SHEET:
            small = e.picture().resize((96, 96))
            sheet_tiles.append(small if labels[e.key] == "safe" else small.filter(ImageFilter.GaussianBlur(6)))
    out = {}
    for name, images in sorted(tiles.items()):
        sheet = Image.new("RGB", (12 * 98, -(-len(images) // 12) * 98), "white")
        for i, image in enumerate(images):
            sheet.paste(image, (98 * (i % 12), 98 * (i // 12)))
        out[name] = corpus.root / f"sheet-{name}.png"
        save_image(sheet, out[name])
    return out
