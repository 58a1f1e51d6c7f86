"""One of two processes that hold half a batch each.

python processes.py RANK FOLDER                     writes its means to FOLDER
torchrun … processes.py fit FOLDER                  trains a line on losses in two parts, and writes its weights
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

from guardpaint.train import alignment_loss as L
from guardpaint.train.alignment_batch import over_processes
from guardpaint.train.engine import Run, TrainConfig, fit, processes

GAINS = torch.tensor([0.2, -0.5, 0.0, 0.1, 0.4, -0.1, 0.2, 0.05])
DESIRED = torch.tensor([True, False] * 4)


class Line(nn.Module):
    """One weight matrix, whose losses come in two parts with different gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(3, 2, bias=False)
        nn.init.constant_(self.map.weight, 0.5)

    def forward(self, x):
        yield {"loss": 0.5 * (self.map(x) - x[:, :2]).square().mean()}
        yield {"loss": 0.5 * (self.map(x * x) + 1).square().mean()}


def trained(folder: Path, halves: int) -> nn.Module:
    """The line after four steps; `halves` is 2 for a process that draws half of every batch."""

    def batches(index: int) -> torch.Tensor:
        step, half = divmod(index, halves)
        whole = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        return whole.chunk(halves)[half]

    config = TrainConfig(steps=4, batch_size=8 // halves, learning_rate=0.05, warmup=1, ema=0.0)
    return fit(Line(), batches, lambda net, x: net(x), config, Run(Path("none.yaml"), folder, quiet=True))


def train(folder: Path) -> None:
    state = processes()
    line = trained(folder / "two", state.num_processes)
    torch.save((state.num_processes, line.state_dict()), folder / f"{state.process_index}.pt")


def main(rank: int, folder: Path) -> None:
    meeting = f"file://{folder / 'meeting'}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    gain, desired = GAINS.chunk(2)[rank], DESIRED.chunk(2)[rank]
    means = L.batch_means(gain, gain.abs(), desired, over_processes)
    capped = L.capped(gain, desired, means.unsafe)
    found = {"safe": float(means.safe), "unsafe": float(means.unsafe), "identity": float(means.identity)}
    (folder / f"{rank}.json").write_text(json.dumps({**found, "capped": capped.tolist()}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "fit":
        train(Path(sys.argv[2]))
    else:
        main(int(sys.argv[1]), Path(sys.argv[2]))
