"""Training pairs for the inpainter: an unsafe picture, its unsafe mask, a safe version of it, and the unsafe prompt.

guardpaint data pairs OUT --split train --count 2000                     from a testbed that draws pairs
guardpaint data pairs OUT --corpus DIR --auditor DIR --inpainter DIR    from labelled pictures
guardpaint data review OUT ; guardpaint data approve OUT approvals.json

OUT/pairs.jsonl has one row per pair; pictures and masks are PNG files in OUT/pictures.
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
from guardpaint.draft.loading import chosen_device
from guardpaint.draft.options import LoadOptions
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
    """One row of pairs.jsonl; file names are relative to its folder."""

    key: str
    split: str
    category: str
    """For safe, the pair is an ordinary picture that is its own target."""
    prompt: str
    safe_prompt: str
    source: str
    target: str
    mask: str
    """File of the auditor's mask, or of the true mask if no auditor was used."""
    truth: str | None
    mask_from: str
    approved: bool | None
    """None until a person decides; only pairs with True are used in training."""
    why: str = ""
    """Reason for the decision."""


class PairStore:
    """A folder of pairs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.index = root / INDEX

    def rows(self, split: str | None = None) -> list[Pair]:
        """The last row of every key, of one split if `split` is given."""
        last = {r["key"]: Pair(**r) for r in read_rows(self.index)}
        pairs = [p for p in last.values() if split in (None, p.split)]
        if not pairs:
            raise BadInput(
                f"{self.index}: no pairs{f' of split {split}' if split else ''}; make them with `guardpaint data pairs`"
            )
        return pairs

    def keys(self) -> set[str]:
        return {r["key"] for r in read_rows(self.index)}

    def append(self, pairs: list[Pair]) -> None:
        append_rows(self.index, [asdict(p) for p in pairs])

    def picture(self, name: str) -> Image.Image:
        return load_image(self.root / name)

    def save(self, key: str, what: str, image: Image.Image) -> str:
        """Write a picture of a pair and return its name in the index."""
        name = f"pictures/{key}-{what}.png"
        (self.root / "pictures").mkdir(parents=True, exist_ok=True)
        save_image(image, self.root / name)
        return name


def audited_mask(
    auditor: Auditor, image: Image.Image, prompt: str, config: GuardConfig, policy: Policy
) -> Pixels | None:
    """The regions that the guard would repair, as one mask; None if the auditor finds none."""
    view = shrink(as_pixels([np.array(image.convert("RGB"))])[0], auditor.sizes[1])
    audit = auditor.audit(view[None], [prompt], 0.0)[0]
    if policy.finding(audit) is None:
        return None
    regions = mine(audit.adv_map, (image.height, image.width), config)
    return union(regions).mask.numpy() if regions else None


def picture_of(mask: Pixels) -> Image.Image:
    return Image.fromarray(mask.astype(np.uint8) * 255)


Paint = Callable[[Image.Image, Pixels, str, int], Image.Image]
"""(picture, mask, prompt, seed) → the picture with its masked area inpainted."""


def painter(pipe: Any, steps: int = 30, guidance: float = 7.5) -> Paint:
    """A function that inpaints with a pipeline at the pipeline's own resolution."""

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
    """Makes safe versions of unsafe pictures: inpaints with a safe prompt until the auditor finds nothing."""

    auditor: Auditor
    paint: Paint
    policy: Policy
    rewrite: Callable[[Image.Image, str, str], str | None]
    """(picture, prompt, harm) → a safe prompt; None to use the policy's safe prompt."""
    tries: int = 4

    def mask(self, image: Image.Image, prompt: str) -> Pixels | None:
        """The auditor's mask of a picture; None if it finds nothing."""
        return audited_mask(self.auditor, image, prompt, GuardConfig(), self.policy)

    def painted(self, image: Image.Image, mask: Pixels, safe_prompt: str) -> tuple[Image.Image, bool]:
        """The last inpainted picture, and whether the auditor passed it."""
        target = image
        for attempt in range(self.tries):
            target = self.paint(image, mask, safe_prompt, attempt)
            if self.mask(target, safe_prompt) is None:
                return target, True
        return target, False


