"""Run one training step of each alignment stage at full SD-1.5-inpainting size, on the CPU with random weights.

    python bench/align.py        (adds its rows to docs/results/inpainter.json)

Each stage runs in its own process, so that peak resident memory is measured per stage. The rows also hold the estimate
that `guardpaint train` prints before it starts.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from diffusers import UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

from guardpaint.draft.schedule import sd_scheduler
from guardpaint.evaluate.inpainter import FULLSIZE, metrics
from guardpaint.policy import Policy
from guardpaint.store.results import REVISION, read_rows, require_clean, write_results
from guardpaint.train.aligner import Aligner
from guardpaint.train.alignment_batch import AlignmentBatch
from guardpaint.train.alignment_config import METHODS, AlignConfig
from guardpaint.train.engine import TrainConfig
from guardpaint.train.memory import estimate

BATCH = 2


def one_step(method: str, pixels: int) -> dict[str, float | str]:
    """Build the model, take one step on a safe and an unsafe row, and return its time and memory."""
    torch.manual_seed(0)
    unet = UNet2DConditionModel(sample_size=64, in_channels=9, cross_attention_dim=768)
    text = CLIPTextModel(CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12,
                                        num_attention_heads=12, projection_dim=768))  # fmt: skip
    shape = AlignConfig(method=method, rank=64 if method == "sft" else 128, checkpointing=True, unroll_every=1)
    shape = shape.under(Policy.default())
    side = pixels // 8
    train = TrainConfig(steps=1, batch_size=BATCH, learning_rate=1e-4)
    guess = estimate(unet, shape, train, (4, side, side), text.config)
    model = Aligner(unet.requires_grad_(False), text, sd_scheduler().alphas_cumprod, shape, 0).train()
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-4, fused=True)
    z = torch.randn(BATCH, 4, side, side)
    mask = torch.zeros(BATCH, 1, side, side)
    mask[..., side // 4 : -side // 4, side // 4 : -side // 4] = 1
    category = torch.tensor([0, 1]) if method != "sft" else torch.tensor([1, 2])
    batch = AlignmentBatch(z, mask, z * (1 - mask), torch.randint(0, 40000, (BATCH, 77)), category,
                  torch.tensor([300, 600]), torch.randn_like(z), torch.randn_like(z))  # fmt: skip
    began = time.perf_counter()
    for part in model(batch):
        part["loss"].backward()
    optimiser.step()
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "method": method,
        "seconds": seconds,
        "batch": BATCH,
        "peak_gb": peak,
        "estimate_gb": guess.total / 2**30,
        "lora": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results/inpainter.json"))
    parser.add_argument("--pixels", type=int, default=512)
    parser.add_argument("--stage", choices=METHODS)
    args = parser.parse_args()
    if args.stage:
        print(json.dumps(one_step(args.stage, args.pixels)))
        return
    require_clean(args.out)
    rows = []
    for method in METHODS:
        command = [sys.executable, __file__, "--stage", method, "--pixels", str(args.pixels)]
        process = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append(json.loads(process.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    kept = [r for r in read_rows(args.out) if r["part"] != FULLSIZE]
    kept += [{"part": FULLSIZE, "git": REVISION, **r} for r in rows]
    write_results(args.out, metrics(kept), kept, seed=0)


if __name__ == "__main__":
    main()
