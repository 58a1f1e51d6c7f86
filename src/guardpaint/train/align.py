"""Align an inpainter with the policy: refusal SFT, then BCO (or KTO) with the model it starts from as reference.

guardpaint train mini-inpaint-safe --set pairs=runs/pairs --out runs/mini-inpaint-safe
guardpaint train sd15-inpaint-safe --set inpainter=DIR --set pairs=runs/pairs --out runs/sd15-inpaint-safe

Only LoRA weights are trained. A finished run holds the merged pipeline (`model/`) and the LoRA alone (`lora/`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from guardpaint.bases import load_inpainter
from guardpaint.errors import BadConfig
from guardpaint.policy import Policy
from guardpaint.store.checkpoint import write_json
from guardpaint.train import alignment_loss as L
from guardpaint.train import dynamics
from guardpaint.train.aligner import AlignConfig, Aligner, AlignmentBatch
from guardpaint.train.alignment_watch import AlignmentWatch
from guardpaint.train.engine import Run, TrainConfig, finished, fit, load_config, write_card
from guardpaint.train.latents import tokenise
from guardpaint.train.memory import estimate, report
from guardpaint.train.pair_latents import PairLatents, load_pairs


def draw(pairs: PairLatents, count: int, pick: Bool[Tensor, " n"], g: torch.Generator) -> Int[Tensor, " k"]:
    """`count` random rows among those that `pick` selects, with replacement."""
    rows = pick.nonzero().flatten()
    if count and not len(rows):
        raise BadConfig("the mixture has a category without pairs; make some with `guardpaint data pairs`")
    return rows[torch.randint(len(rows), (count,), generator=g)] if count else rows[:0]


def batch_of(
    pairs: PairLatents, step: int, config: AlignConfig, train: TrainConfig, empty: Int[Tensor, " l"]
) -> AlignmentBatch:
    """The batch of a step; it depends on (seed, step) alone."""
    g = torch.Generator().manual_seed(train.seed * 1_000_003 + step)
    unsafe = pairs.category > 0
    if config.method == "sft":
        rows = draw(pairs, train.batch_size, unsafe, g)
        z0, category = pairs.target[rows], pairs.category[rows]
    else:
        scale = train.batch_size / sum(config.mixture)
        counts = [round(c * scale) for c in config.mixture]
        repaired = round(counts[0] * config.target_share)
        kinds = [(repaired, unsafe), (counts[0] - repaired, ~unsafe)]
        kinds += [(c, pairs.category == k) for k, c in enumerate(counts[1:], 1)]
        drawn = [draw(pairs, c, pick, g) for c, pick in kinds]
        rows = torch.cat(drawn)
        safe = torch.arange(len(rows)) < counts[0]
        z0 = torch.where(safe.view(-1, 1, 1, 1), pairs.target[rows], pairs.source[rows])
        category = torch.where(safe, 0, pairs.category[rows])
    n = len(rows)
    t = (1000 * (torch.randperm(n, generator=g) + torch.rand(n, generator=g)) / n).long().clamp(max=999)
    eps = torch.randn(z0.shape, generator=g)
    if config.method == "sft":
        eps = L.offset_noise(eps, torch.randn((n, z0.shape[1], 1, 1), generator=g))
    ids = pairs.ids[rows].clone()
    ids[torch.rand(n, generator=g) < config.dropout] = empty
    again = torch.randn(z0.shape, generator=g)
    return AlignmentBatch(z0, pairs.mask[rows], pairs.masked[rows], ids, category, t, eps, again)


def run(run: Run, method: str, inpainter: str, pairs_dir: Path) -> None:
    """Train one stage; save the merged pipeline, the LoRA and plots of the training dynamics."""
    shape, config = load_config(run.config_file, AlignConfig)
    if shape.method != method:
        raise BadConfig(
            f"{run.config_file}: its method is {shape.method}, not {method}; train it as stage {shape.method}"
        )
    out = run.out
    torch.set_num_threads(config.threads)
    pipe = load_inpainter(inpainter)
    policy = Policy.default()
    train, held_out = (load_pairs(pairs_dir, split, pipe.vae) for split in ("train", "validation"))
    alphas = pipe.scheduler.alphas_cumprod
    print(report(estimate(pipe.unet, shape, config, tuple(train.source.shape[1:]), pipe.text_encoder.config)))
    model = Aligner(pipe.unet, pipe.text_encoder, alphas, shape, config.seed, config.accumulate)
    empty = tokenise(pipe.tokenizer, [""])[0]
    watch = AlignmentWatch(held_out, empty, shape, policy.names, out)
    before = dynamics.activations(model, held_out, policy.names)

    def batches(step: int) -> AlignmentBatch:
        return batch_of(train, step, shape, config, empty)

    def losses(net: nn.Module, batch: AlignmentBatch) -> Iterator[dict[str, Tensor]]:
        return net(batch)

    fitted = fit(model, batches, losses, config, run, validate=watch)
    assert isinstance(fitted, Aligner)
    dynamics.plot(out / "loss.csv", out, method)
    note = finished(out, config)
    if note is None:
        return
    dynamics.scatter(before, dynamics.activations(fitted, held_out, policy.names), policy.names, out)
    lora = sum(v.numel() for k, v in fitted.kept_state().items() if "lora_" in k)
    command = run.command(method, inpainter=inpainter, pairs=pairs_dir)
    fitted.unet.save_pretrained(out / "lora")
    write_json(out / "lora" / "card.json", {"command": command, "rank": shape.rank})
    pipe.unet = fitted.unet.merge_and_unload()
    pipe.to(torch.float16).save_pretrained(out / "model")
    write_card(out, command, note, method=asdict(shape), parameters={"lora": lora}, alarms=watch.alarms())
    print(f"saved to {out / 'model'}; alarms: {', '.join(watch.alarms()) or 'none'}")
