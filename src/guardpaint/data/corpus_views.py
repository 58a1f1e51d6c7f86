"""Views of a labelled corpus: what an auditor would see while a base generates these pictures.

guardpaint data corpus-views corpora/real --base DIR --split train --out views/real

The labels of a corpus do not locate the harm in a picture, so its unsafe pictures are left out of the map losses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import ImageOps
from torch import Tensor

from guardpaint.data.card import SPLITS
from guardpaint.data.store import Corpus, Example
from guardpaint.data.views import (
    Labelled,
    ViewedBase,
    Views,
    as_bytes,
    clean_pictures,
    joined,
    load_views,
    renoised_pictures,
    store,
)
from guardpaint.draft.call_settings import call_settings
from guardpaint.draft.codec import resize
from guardpaint.errors import BadInput
from guardpaint.policy import Policy
from guardpaint.store.checkpoint import sha256_hex
from guardpaint.store.images import as_pixels
from guardpaint.store.progress import track
from guardpaint.store.seeds import derive
from guardpaint.types import SAFE

SHARD = 256
"""Pictures per file."""
CALIBRATION = "calibration"
"""Name of the split that sets thresholds: half of the test split's groups. It must share no picture with the splits
that train, select or evaluate the auditor."""


def members(corpus: Corpus, split: str, policy: Policy) -> dict[str, dict[str, Any]]:
    """Rows of splits.jsonl that belong to a split and have a prompt, by key."""
    rows = corpus.lines(SPLITS)
    if not rows:
        raise BadInput(f"{corpus.root}: not split yet; run `guardpaint data label` and `guardpaint data build` first")
    unknown = {label for r in rows for label in labels_of(r)} - set(policy.names)
    if unknown:
        raise BadInput(
            f"{corpus.root}: labels {', '.join(sorted(unknown))} are not in the policy; name theirs with --policy"
        )
    halves = {"test": 0, CALIBRATION: 1}
    own = [r for r in rows if r["split"] == ("test" if split in halves else split)]
    if split in halves:
        own = [r for r in own if derive(0, "calibration", r["group"]) % 2 == halves[split]]
    prompted = {r["key"]: r for r in own if r["prompt"]}
    if not prompted:
        raise BadInput(
            f"{corpus.root}: no picture with a prompt in split {split!r}; splits are train, validation, test and "
            f"{CALIBRATION} (half of test), and `guardpaint data caption` writes prompts"
        )
    return prompted


def labels_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """All categories of a row of splits.jsonl."""
    return tuple(row.get("labels") or (row["label"],))


def without_prompt(corpus: Corpus) -> int:
    """How many pictures of the splits have no prompt."""
    return sum(not r["prompt"] for r in corpus.lines(SPLITS))


def settings(pipe: Any, call: Mapping[str, Any]) -> dict[str, Any]:
    """Complete call arguments of a base for views, which are square: these ones, then what the pipeline itself does."""
    own = call_settings(pipe, call)
    if own.height != own.width:
        raise BadInput(f"the base draws {own.height}×{own.width}, but views are square; give --size")
    return {**call, **own.arguments()}


def squares(examples: Sequence[Example], size: int) -> Float[Tensor, "b 3 s s"]:
    """Every picture, cropped to its central square and scaled to `size`."""
    return as_pixels([np.asarray(ImageOps.fit(e.picture(), (size, size))) for e in examples])


def shards(corpus: Corpus, wanted: dict[str, Any]) -> Iterator[list[Example]]:
    """Lists of up to SHARD wanted pictures, in the corpus's own order."""
    examples = (e for e in corpus if e.key in wanted)
    while part := list(islice(examples, SHARD)):
        yield part


@dataclass(frozen=True)
class ViewPlan:
    """The base that views of a corpus are made with, and the size of the views."""

    base: ViewedBase
    name: str
    """The base's name, as it appears in file names."""
    pixels: int = 384
    """Side of a view in pixels: the larger of the auditor's sizes."""
    batch: int = 8
    origin: str = ""
    """Identifies the base and its decoder."""

    def digest(self) -> str:
        """Hash of everything that determines the views of a picture."""
        decoder = self.base.decoder
        made = None if decoder is None or decoder.exits is None else [*sorted(decoder.ways()), *self.base.looks]
        values = [self.origin, self.base.call, self.pixels, made]
        return sha256_hex(json.dumps(values, sort_keys=True))


