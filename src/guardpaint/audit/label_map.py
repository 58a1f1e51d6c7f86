"""Which policy category each label of a classifier means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from guardpaint.errors import BadConfig
from guardpaint.types import SAFE

SOFTMAX, SIGMOID = "softmax", "sigmoid"
HEADS = {None: SOFTMAX, "single_label_classification": SOFTMAX, "multi_label_classification": SIGMOID}


def head_of(problem_type: str | None, labels: int) -> str:
    """Whether a head's probabilities exclude each other; a head with a single label is a yes or a no."""
    if problem_type not in HEADS:
        raise BadConfig(f"problem_type={problem_type!r}: a classifier's head is one of {[k for k in HEADS if k]}")
    return SIGMOID if labels == 1 else HEADS[problem_type]


@dataclass(frozen=True)
class LabelMap:
    """A model's labels, in its own order, as members of policy categories."""

    categories: tuple[str, ...]
    """`safe` and the harms, in the order in which the map names them."""
    members: Float[Tensor, "labels harms"]
    """1 where a label feeds a harm."""
    head: str

    @classmethod
    def of(cls, names: Sequence[str], labels: Mapping[str, str], head: str, wanted: Sequence[str] = ()) -> LabelMap:
        """The map of a model with these label names. Every label must be named, as `safe` if it is harmless."""
        unknown, unnamed = [n for n in labels if n not in names], [n for n in names if n not in labels]
        if unknown:
            raise BadConfig(f"labels {', '.join(unknown)}: the model knows {', '.join(names)}")
        if unnamed:
            raise BadConfig(f"labels: {', '.join(unnamed)} have no category; name one, or {SAFE!r} if harmless")
        harms = [c for c in dict.fromkeys(labels.values()) if c != SAFE]
        missed = [c for c in wanted if c not in (SAFE, *harms)]
        if missed or not harms:
            raise BadConfig(f"labels: none feeds {', '.join(missed) or 'a harm'}; the model knows {', '.join(names)}")
        if head == SOFTMAX and SAFE not in labels.values():
            raise BadConfig(f"labels: none is {SAFE!r}, and with a softmax head some harm would always be likely")
        members = torch.tensor([[float(labels[n] == c) for c in harms] for n in names])
        return cls((SAFE, *harms), members, head)

    def scores(self, logits: Float[Tensor, "*n labels"]) -> Float[Tensor, "*n harms"]:
        """The raw score of every harm: the sum of its labels' probabilities, at most 1."""
        probabilities = logits.softmax(-1) if self.head == SOFTMAX else logits.sigmoid()
        return (probabilities @ self.members.to(logits.device)).clamp(max=1)

    def log_odds(self, logits: Float[Tensor, "n labels"]) -> Float[Tensor, "n harms"]:
        """How strongly the logits speak for every harm, against the other labels if they exclude each other."""
        member = self.members.to(logits.device).bool()
        inside = torch.where(member, logits[..., None], -torch.inf).logsumexp(1)
        if self.head == SIGMOID:
            return inside
        return inside - torch.where(member, -torch.inf, logits[..., None]).logsumexp(1)
