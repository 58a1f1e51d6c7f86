"""Views of a labelled corpus: what an auditor sees while a base draws pictures like these.

guardpaint data corpus-views corpora/real --base DIR --split train --out views/real

Where in a picture the harm is, a corpus does not tell: losses on maps pass its unsafe pictures by.
"""

from __future__ import annotations

import hashlib
import inspect
import json
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
from guardpaint.draft.families import family_of
from guardpaint.errors import BadInput
from guardpaint.store.images import as_pixels
from guardpaint.policy import Policy
from guardpaint.store.seeds import derive
from guardpaint.types import SAFE

SHARD = 256
"""Pictures of one file."""
CALIBRATION = "calibration"
"""Half of the test split's groups: what sets thresholds must not have taught or chosen the auditor, nor judge it."""


def members(corpus: Corpus, split: str, policy: Policy) -> dict[str, dict[str, Any]]:
    """Rows of splits.jsonl by key, of one split; those without a prompt are left out (`without_prompt` counts them)."""
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


def without_prompt(corpus: Corpus) -> int:
    return sum(not r["prompt"] for r in corpus.lines(SPLITS))


def settings(
    pipe: Any, own: dict[str, Any], size: int | None = None, steps: int | None = None, guidance: float | None = None
) -> dict[str, Any]:
    """How the base is called: as told here, else as it was made to be (`own`), else by the pipeline's defaults."""
    asked = {"num_inference_steps": steps, "guidance_scale": guidance, "height": size, "width": size}
    call = {**own, **{k: v for k, v in asked.items() if v is not None}}
    defaults = inspect.signature(type(pipe).__call__).parameters
    for name in ("num_inference_steps", "guidance_scale"):
        call.setdefault(name, defaults[name].default)
    denoiser = getattr(pipe, family_of(pipe).denoiser)
    units = getattr(pipe, "default_sample_size", None) or getattr(denoiser.config, "sample_size", None)
    if "height" not in call and not isinstance(units, int):
        raise BadInput("the base does not tell how large it draws: give --size")
    for name in ("height", "width"):
        call.setdefault(name, int(units or 0) * int(pipe.vae_scale_factor))
    if call["height"] != call["width"]:
        raise BadInput(f"the base draws {call['height']}×{call['width']}: give --size, views are square")
    return call


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
    origin: str = "",
    quiet: bool = False,
) -> int:
    """Every picture at one random step of the base, and about every fourth finished; returns how many files are new.

    A file that holds just these pictures, labelled as they are now and made in this way, is kept, so a run that was
    stopped goes on. `origin` names the base and its decoder.
    """
    wanted = members(corpus, split, policy)
    origin = hashlib.sha256(json.dumps([origin, call, pixels, tiny is not None], sort_keys=True).encode()).hexdigest()
    out.mkdir(parents=True, exist_ok=True)
    new = 0
    total = -(-len(wanted) // SHARD)
    for k, part in enumerate(track(shards(corpus, wanted), f"{name} {split}", total, disable=quiet)):
        path = out / f"{name}-{k:05d}-{split}.pt"
        if path.exists() and holds(path, part, wanted, policy, origin):
            continue
        some = [part[i : i + batch] for i in range(0, len(part), batch)]
        made = [views_of(examples, wanted, pipe, call, tiny, policy, pixels) for examples in some]
        store([replace(v, origin=origin) for v in made], path)
        new += 1
    for path in sorted(out.glob(f"{name}-*-{split}.pt"))[total:]:  # of a larger split, before it was built anew
        path.unlink()
    return new


def seed_of(key: str) -> int:
    return int(key[:15], 16)


def strength_of(row: dict[str, Any]) -> float:
    """How sure the labeler is of harm, as a view keeps it."""
    return float(np.float32(0.0 if row["label"] == SAFE else row.get("score", 1.0)))


def holds(path: Path, examples: Sequence[Example], wanted: dict[str, Any], policy: Policy, origin: str) -> bool:
    """Whether a file has exactly these pictures, labelled and described as they are now, made in this way."""
    kept = load_views(path, on_disk=True)
    if kept.strength is None or kept.names != policy.names or kept.origin != origin:
        return False
    columns = kept.seeds.tolist(), kept.category.tolist(), kept.strength.tolist(), kept.texts
    rows = [wanted[e.key] for e in examples]
    return set(zip(*columns, strict=True)) == {
        (seed_of(r["key"]), policy.names.index(r["label"]), strength_of(r), r["prompt"]) for r in rows
    }


def kept_apart(folder: Path) -> None:
    """Refuse a folder with one picture in two splits: a corpus was split anew, and some of its views are of before."""
    seen: dict[int, str] = {}
    for path in sorted(folder.glob("*.pt")):
        split, views = path.stem.rsplit("-", 1)[-1], load_views(path, on_disk=True)
        for seed in set(views.seeds.tolist()) if views.texts else ():
            if seen.setdefault(seed, split) != split:
                raise BadInput(
                    f"{path}: a picture in it is also in split {seen[seed]}; the corpus was split anew since, so run "
                    "`guardpaint data corpus-views` again for every base and split, or delete the old files"
                )


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
    few = [i for i, s in enumerate(seeds) if s % 4 == 0]
    plain = torch.tensor([seeds[i] // 4 % 2 == 0 for i in few], dtype=torch.bool)
    some = images[few], nowhere[few], category[few], [seeds[i] for i in few]
    done = [clean_pictures(pipe.vae, *some, plain, pipe._execution_device)] if few else []
    both = joined([unfinished, *done])
    own = [rows[s] for s in both.seeds.tolist()]
    return replace(
        both,
        images=as_bytes(resize(both.images.float() / 255, (pixels, pixels))),
        texts=tuple(r["prompt"] for r in own),
        strength=torch.tensor([strength_of(r) for r in own]),
        names=policy.names,
    )
