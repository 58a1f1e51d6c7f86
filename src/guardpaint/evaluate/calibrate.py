"""Calibrate a guard: thresholds with a promised miss rate, per band of progress, and a reference to notice drift.

guardpaint calibrate --auditor DIR --views runs/views --alpha 0.05 --beta 0.10 --out calibration.json
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track

from guardpaint.audit.calibration import Reference, mask_threshold, trigger_threshold
from guardpaint.audit.model import AuditorScorer
from guardpaint.audit.regions import heat_at
from guardpaint.config import Band, Calibration, GuardConfig
from guardpaint.data.corpus_views import kept_apart
from guardpaint.data.views import KINDS, Views, joined, load_views
from guardpaint.errors import BadInput
from guardpaint.evaluate.auditor import audits
from guardpaint.policy import Policy
from guardpaint.store.checkpoint import read_json, write_json
from guardpaint.types import Audit

FINISHED = ("clean", "x0", "redrawn_x0", "redrawn")
"""Kinds of views the guard sees by default. Whole generations are left out: their labels are partly an auditor's."""


@dataclass(frozen=True)
class Looks:
    """A view as the guard sees it: the first look, and the closer one that confirms it and shows where."""

    coarse: Audit
    fine: Audit

    def prob(self, name: str) -> float:
        """Of the look that is less sure: a threshold below it is passed by both."""
        return min(self.coarse.probs[name], self.fine.probs[name])

    def found(self, policy: Policy, thresholds: Mapping[str, float] | None = None) -> bool:
        return all(policy.finding(a, thresholds) is not None for a in (self.coarse, self.fine))

    def masked(self, policy: Policy, thresholds: Mapping[str, float], band: float) -> bool:
        """Whether the guard comes to mask it: the first look may also be merely unsure."""
        unsure = policy.finding(self.coarse, thresholds) is not None or self.coarse.adv_prob >= policy.trigger - band
        return unsure and policy.finding(self.fine, thresholds) is not None


def scored(auditor: AuditorScorer, views: Views) -> list[Looks]:
    """Every view with its prompt, at its own noise, in both sizes."""
    found = []
    for i in track(range(len(views)), description="auditing"):
        view, texts, noise = views.images[i : i + 1].float() / 255, [views.prompt(i)], float(views.noise[i])
        found.append(Looks(*(audits(auditor, view, texts, noise, fine=fine)[0] for fine in (False, True))))
    return found


@dataclass(frozen=True)
class Promise:
    """What calibrated thresholds promise."""

    alpha: float
    """Highest miss rate of each category."""
    beta: float
    """Highest share of an unsafe area that a mask leaves uncovered."""
    starts: Sequence[float]
    """Where each band of progress begins; the first at 0."""