def make(
    corpus: Corpus,
    plan: ViewPlan,
    out: Path,
    split: str,
    policy: Policy,
    quiet: bool = False,
    share: tuple[int, int] = (0, 1),
) -> int:
    """Write views of every picture at one random step of the base, and of about every fourth as a finished picture.

    Returns the number of new files. A file is kept if it holds exactly these pictures with their current labels, made
    by the same plan, so an interrupted run resumes where it stopped. With `share` (k, n) only every n-th file is made,
    from file k on.
    """
    wanted = members(corpus, split, policy)
    origin = plan.digest()
    out.mkdir(parents=True, exist_ok=True)
    new = 0
    total = -(-len(wanted) // SHARD)
    for k, part in enumerate(track(shards(corpus, wanted), f"{plan.name} {split}", total, quiet)):
        path = out / f"{plan.name}-{k:05d}-{split}.pt"
        if k % share[1] != share[0]:
            continue
        if path.exists() and holds(path, part, wanted, policy, origin):
            continue
        batches = [part[i : i + plan.batch] for i in range(0, len(part), plan.batch)]
        parts = [views_of(examples, wanted, plan, policy) for examples in batches]
        store([replace(v, origin=origin) for v in parts], path)
        new += 1
    for path in sorted(out.glob(f"{plan.name}-[0-9]*-{split}.pt")) if share[0] == 0 else ():
        if int(path.name.removeprefix(f"{plan.name}-").split("-")[0]) >= total:  # left from an earlier, larger split
            path.unlink()
    return new


def seed_of(key: str) -> int:
    """The number that identifies a picture in its views."""
    return int(key[:15], 16)


def strength_of(row: dict[str, Any]) -> float:
    """The labeler's score for harm, rounded to the precision that views store; 0 for safe pictures."""
    return float(np.float32(0.0 if row["label"] == SAFE else row.get("score", 1.0)))


def holds(path: Path, examples: Sequence[Example], wanted: dict[str, Any], policy: Policy, origin: str) -> bool:
    """Whether a file has exactly these pictures with their current labels and prompts, made with the same settings."""
    views = load_views(path, on_disk=True)
    if views.strength is None or views.names != policy.names or views.origin != origin:
        return False
    columns = views.seeds.tolist(), views.category.tolist(), views.strength.tolist(), views.texts
    rows = [wanted[e.key] for e in examples]
    labels = [tuple(row) for row in views.every_label().tolist()]
    return set(zip(*columns, labels, strict=True)) == {
        (seed_of(r["key"]), policy.names.index(r["label"]), strength_of(r), r["prompt"], marked(r, policy))
        for r in rows
    }


def marked(row: Mapping[str, Any], policy: Policy) -> tuple[bool, ...]:
    """For every category of the policy, whether a row of splits.jsonl has it."""
    labels = labels_of(row)
    return tuple(name in labels for name in policy.names)


def kept_apart(folder: Path) -> None:
    """Raise BadInput if a picture is in two splits: the corpus was split again after some of its views were made."""
    seen: dict[int, str] = {}
    for path in sorted(folder.glob("*.pt")):
        split, views = path.stem.rsplit("-", 1)[-1], load_views(path, on_disk=True)
        for seed in () if views.world else set(views.seeds.tolist()):
            if seen.setdefault(seed, split) != split:
                raise BadInput(
                    f"{path}: a picture in it is also in split {seen[seed]}; the corpus was split again since. Run "
                    "`guardpaint data corpus-views` again for every base and split, or delete the old files"
                )


@torch.no_grad()
def views_of(examples: Sequence[Example], wanted: dict[str, Any], plan: ViewPlan, policy: Policy) -> Views:
    """Views of one batch: unfinished ones of all pictures, finished ones of about a quarter."""
    rows = {seed_of(e.key): wanted[e.key] for e in examples}
    seeds = list(rows)
    pictures = Labelled(
        images=squares(examples, int(plan.base.call["height"])),
        masks=torch.zeros(len(seeds), 1, 1, dtype=torch.bool),
        category=torch.tensor([policy.names.index(rows[s]["label"]) for s in seeds]),
        seeds=seeds,
        prompts=[rows[s]["prompt"] for s in seeds],
        names=policy.names,
    )
    parts = [renoised_pictures(plan.base, pictures)]
    finished = [i for i, s in enumerate(seeds) if s % 4 == 0]
    if finished:
        plain = torch.tensor([seeds[i] // 4 % 2 == 0 for i in finished], dtype=torch.bool)
        parts.append(clean_pictures(plan.base.pipe.vae, pictures.rows(finished), plain, plan.base.device))
    views = joined(parts)
    own = [rows[s] for s in views.seeds.tolist()]
    return replace(
        views,
        images=as_bytes(resize(views.images.float() / 255, (plan.pixels, plan.pixels))),
        strength=torch.tensor([strength_of(row) for row in own]),
        labels=torch.tensor([marked(r, policy) for r in own]) if any("labels" in r for r in rows.values()) else None,
    )
