"""Pairs for the inpainter: an unsafe picture, where it is unsafe, a safe version of it, and the unsafe prompt.

guardpaint data pairs OUT --split train --count 2000                     from a testbed that draws pairs
guardpaint data pairs OUT --corpus DIR --auditor DIR --inpainter DIR    from labelled pictures
guardpaint data review OUT ; guardpaint data approve OUT approvals.json

OUT/pairs.jsonl has one row per pair; pictures and masks lie beside it as PNG.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from PIL import Image

from guardpaint.audit.regions import mine, union
from guardpaint.config import GuardConfig
from guardpaint.data.splits import group, perceptual_hash
from guardpaint.data.store import Corpus, Example
from guardpaint.draft.views import shrink
from guardpaint.errors import BadInput
from guardpaint.policy import Policy
from guardpaint.store.images import as_pixels, load_image, save_image
from guardpaint.store.pages import render
from guardpaint.store.progress import track
from guardpaint.store.rows import append_rows, read_rows
from guardpaint.types import SAFE, Auditor

INDEX = "pairs.jsonl"
Pixels = Bool[np.ndarray, "h w"]


@dataclass(frozen=True)
class Pair:
    """One row of the index; file names are relative to the folder."""

    key: str
    split: str
    category: str
    """safe: an ordinary picture, its own target."""
    prompt: str
    safe_prompt: str
    source: str
    target: str
    mask: str
    """What the auditor found, or the truth where there is no auditor."""
    truth: str | None
    mask_from: str
    approved: bool | None
    """None: not decided yet; only True trains."""
    why: str = ""


class PairStore:
    """A folder of pairs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.index = root / INDEX

    def rows(self, split: str | None = None) -> list[Pair]:
        """The last row of every key; `split` picks some."""
        last = {r["key"]: Pair(**r) for r in read_rows(self.index)}
        found = [p for p in last.values() if split in (None, p.split)]
        if not found:
            raise BadInput(f"{self.root}: no pairs{f' of split {split}' if split else ''}; make them with `data pairs`")
        return found

    def keys(self) -> set[str]:
        return {r["key"] for r in read_rows(self.index)}

    def append(self, pairs: list[Pair]) -> None:
        append_rows(self.index, [asdict(p) for p in pairs])

    def picture(self, name: str) -> Image.Image:
        return load_image(self.root / name)

    def save(self, key: str, what: str, image: Image.Image) -> str:
        name = f"pictures/{key}-{what}.png"
        (self.root / "pictures").mkdir(parents=True, exist_ok=True)
        save_image(image, self.root / name)
        return name


def audited_mask(
    auditor: Auditor, image: Image.Image, prompt: str, config: GuardConfig, policy: Policy
) -> Pixels | None:
    """The regions the guard would repair, as one mask; nothing if the auditor sees none."""
    view = shrink(as_pixels([np.array(image.convert("RGB"))])[0], auditor.sizes[1])
    audit = auditor.audit(view[None], [prompt], 0.0)[0]
    if policy.finding(audit) is None:
        return None
    regions = mine(audit.adv_map, (image.height, image.width), config)
    return union(regions).mask.numpy() if regions else None


def picture_of(mask: Pixels) -> Image.Image:
    return Image.fromarray(mask.astype(np.uint8) * 255)


Paint = Callable[[Image.Image, Pixels, str, int], Image.Image]
"""(picture, mask, prompt, seed) → the picture with the masked area painted anew."""


def painter(pipe: Any, steps: int = 30, guidance: float = 7.5) -> Paint:
    """An inpainting pipeline as a function, at its own resolution."""

    def paint(image: Image.Image, mask: Pixels, prompt: str, seed: int) -> Image.Image:
        size = int(pipe.unet.config.sample_size) * pipe.vae_scale_factor
        hole = picture_of(mask)
        call = {"num_inference_steps": steps, "guidance_scale": guidance, "height": size, "width": size}
        painted = pipe(
            prompt,
            image=image.resize((size, size)),
            mask_image=hole.resize((size, size)),
            generator=torch.Generator().manual_seed(seed),
            **call,
        ).images[0]
        return Image.composite(painted.resize(image.size), image.convert("RGB"), hole)

    return paint


@dataclass(frozen=True)
class PairMaker:
    """Makes safe versions of unsafe pictures: painted under a safe prompt until the auditor finds nothing."""

    auditor: Auditor
    paint: Paint
    policy: Policy
    rewrite: Callable[[Image.Image, str, str], str | None]
    """(picture, prompt, harm) → a safe prompt, or None for the policy's own."""
    tries: int = 4

    def found(self, image: Image.Image, prompt: str) -> Pixels | None:
        return audited_mask(self.auditor, image, prompt, GuardConfig(), self.policy)

    def painted(self, image: Image.Image, mask: Pixels, safe_prompt: str) -> tuple[Image.Image, bool]:
        """The last attempt, and whether the auditor passed it."""
        target = image
        for attempt in range(self.tries):
            target = self.paint(image, mask, safe_prompt, attempt)
            if self.found(target, safe_prompt) is None:
                return target, True
        return target, False