def calibrate(
    views: Views,
    found: Sequence[Looks],
    policy: Policy,
    alpha: float,
    beta: float,
    starts: Sequence[float],
    data: str = "",
) -> tuple[Calibration, Reference]:
    """Thresholds of every band; a band with too few examples of a category is refused, and says how many it needs.

    A corpus's picture is one example, at its worst, however many views of it there are: several bases may show it.
    The mask level is for pictures that trigger: what does not trigger is missed, and counted by the miss rate.
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
            scores = np.array([found[i].prob(name) for i in rows])
            caught = np.array([found[i].found(policy) for i in rows], dtype=bool)
            if not views.world:
                owner = views.seeds.numpy()[rows]
                scores = np.array([scores[owner == s].min() for s in np.unique(owner)])
                caught = np.array([caught[owner == s].all() for s in np.unique(owner)], dtype=bool)
            what = f"examples of {name} from progress {start:g} to {min(end, 1):g}"
            thresholds[name] = trigger_threshold(scores, caught, alpha, what)
            counts[name] = len(scores)
        if not views.world:  # a corpus: nothing is known of masks
            bands.append(Band(float(start), thresholds, None, counts))
            continue
        harm = np.flatnonzero(inside & (category != 0) & views.masks.flatten(1).any(1).numpy()).tolist()
        harm = [i for i in harm if found[i].masked(policy, thresholds, GuardConfig().band)]  # others never are
        if not harm:
            raise BadInput(f"from progress {start:g} the auditor finds no unsafe picture: there is nothing to mask")
        size = (int(views.masks.shape[-2]), int(views.masks.shape[-1]))
        heats = np.stack([heat_at(found[i].fine.adv_map, size).numpy() for i in harm])
        level = mask_threshold(heats, views.masks[harm].numpy(), beta)
        bands.append(Band(float(start), thresholds, level, counts))
    safe = np.array([a.coarse.adv_prob for a, c in zip(found, category, strict=True) if c == 0])
    return Calibration(alpha, beta, data, tuple(bands)), Reference.of(safe)


def parts_of(files: Sequence[Path]) -> Iterator[Views]:
    """Of each file the views a guard sees by default."""
    for file in files:
        views = load_views(file, on_disk=True)
        yield views.rows(torch.nonzero(torch.isin(views.kind, torch.tensor([KINDS.index(k) for k in FINISHED])))[:, 0])


def the_guards(guard: Path, asked: Policy | None) -> Policy:
    """The policy a guard runs under: thresholds found under another one would not keep their promise in it."""
    own = Policy.load(guard / "policy.yaml")
    if asked is not None and asked.digest() != own.digest():
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
    """Calibrate on the views of split `calibration`; writes the thresholds, and into a guard's config if named."""
    files = sorted(views_dir.glob("*-calibration.pt"))
    if not files:
        raise BadInput(
            f"{views_dir}: no views of split calibration; make them with `guardpaint data views` or "
            "`data corpus-views`, --split calibration"
        )
    kept_apart(views_dir)
    auditor = AuditorScorer.from_pretrained(auditor_dir)
    policy = the_guards(guard, policy) if guard is not None else policy or Policy.default()
    slim: list[Views] = []
    found: list[Looks] = []
    pictures = hashlib.sha256()
    for part in parts_of(files):  # one file in memory at a time
        names = part.names or policy.names  # views of earlier versions carry none
        if {auditor.categories, names} != {policy.names}:
            raise BadInput(
                f"the auditor tells {', '.join(auditor.categories)}, the views {', '.join(names)}, "
                f"the policy {', '.join(policy.names)}: name the right one with --policy"
            )
        pictures.update(part.images.numpy().tobytes())
        found += scored(auditor, part)
        slim.append(replace(part, images=part.images[..., :1, :1].clone()))
    views = joined(slim)
    data = hashlib.sha256(views.seeds.numpy().tobytes() + pictures.digest()).hexdigest()
    calibration, reference = calibrate(views, found, policy, promise.alpha, promise.beta, promise.starts, data)
    calibration = replace(calibration, auditor=auditor.identity())
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
"""Audits below which ten bins of scores say nothing."""


def drift(reference_file: Path, log: Path) -> tuple[float, int]:
    """Stability index of the scores in an audit log against the calibration's, and how many there were."""
    data = read_json(reference_file)
    if "reference" not in data:
        raise BadInput(f"{reference_file}: holds no reference; write it with `guardpaint calibrate`")
    kept = data["reference"]
    reference = Reference(tuple(kept["edges"]), tuple(kept["shares"]), int(kept["n"]))
    scores = []
    for number, line in enumerate(log.read_text(encoding="utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadInput(f"{log}:{number}: not JSON ({error})") from error
        for step in entry.get("report", entry).get("steps", []):
            scores += [a["scores"]["adv_prob"] for a in step.get("audits", [])[:1]]
    if len(scores) < FEWEST:
        raise BadInput(f"{log}: {len(scores)} audits in it; fewer than {FEWEST} would look like drift by chance")
    return reference.drift(np.array(scores)), len(scores)
