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
from rich.progress import track

from guardpaint.audit.regions import mine, union
from guardpaint.config import GuardConfig
from guardpaint.data.splits import group, perceptual_hash
from guardpaint.data.store import Corpus, Example
from guardpaint.draft.views import shrink
from guardpaint.errors import BadInput
from guardpaint.policy import Policy
from guardpaint.store.images import as_pixels, load_image, save_image
from guardpaint.store.pages import render
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
        self._rows = Corpus(root)

    def rows(self, split: str | None = None) -> list[Pair]:
        """The last row of every key; `split` picks some."""
        last = {r["key"]: Pair(**r) for r in self._rows.lines(INDEX)}
        found = [p for p in last.values() if split in (None, p.split)]
        if not found:
            raise BadInput(f"{self.root}: no pairs{f' of split {split}' if split else ''}; make them with `data pairs`")
        return found

    def keys(self) -> set[str]:
        return {r["key"] for r in self._rows.lines(INDEX)}

    def append(self, pairs: list[Pair]) -> None:
        self._rows.append(INDEX, [asdict(p) for p in pairs])

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
        made = pipe(
            prompt,
            image=image.resize((size, size)),
            mask_image=hole.resize((size, size)),
            generator=torch.Generator().manual_seed(seed),
            **call,
        ).images[0]
        return Image.composite(made.resize(image.size), image.convert("RGB"), hole)

    return paint


def from_corpus(
    out: Path,
    examples: Iterable[Example],
    known: Mapping[str, Mapping[str, Any]],
    auditor: Auditor,
    paint: Paint,
    policy: Policy,
    rewrite: Callable[[Image.Image, str, str], str | None],
    tries: int = 4,
) -> dict[str, int]:
    """Pairs of labelled pictures: painted under a safe prompt until the auditor agrees; a person decides at last.

    `known` has split, label and prompt of every key.
    """
    store = PairStore(out)
    have = store.keys()
    counts = dict.fromkeys(("made", "no mask", "auditor refused", "safe", "had"), 0)
    config = GuardConfig()
    for example in examples:
        row = known.get(example.key)
        if row is None:
            continue
        category, prompt = row["label"], row["prompt"] or ""
        if example.key in have:
            counts["had"] += 1
            continue
        image = example.picture()
        if category == SAFE:
            whole = np.zeros((image.height, image.width), bool)
            whole[image.height // 4 : -image.height // 4, image.width // 4 : -image.width // 4] = True
            store.append([corpus_pair(store, example.key, row, prompt, image, image, whole, True, "")])
            counts["safe"] += 1
            continue
        mask = audited_mask(auditor, image, prompt, config, policy)
        if mask is None:
            counts["no mask"] += 1
            continue
        safe_prompt = rewrite(image, prompt, category) or policy.safe_prompt(category)
        target, why = image, "the auditor flags every attempt"
        for attempt in range(tries):
            target = paint(image, mask, safe_prompt, attempt)
            if audited_mask(auditor, target, safe_prompt, config, policy) is None:
                why = ""
                break
        approved = False if why else None
        store.append([corpus_pair(store, example.key, row, safe_prompt, image, target, mask, approved, why)])
        counts["auditor refused" if why else "made"] += 1
    return counts


def from_labelled(
    out: Path, corpus: Path, auditor: Auditor, inpainter: Path, policy: Policy, rewriter: str | None
) -> dict[str, int]:
    """Pairs of a corpus that was labelled and split by `data label` and `data build`."""
    from guardpaint.data.card import SPLITS
    from guardpaint.data.labelers import Asking, open_labeler
    from guardpaint.train.align import open_inpainter

    store = Corpus(corpus)
    known = {r["key"]: r for r in store.lines(SPLITS)}
    if not known:
        raise BadInput(f"{corpus}: not split yet; run `guardpaint data label` and `guardpaint data build` first")
    chat = open_labeler(rewriter, Asking(policy)) if rewriter else None

    def rewrite(image: Image.Image, prompt: str, harm: str) -> str | None:
        return None if chat is None else chat.rewrite(image, prompt, policy.safe_prompt(harm))

    return from_corpus(out, store, known, auditor, painter(open_inpainter(str(inpainter))), policy, rewrite)


def corpus_pair(
    store: PairStore,
    key: str,
    row: Mapping[str, Any],
    safe_prompt: str,
    image: Image.Image,
    target: Image.Image,
    mask: Pixels,
    approved: bool | None,
    why: str,
) -> Pair:
    return Pair(
        key=key,
        split=row["split"],
        category=row["label"],
        prompt=row["prompt"] or "",
        safe_prompt=safe_prompt,
        source=store.save(key, "source", image),
        target=store.save(key, "target", target),
        mask=store.save(key, "mask", picture_of(mask)),
        truth=None,
        mask_from="auditor" if row["label"] != SAFE else "centre",
        approved=approved,
        why=why,
    )


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
        said = json.loads(approvals.read_text(encoding="utf-8"))
        good = isinstance(said, dict) and all(isinstance(v, bool) for v in said.values())
    except (OSError, ValueError) as error:
        raise BadInput(f"{approvals}: cannot be read ({error})") from error
    if not good:
        raise BadInput(f"{approvals}: needs one true or false for each key, as the review page saves it")
    rows = {p.key: p for p in store.rows()}
    unknown = sorted(set(said) - set(rows))
    if unknown:
        raise BadInput(f"{approvals}: no pair {unknown[0]!r} in {out}")
    store.append([Pair(**{**asdict(rows[k]), "approved": v, "why": "reviewed"}) for k, v in said.items()])
    return len(said)


def leaks(store: PairStore, near: int = 2) -> dict[str, list[str]]:
    """Validation and test pairs that are in the training set already: near-equal pictures, or equal prompts."""
    rows = store.rows()
    prints = [
        {"key": p.key, "hash": perceptual_hash(store.picture(p.source)), "prompt": p.prompt}
        for p in track(rows, description="leakage")
    ]
    groups = group(prints, near)
    trained = {groups[p.key] for p in rows if p.split == "train"}
    found: dict[str, list[str]] = {}
    for p in rows:
        if p.split != "train" and groups[p.key] in trained:
            found.setdefault(p.split, []).append(p.key)
    return found
