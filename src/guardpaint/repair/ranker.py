"""The ranker (the paper's "judge"): from a cheap preview, which candidates are worth painting out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from guardpaint.repair.knobs import normalise
from guardpaint.store.checkpoint import fingerprint, loaded, read_shape, save_module
from guardpaint.types import Audit, JsonDict, Knobs

FEATURES = 16
"""Five scores of the preview, five changes against the control, five knobs, coverage; progress is the seventeenth."""


def scores(audit: Audit) -> list[float]:
    assert audit.quality is not None and audit.suppression is not None  # a guard with a ranker has all scores
    return [audit.safety, audit.faithfulness or 0.0, audit.quality, audit.suppression, 1 - audit.adv_prob]


def features(
    previews: Sequence[Audit], control: Audit, knobs: Sequence[Knobs], coverage: float, progress: float
) -> Float[Tensor, "n f"]:
    """Early features of every candidate."""
    before = scores(control)
    rows = []
    for audit, k in zip(previews, knobs, strict=True):
        now = scores(audit)
        change = [a - b for a, b in zip(now, before, strict=True)]
        rows.append([*now, *change, *normalise(k).tolist(), coverage, progress])
    return torch.tensor(rows)


@dataclass(frozen=True)
class RankerConfig:
    features: int = FEATURES + 1
    hidden: tuple[int, int] = (64, 32)


class Ranker(nn.Module):
    """A small network that predicts from the early features of a candidate how good it will be."""

    kind: ClassVar[str] = "ranker"

    def __init__(self, config: RankerConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or RankerConfig()
        a, b = config.hidden
        self.net = nn.Sequential(
            nn.Linear(config.features, a), nn.LayerNorm(a), nn.SiLU(), nn.Linear(a, b), nn.SiLU(), nn.Linear(b, 1)
        )

    def forward(self, x: Float[Tensor, "*n f"]) -> Float[Tensor, "*n"]:
        return self.net(x)[..., 0]

    @torch.no_grad()
    def rank(self, x: Float[Tensor, "n f"]) -> Float[Tensor, " n"]:
        """Scores on the CPU."""
        return self(x.to(self.net[0].weight)).cpu()  # type: ignore[arg-type]

    def options(self) -> JsonDict:
        return {}

    def digest(self) -> str:
        return fingerprint(self)

    def save_pretrained(self, directory: str | Path, dtype: torch.dtype | None = None) -> None:
        save_module(self, {"kind": "Ranker", **asdict(self.config)}, Path(directory), dtype)

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> Ranker:
        directory = Path(directory)
        shape = read_shape(directory, "Ranker")
        return loaded(lambda: cls(RankerConfig(**shape)), directory).eval()
