"""Train the ranker on stored tournaments to order candidates by utility from their early features.

guardpaint train mini-ranker --set rollouts=runs/rollouts --out runs/mini-ranker
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from guardpaint.errors import BadInput
from guardpaint.repair.ranker import Ranker, RankerConfig
from guardpaint.store.seeds import derive
from guardpaint.train import proposer_loss as L
from guardpaint.train.engine import Run, finished, fit, load_config, write_card
from guardpaint.train.rollouts import read_rollouts


@dataclass(frozen=True)
class RankerTraining:
    """Layer sizes of the ranker."""

    hidden: tuple[int, int] = (64, 32)


def tables(rows: list[dict[str, Any]]) -> tuple[Float[Tensor, "b n f"], Float[Tensor, "b n"]]:
    """Early features and utilities of tournaments, which must all have the same size."""
    n = len(rows[0]["utility"])
    if any(len(r["utility"]) != n or len(r["early"]) != len(rows[0]["early"]) for r in rows):
        raise BadInput("the tournaments differ in size; play them all with the same --n")
    if not rows[0]["early"]:
        raise BadInput(
            "the tournaments have no early features; play them with a guard whose repairer can preview candidates"
        )
    early = torch.tensor([r["early"] for r in rows]).view(len(rows), n, -1)
    return early, torch.tensor([r["utility"] for r in rows])


def run(config_file: Path, rollouts: Path, out: Path, minutes: float | None, quiet: bool = False) -> None:
    """Train a ranker and save it with its card."""
    shape, config = load_config(config_file, RankerTraining)
    torch.set_num_threads(config.threads)
    early, utility = tables(read_rollouts(rollouts / "train"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = Ranker(RankerConfig(int(early.shape[-1]), tuple(shape.hidden)))

    def batches(step: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(derive(config.seed, "ranker", step))
        rows = torch.randint(len(early), (config.batch_size,), generator=g)
        return early[rows], utility[rows]

    def losses(net: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return L.ranker_loss(net(batch[0]), batch[1])

    this_run = Run(config_file, out, minutes, quiet)
    fitted = fit(model, batches, losses, config, this_run)
    assert isinstance(fitted, Ranker)
    note = finished(out, config)
    if note is None:
        return
    fitted.save_pretrained(out / "model", torch.float16)
    command = this_run.command("ranker", rollouts=rollouts)
    write_card(out, command, note, tournaments=len(early), parameters=sum(p.numel() for p in fitted.parameters()))
    print(f"saved to {out / 'model'}")
