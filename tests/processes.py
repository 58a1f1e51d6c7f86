"""One of two processes that hold half a batch each: `python processes.py RANK FOLDER` writes its means to FOLDER."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from guardpaint.train import alignment_loss as L
from guardpaint.train.alignment_batch import over_processes

GAINS = torch.tensor([0.2, -0.5, 0.0, 0.1, 0.4, -0.1, 0.2, 0.05])
DESIRED = torch.tensor([True, False] * 4)


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
    main(int(sys.argv[1]), Path(sys.argv[2]))
