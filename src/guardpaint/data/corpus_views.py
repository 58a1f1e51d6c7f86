"""Views of a labelled corpus: what an auditor sees while a base draws pictures like these.

guardpaint data corpus-views corpora/real --base DIR --split train --out views/real

A corpus does not say where in a picture the harm is, so losses on maps leave its unsafe pictures out.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Sequence
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
from guardpaint.draft.codec import resize
from guardpaint.draft.families import family_of
from guardpaint.errors import BadInput
from guardpaint.policy import Policy
from guardpaint.store.checkpoint import sha256_hex
from guardpaint.store.images import as_pixels
from guardpaint.store.progress import track
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
    """How the base is called: by these options, else by its own settings (`own`), else by the pipeline's defaults."""
    options = {"num_inference_steps": steps, "guidance_scale": guidance, "height": size, "width": size}
    call = {**own, **{k: v for k, v in options.items() if v is not None}}
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


@dataclass(frozen=True)
class ViewPlan:
    """How a corpus is viewed: through which base, and how large."""

    base: ViewedBase
    name: str
    """Of the base, in file names."""
    pixels: int = 384
    """Size of a view: the auditor's larger one."""
    batch: int = 8
    origin: str = ""
    """Names the base and its decoder."""

    def digest(self) -> str:
        """Hash of everything that decides the views of a picture."""
        values = [self.origin, self.base.call, self.pixels, self.base.tiny is not None]
        return sha256_hex(json.dumps(values, sort_keys=True))


def make(corpus: Corpus, plan: ViewPlan, out: Path, split: str, policy: Policy, quiet: bool = False) -> int:
    """Every picture at one random step of the base, and about every fourth finished; returns how many files are new.

    A file is kept if it holds just these pictures, labelled as they are now and made in this way, so a run that was
    stopped goes on where it was.
    """
    wanted = members(corpus, split, policy)
    origin = plan.digest()
    out.mkdir(parents=True, exist_ok=True)
    new = 0
    total = -(-len(wanted) // SHARD)
    for k, part in enumerate(track(shards(corpus, wanted), f"{plan.name} {split}", total, quiet)):
        path = out / f"{plan.name}-{k:05d}-{split}.pt"
        if path.exists() and holds(path, part, wanted, policy, origin):
            continue
        some = [part[i : i + plan.batch] for i in range(0, len(part), plan.batch)]
        parts = [views_of(examples, wanted, plan, policy) for examples in some]
        store([replace(v, origin=origin) for v in parts], path)
        new += 1
    for path in sorted(out.glob(f"{plan.name}-*-{split}.pt"))[total:]:  # of a larger split, before it was built anew
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
        for seed in () if views.world else set(views.seeds.tolist()):
            if seen.setdefault(seed, split) != split:
                raise BadInput(
                    f"{path}: a picture in it is also in split {seen[seed]}; the corpus was split anew since, so run "
                    "`guardpaint data corpus-views` again for every base and split, or delete the old files"
                )


@torch.no_grad()
def views_of(examples: Sequence[Example], wanted: dict[str, Any], plan: ViewPlan, policy: Policy) -> Views:
    """One batch: unfinished views of all, finished ones of some."""
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
    few = [i for i, s in enumerate(seeds) if s % 4 == 0]
    if few:
        plain = torch.tensor([seeds[i] // 4 % 2 == 0 for i in few], dtype=torch.bool)
        parts.append(clean_pictures(plan.base.pipe.vae, pictures.rows(few), plain, plan.base.device))
    both = joined(parts)
    return replace(
        both,
        images=as_bytes(resize(both.images.float() / 255, (plan.pixels, plan.pixels))),
        strength=torch.tensor([strength_of(rows[s]) for s in both.seeds.tolist()]),
    )
