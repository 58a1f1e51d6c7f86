"""Views of a labelled corpus: what an auditor sees while a base draws pictures like these.

guardpaint data corpus-views corpora/real --base DIR --split train --out views/real

Where in a picture the harm is, a corpus does not tell: losses on maps pass its unsafe pictures by.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import ImageOps
from rich.progress import track
from torch import Tensor

from guardpaint.data.card import SPLITS
from guardpaint.data.store import Corpus, Example
from guardpaint.data.views import Views, as_bytes, clean_pictures, joined, load_views, renoised_pictures, store
from guardpaint.draft.codec import resize
from guardpaint.errors import BadInput
from guardpaint.images import as_pixels
from guardpaint.policy import Policy
from guardpaint.seeds import derive
from guardpaint.types import SAFE

SHARD = 256
"""Pictures of one file."""
CALIBRATION = "calibration"
"""Half of the test split's groups: what sets thresholds must not have taught or chosen the auditor, nor judge it."""


def members(corpus: Corpus, split: str, policy: Policy) -> dict[str, dict[str, Any]]:
    """Rows of splits.jsonl by key, of one split, those without a prompt left out."""
    rows = corpus.lines(SPLITS)
    if not rows:
        raise BadInput(f"{corpus.root}: not split yet; run `guardpaint data label` and `guardpaint data build` first")
    unknown = {r["label"] for r in rows} - set(policy.names)
    if unknown:
        raise BadInput(f"{corpus.root}: labels {', '.join(sorted(unknown))} are not in the policy; name it by --policy")
    halves = {"test": 0, CALIBRATION: 1}
    own = [r for r in rows if r["split"] == ("test" if split in halves else split)]
    if split in halves:
        own = [r for r in own if derive(0, "calibration", r["group"]) % 2 == halves[split]]
    found = {r["key"]: r for r in own if r["prompt"]}
    if not found:
        raise BadInput(
            f"{corpus.root}: no picture with a prompt in split {split!r}; splits are train, validation, test and "
            f"{CALIBRATION} (half of test), and `guardpaint data caption` writes prompts"
        )
    return found


def settings(pipe: Any, size: int, steps: int, guidance: float | None) -> dict[str, Any]:
    """How the base is called: the pipeline's own guidance unless another is given."""
    own = inspect.signature(type(pipe).__call__).parameters["guidance_scale"].default
    return {
        "height": size,
        "width": size,
        "num_inference_steps": steps,
        "guidance_scale": float(own if guidance is None else guidance),
    }


def squares(examples: Sequence[Example], size: int) -> Float[Tensor, "b 3 s s"]:
    """The middle of every picture, as large as the base draws."""
    return as_pixels([np.asarray(ImageOps.fit(e.picture(), (size, size))) for e in examples])


def shards(corpus: Corpus, wanted: dict[str, Any]) -> Iterator[list[Example]]:
    """Wanted pictures in the corpus's own order, so many at a time."""
    some = (e for e in corpus if e.key in wanted)
    while part := list(islice(some, SHARD)):
        yield part


def make(
    corpus: Corpus,
    pipe: Any,
    name: str,
    out: Path,
    split: str,
    policy: Policy,
    call: dict[str, Any],
    tiny: Any = None,
    pixels: int = 384,
    batch: int = 8,
    quiet: bool = False,
) -> int:
    """Every picture at one random step of the base, and every fourth finished; returns how many files are new.

    A file that holds just these pictures under these labels is kept, so a run that was stopped goes on.
    """
    wanted = members(corpus, split, policy)
    out.mkdir(parents=True, exist_ok=True)
    new = 0
    total = -(-len(wanted) // SHARD)
    for k, part in enumerate(track(shards(corpus, wanted), f"{name} {split}", total, disable=quiet)):
        path = out / f"{name}-{k:05d}-{split}.pt"
        if path.exists() and holds(path, part, wanted, policy):
            continue
        some = [part[i : i + batch] for i in range(0, len(part), batch)]
        store([views_of(examples, wanted, pipe, call, tiny, policy, pixels) for examples in some], path)
        new += 1
    for path in sorted(out.glob(f"{name}-*-{split}.pt"))[total:]:  # of a larger split, before it was built anew
        path.unlink()
    return new


def seed_of(key: str) -> int:
    return int(key[:15], 16)


def holds(path: Path, examples: Sequence[Example], wanted: dict[str, Any], policy: Policy) -> bool:
    """Whether a file has exactly these pictures, labelled and described as they are now."""
    kept = load_views(path, on_disk=True)
    have = set(zip(kept.seeds.tolist(), kept.category.tolist(), kept.texts, strict=True))
    rows = [wanted[e.key] for e in examples]
    return kept.names == policy.names and have == {
        (seed_of(r["key"]), policy.names.index(r["label"]), r["prompt"]) for r in rows
    }


@torch.no_grad()
def views_of(
    examples: Sequence[Example],
    wanted: dict[str, Any],
    pipe: Any,
    call: dict[str, Any],
    tiny: Any,
    policy: Policy,
    pixels: int,
) -> Views:
    """One batch: unfinished views of all, finished ones of some."""
    rows = {seed_of(e.key): wanted[e.key] for e in examples}
    seeds = list(rows)
    category = torch.tensor([policy.names.index(rows[s]["label"]) for s in seeds])
    nowhere = torch.zeros(len(seeds), 1, 1, dtype=torch.bool)
    images = squares(examples, int(call["height"]))
    texts = [rows[s]["prompt"] for s in seeds]
    unfinished = renoised_pictures(pipe, call, tiny, images, nowhere, category, seeds, texts)
    few = slice(None, None, 4)
    done = clean_pictures(pipe.vae, images[few], nowhere[few], category[few], seeds[few], pipe._execution_device)
    both = joined([unfinished, done])
    own = [rows[s] for s in both.seeds.tolist()]
    return replace(
        both,
        images=as_bytes(resize(both.images.float() / 255, (pixels, pixels))),
        texts=tuple(r["prompt"] for r in own),
        strength=torch.tensor([0.0 if r["label"] == SAFE else float(r.get("score", 1.0)) for r in own]),
        names=policy.names,
    )
