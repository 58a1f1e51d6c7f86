"""Auditors as judges: open_nsfw, and any image classifier of transformers.

A judge must not be the auditor of the guard that it judges; an evaluation says so if it is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from PIL import Image

from guardpaint.audit.classifier import ClassifierAuditor
from guardpaint.audit.levels import audit_scores
from guardpaint.data.judges.opinion import Explained, Opinion, named_by, worst_harm
from guardpaint.draft.loading import on_machine
from guardpaint.errors import BadConfig
from guardpaint.policy import Policy
from guardpaint.store.images import from_pil
from guardpaint.types import SAFE


@dataclass
class AuditorJudge(Explained):
    """Any auditor as a judge: its levels say from which score on a category is present."""

    auditor: Any
    policy: Policy
    spec: str = ""
    attributes: bool = False

    @property
    def identity(self) -> str:
        return json.dumps(["auditor", self.auditor.kind, self.auditor.digest(), list(self.policy.names)])

    def opinion(self, image: Image.Image) -> Opinion:
        audit = self.auditor.audit(from_pil(image)[None], [None], 0.0)[0]
        scores = audit_scores(audit)
        harms = {c: s for c, s in scores.items() if c != SAFE}
        named: dict[str, float] = {}
        for category, score in harms.items():
            name = named_by(self.policy, category)
            named[name] = max(score, named.get(name, 0.0))
        return worst_harm(named, 0.5, json.dumps({c: round(s, 6) for c, s in harms.items()}))


def open_nsfw_judge(where: str, policy: Policy) -> AuditorJudge:
    """open_nsfw with the weights of its package; it sees nudity only."""
    from guardpaint.audit.open_nsfw import OnnxAuditor

    if where:
        raise BadConfig(f"judge 'open_nsfw:{where}': write open_nsfw alone; its weights come with the extra `nsfw`")
    return AuditorJudge(OnnxAuditor(), policy, "open_nsfw")


def open_classifier(where: str, policy: Policy) -> AuditorJudge:
    """An image classifier, as in FOLDER#nsfw=nudity,normal=safe; a folder with a card needs no labels."""
    folder, _, text = where.partition("#")
    pairs = [p.partition("=") for p in text.split(",")] if text else []
    if not all(label and category for label, _, category in pairs):
        raise BadConfig(f"judge 'classifier:{where}': write classifier:FOLDER#LABEL=CATEGORY,LABEL=safe")
    labels: dict[str, Any] = (
        {"labels": {label.strip(): category.strip() for label, _, category in pairs}} if pairs else {}
    )
    return AuditorJudge(on_machine(ClassifierAuditor.from_pretrained(folder, **labels)), policy, f"classifier:{where}")
