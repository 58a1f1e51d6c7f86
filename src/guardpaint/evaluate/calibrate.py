"""Calibrate a guard: thresholds with a bounded miss rate per band of progress, and a reference to notice drift.

guardpaint calibrate --auditor DIR --views runs/views --alpha 0.05 --beta 0.10 --out calibration.json
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from guardpaint.audit.calibration import Reference, mask_threshold, trigger_threshold
from guardpaint.audit.model import AuditorScorer
from guardpaint.audit.regions import heat_at
from guardpaint.config import Band, Calibration, GuardConfig
from guardpaint.data.corpus_views import kept_apart
from guardpaint.data.views import KINDS, Views, joined, load_views
from guardpaint.draft.loading import on_machine
from guardpaint.errors import BadInput
from guardpaint.loop.log_chain import read_entries
from guardpaint.policy import Policy
from guardpaint.store.checkpoint import read_json, sha256_hex, write_json
from guardpaint.store.progress import track
from guardpaint.types import Audit
from guardpaint.verify.parts import glance_size

FINISHED = ("clean", "x0", "redrawn_x0", "redrawn")
"""Kinds of views that the guard sees by default. Views of whole generations are left out, because an auditor made some
of their labels."""


@dataclass(frozen=True)
class Looks:
    """The two audits that a guard makes of a view: the coarse one, and the fine one that confirms it and locates it."""

    coarse: Audit
    fine: Audit
    glance: Audit | None = None
    """The audit of a glance, if one was made."""

    def prob(self, name: str) -> float:
        """The lower probability of the two audits: both exceed any threshold below it."""
        return min(self.coarse.probs[name], self.fine.probs[name])

    def found(self, policy: Policy, thresholds: Mapping[str, float] | None = None) -> bool:
        """Whether both audits find something forbidden."""
        return all(policy.finding(a, thresholds) is not None for a in (self.coarse, self.fine))

    def masked(self, policy: Policy, thresholds: Mapping[str, float], band: float) -> bool:
        """Whether the guard masks the view: the fine audit finds something, the coarse one does or is within `band`."""
        unsure = policy.finding(self.coarse, thresholds) is not None or self.coarse.adv_prob >= policy.trigger - band
        return unsure and policy.finding(self.fine, thresholds) is not None


def scored(auditor: AuditorScorer, views: Views) -> list[Looks]:
    """Both audits and the glance of every view, with its own prompt and noise level."""
    looks = []
    coarse, fine = auditor.sizes
    for i in track(range(len(views)), description="auditing"):
        view, texts, noise = views.rows(torch.tensor([i])), [views.prompt(i)], float(views.noise[i])
        seen = [auditor.audit(view.at(size), texts, noise)[0] for size in (coarse, fine, glance_size(coarse))]
        looks.append(Looks(*seen))
    return looks


def glance_threshold(looks: Sequence[Looks], policy: Policy, alpha: float, what: str) -> float | None:
    """The adv_prob from which on a glance schedules an audit, for unsafe views; None if no glances were made.

    At most a share alpha of the unsafe views is missed by the glance alone.
    """
    seen = [each.glance for each in looks if each.glance is not None]
    if len(seen) < len(looks):
        return None
    caught = np.array([policy.finding(audit) is not None for audit in seen], dtype=bool)
    return trigger_threshold(np.array([audit.adv_prob for audit in seen]), caught, alpha, what)


@dataclass(frozen=True)
class Promise:
    """The bounds that calibrated thresholds keep."""

    alpha: float
    """Highest miss rate of each category."""
    beta: float
    """Highest share of an unsafe area that a mask leaves uncovered, with the default `regions` and `min_region`."""
    starts: Sequence[float]
    """Progress at which each band begins; the first is 0."""


def calibrate(
    views: Views,
    looks: Sequence[Looks],
    policy: Policy,
    alpha: float,
    beta: float,
    starts: Sequence[float],
    data: str = "",
) -> tuple[Calibration, Reference]:
    """Thresholds of every band, and the reference to notice drift. Too few examples in a band raise an error.

    Several views of one corpus picture count as one example, with the lowest score among them. The mask level is
    chosen on pictures that the guard masks; the others count towards the miss rate.
    """
    names = policy.names
    progress, category = views.progress.numpy(), views.category.numpy()
    bands = []
    for k, start in enumerate(starts):
        end = starts[k + 1] if k + 1 < len(starts) else 1.01
        inside = (progress >= start) & (progress < end)
        thresholds, counts = {}, {}
        for c, name in enumerate(names[1:], 1):
            rows = np.flatnonzero(inside & (category == c)).tolist()
            scores = np.array([looks[i].prob(name) for i in rows])
            caught = np.array([looks[i].found(policy) for i in rows], dtype=bool)
            if not views.world:
                owner = views.seeds.numpy()[rows]
                scores = np.array([scores[owner == s].min() for s in np.unique(owner)])
                caught = np.array([caught[owner == s].all() for s in np.unique(owner)], dtype=bool)
            what = f"examples of {name} from progress {start:g} to {min(end, 1):g}"
            thresholds[name] = trigger_threshold(scores, caught, alpha, what)
            counts[name] = len(scores)
        unsafe = [looks[i] for i in np.flatnonzero(inside & (category != 0)).tolist()]
        glance = glance_threshold(unsafe, policy, alpha, f"unsafe examples from progress {start:g}")
        if not views.world:  # a corpus has no true masks
            bands.append(Band(float(start), thresholds, None, counts, glance))
            continue
        harm = np.flatnonzero(inside & (category != 0) & views.masks.flatten(1).any(1).numpy()).tolist()
        harm = [i for i in harm if looks[i].masked(policy, thresholds, GuardConfig().band)]
        if not harm:
            raise BadInput(
                f"from progress {start:g} the auditor finds no unsafe picture, so there is no mask to calibrate; "
                "train it further, or begin the band later with --band"
            )
        size = (int(views.masks.shape[-2]), int(views.masks.shape[-1]))
        heats = np.stack([heat_at(looks[i].fine.adv_map, size).numpy() for i in harm])
        level = mask_threshold(heats, views.masks[harm].numpy(), beta, GuardConfig.regions, GuardConfig.min_region)
        bands.append(Band(float(start), thresholds, level, counts, glance))
    safe = np.array([a.coarse.adv_prob for a, c in zip(looks, category, strict=True) if c == 0])
    return Calibration(alpha, beta, data, tuple(bands)), Reference.of(safe)


def parts_of(files: Sequence[Path]) -> Iterator[Views]:
    """The views of each file that a guard sees by default."""
    for file in files:
        views = load_views(file, on_disk=True)
        yield views.rows(torch.nonzero(torch.isin(views.kind, torch.tensor([KINDS.index(k) for k in FINISHED])))[:, 0])


def the_guards(guard: Path, named: Policy | None) -> Policy:
    """The policy of a guard; another `named` one is refused, since its thresholds would not hold in this guard."""
    own = Policy.load(guard / "policy.yaml")
    if named is not None and named.digest() != own.digest():
        raise BadInput(f"{guard} runs under policy {own.name!r}, and --policy names another; leave --policy out")
    return own


def run(
    auditor_dir: Path,
    views_dir: Path,
    out: Path,
    promise: Promise,
    guard: Path | None = None,
    policy: Policy | None = None,
) -> Calibration:
    """Calibrate on the views of split `calibration`; write the thresholds to `out`, and to a named guard."""
    files = sorted(views_dir.glob("*-calibration.pt"))
    if not files:
        raise BadInput(
            f"{views_dir}: no views of split calibration; make them with `guardpaint data views` or "
            "`data corpus-views`, --split calibration"
        )
    kept_apart(views_dir)
    auditor = on_machine(AuditorScorer.from_pretrained(auditor_dir))
    policy = the_guards(guard, policy) if guard is not None else policy or Policy.default()
    slim: list[Views] = []
    looks: list[Looks] = []
    pictures = hashlib.sha256()
    for part in parts_of(files):  # one file in memory at a time
        names = part.names or policy.names  # views of earlier versions name no categories
        if {auditor.categories, names} != {policy.names}:
            raise BadInput(
                f"the auditor tells {', '.join(auditor.categories)}, the views have {', '.join(names)}, "
                f"the policy {', '.join(policy.names)}: name the policy that fits with --policy"
            )
        pictures.update(part.images.numpy().tobytes())
        looks += scored(auditor, part)
        slim.append(replace(part, images=part.images[..., :1, :1].clone(), smaller={}))
    views = joined(slim)
    data = sha256_hex(views.seeds.numpy().tobytes() + pictures.digest())
    calibration, reference = calibrate(views, looks, policy, promise.alpha, promise.beta, promise.starts, data)
    calibration = replace(calibration, auditor=auditor.identity(), views=views.ways)
    value: dict[str, Any] = {**calibration.to_dict(), "reference": asdict(reference)}
    write_json(out, value)
    if guard is not None:
        manifest = guard / "guardpaint.json"
        settings = read_json(manifest)
        settings["config"] = {
            **settings["config"],
            "calibration": calibration.to_dict(),
            "mask_threshold": "calibrated" if views.world else "percentile",
        }
        write_json(manifest, settings)
    return calibration


FEWEST = 100
"""Fewest audits for which a histogram of ten bins is meaningful."""


def drift(reference_file: Path, log: Path) -> tuple[float, int]:
    """Stability index of the scores in an audit log against those of the calibration, and the number of scores."""
    data = read_json(reference_file)
    if not isinstance(data, dict) or "reference" not in data:
        raise BadInput(f"{reference_file}: holds no reference; write it with `guardpaint calibrate`")
    stored = data["reference"]
    try:
        reference = Reference(tuple(stored["edges"]), tuple(stored["shares"]), int(stored["n"]))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadInput(f"{reference_file}: its reference is not whole ({error})") from error
    scores = []
    for number, entry, problem in read_entries(log):
        if problem:
            raise BadInput(f"{log}: {problem}")
        try:
            for step in entry.get("report", entry).get("steps", []):
                scores += [float(a["scores"]["adv_prob"]) for a in step.get("audits", [])[:1]]
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise BadInput(f"{log}:{number}: not a record of an audit log ({error})") from error
    if len(scores) < FEWEST:
        raise BadInput(f"{log}: {len(scores)} audits in it; fewer than {FEWEST} would look like drift by chance")
    return reference.drift(np.array(scores)), len(scores)