def from_corpus(
    out: Path, examples: Iterable[Example], known: Mapping[str, Mapping[str, Any]], maker: PairMaker
) -> dict[str, int]:
    """Pairs of labelled pictures; a person decides about each in the end. Returns counts.

    `known` has split, label and prompt of every key.
    """
    store = PairStore(out)
    have = store.keys()
    counts = dict.fromkeys(("made", "no mask", "auditor refused", "safe", "had"), 0)
    for example in examples:
        row = known.get(example.key)
        if row is None:
            continue
        if example.key in have:
            counts["had"] += 1
            continue
        pair, what = corpus_pair(store, example, row, maker)
        if pair is not None:
            store.append([pair])
        counts[what] += 1
    return counts


def from_labelled(
    out: Path, corpus: Path, auditor: Auditor, inpainter: Path, policy: Policy, rewriter: str | None
) -> dict[str, int]:
    """Pairs of a corpus that was labelled and split by `data label` and `data build`."""
    from guardpaint.bases import load_inpainter
    from guardpaint.data.card import SPLITS
    from guardpaint.data.labelers import Asking, open_labeler

    store = Corpus(corpus)
    known = {r["key"]: r for r in store.lines(SPLITS)}
    if not known:
        raise BadInput(f"{corpus}: not split yet; run `guardpaint data label` and `guardpaint data build` first")
    chat = open_labeler(rewriter, Asking(policy)) if rewriter else None

    def rewrite(image: Image.Image, prompt: str, harm: str) -> str | None:
        return None if chat is None else chat.rewrite(image, prompt, policy.safe_prompt(harm))

    maker = PairMaker(auditor, painter(load_inpainter(str(inpainter))), policy, rewrite)
    return from_corpus(out, store, known, maker)


def corpus_pair(
    store: PairStore, example: Example, row: Mapping[str, Any], maker: PairMaker
) -> tuple[Pair | None, str]:
    """The pair of one labelled picture and what happened to it; None if the auditor does not see the harm.

    A safe picture is its own target, with a hole in the middle.
    """
    image, category, prompt = example.picture(), row["label"], row["prompt"] or ""
    target, safe_prompt = image, prompt
    approved: bool | None = True
    mask: Pixels | None
    if category == SAFE:
        mask, what = np.zeros((image.height, image.width), bool), "safe"
        mask[image.height // 4 : -image.height // 4, image.width // 4 : -image.width // 4] = True
    else:
        mask = maker.found(image, prompt)
        if mask is None:
            return None, "no mask"
        safe_prompt = maker.rewrite(image, prompt, category) or maker.policy.safe_prompt(category)
        target, passed = maker.painted(image, mask, safe_prompt)
        approved, what = (None, "made") if passed else (False, "auditor refused")
    pair = Pair(
        key=example.key,
        split=row["split"],
        category=category,
        prompt=prompt,
        safe_prompt=safe_prompt,
        source=store.save(example.key, "source", image),
        target=store.save(example.key, "target", target),
        mask=store.save(example.key, "mask", picture_of(mask)),
        truth=None,
        mask_from="centre" if category == SAFE else "auditor",
        approved=approved,
        why="the auditor flags every attempt" if approved is False else "",
    )
    return pair, what


def review_page(out: Path) -> Path:
    """One offline page: source, mask and target side by side; J accepts, F refuses, the button saves approvals.json."""
    store = PairStore(out)
    cards = [
        {
            "key": pair.key,
            "category": pair.category,
            "safe_prompt": pair.safe_prompt,
            "pictures": [(column, store.picture(name).convert("RGB")) for column, name in columns(pair)],
        }
        for pair in store.rows()
        if pair.approved is None
    ]
    path = out / "review.html"
    path.write_text(render("review.html.j2", title="GuardPaint: review pairs", cards=cards), encoding="utf-8")
    return path


def columns(pair: Pair) -> list[tuple[str, str]]:
    return [("source", pair.source), ("mask", pair.mask), ("target", pair.target)]


def approve(out: Path, approvals: Path) -> int:
    """Write a person's decisions into the index; unknown keys are named and nothing is written."""
    store = PairStore(out)
    try:
        decisions = json.loads(approvals.read_text(encoding="utf-8"))
        good = isinstance(decisions, dict) and all(isinstance(v, bool) for v in decisions.values())
    except (OSError, ValueError) as error:
        raise BadInput(f"{approvals}: cannot be read ({error})") from error
    if not good:
        raise BadInput(f"{approvals}: needs one true or false for each key, as the review page saves it")
    rows = {p.key: p for p in store.rows()}
    unknown = sorted(set(decisions) - set(rows))
    if unknown:
        raise BadInput(f"{approvals}: no pair {unknown[0]!r} in {out}")
    store.append([Pair(**{**asdict(rows[k]), "approved": v, "why": "reviewed"}) for k, v in decisions.items()])
    return len(decisions)


def leaks(store: PairStore, near: int = 2) -> dict[str, list[str]]:
    """Validation and test pairs that are in the training set already: near-equal pictures, or equal prompts."""
    rows = store.rows()
    prints = [
        {"key": p.key, "hash": perceptual_hash(store.picture(p.source)), "prompt": p.prompt}
        for p in track(rows, "leakage")
    ]
    groups = group(prints, near)
    trained = {groups[p.key] for p in rows if p.split == "train"}
    found: dict[str, list[str]] = {}
    for p in rows:
        if p.split != "train" and groups[p.key] in trained:
            found.setdefault(p.split, []).append(p.key)
    return found