def from_corpus(
    out: Path, examples: Iterable[Example], known: Mapping[str, Mapping[str, Any]], maker: PairMaker
) -> dict[str, int]:
    """Make pairs from labelled pictures and return counts; a person has to approve the unsafe ones.

    `known` has the split, label and prompt of every key.
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
    out: Path,
    corpus: Path,
    auditor: Auditor,
    inpainter: Path,
    policy: Policy,
    rewriter: str | None,
    opening: LoadOptions,
) -> dict[str, int]:
    """Make pairs from a corpus that `data label` and `data build` have labelled and split; returns counts.

    `opening` holds the device of inpainter and rewriter, and the hub's token.
    """
    from guardpaint.bases import load_inpainter
    from guardpaint.data.card import SPLITS
    from guardpaint.data.labelers import Asking, open_labeler

    store = Corpus(corpus)
    known = {r["key"]: r for r in store.lines(SPLITS)}
    if not known:
        raise BadInput(
            f"{corpus / SPLITS}: not split yet; run `guardpaint data label` and `guardpaint data build` first"
        )
    chat = open_labeler(rewriter, Asking(policy), opening) if rewriter else None

    def rewrite(image: Image.Image, prompt: str, harm: str) -> str | None:
        return None if chat is None else chat.rewrite(image, prompt, policy.safe_prompt(harm))

    pipe = load_inpainter(str(inpainter)).to(chosen_device(opening))
    maker = PairMaker(auditor, painter(pipe), policy, rewrite)
    return from_corpus(out, store, known, maker)


def corpus_pair(
    store: PairStore, example: Example, row: Mapping[str, Any], maker: PairMaker
) -> tuple[Pair | None, str]:
    """The pair of one labelled picture (None if the auditor does not find the harm), and the count it belongs to.

    A safe picture is its own target, with a mask in the middle.
    """
    image, category, prompt = example.picture(), row["label"], row["prompt"] or ""
    target, safe_prompt = image, prompt
    approved: bool | None = True
    mask: Pixels | None
    if category == SAFE:
        mask, what = np.zeros((image.height, image.width), bool), "safe"
        mask[image.height // 4 : -image.height // 4, image.width // 4 : -image.width // 4] = True
    else:
        mask = maker.mask(image, prompt)
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
    """Write an offline page that shows source, mask and target of every undecided pair; returns its path.

    On the page, J accepts, F refuses, and the button saves approvals.json.
    """
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
    """Append a person's decisions to the index and return their number; an unknown key raises before anything is
    written."""
    store = PairStore(out)
    try:
        decisions = json.loads(approvals.read_text(encoding="utf-8"))
        valid = isinstance(decisions, dict) and all(isinstance(v, bool) for v in decisions.values())
    except (OSError, ValueError) as error:
        raise BadInput(f"{approvals}: cannot be read ({error})") from error
    if not valid:
        raise BadInput(f"{approvals}: needs one true or false for each key, as the review page saves it")
    rows = {p.key: p for p in store.rows()}
    unknown = sorted(set(decisions) - set(rows))
    if unknown:
        raise BadInput(f"{approvals}: no pair {unknown[0]!r} in {out}")
    store.append([Pair(**{**asdict(rows[k]), "approved": v, "why": "reviewed"}) for k, v in decisions.items()])
    return len(decisions)


def leaks(store: PairStore, near: int = 2) -> dict[str, list[str]]:
    """Keys, by split, of held-out pairs whose picture or prompt is nearly equal to one in the training split."""
    rows = store.rows()
    hashes = [
        {"key": p.key, "hash": perceptual_hash(store.picture(p.source)), "prompt": p.prompt}
        for p in track(rows, "leakage")
    ]
    groups = group(hashes, near)
    trained = {groups[p.key] for p in rows if p.split == "train"}
    leaked: dict[str, list[str]] = {}
    for p in rows:
        if p.split != "train" and groups[p.key] in trained:
            leaked.setdefault(p.split, []).append(p.key)
    return leaked
