"""Align an inpainter with the policy: refusal SFT, then BCO (or KTO) with the model it starts from as reference.

guardpaint train mini-inpaint-safe --set pairs=runs/pairs --out runs/mini-inpaint-safe
guardpaint train sd15-inpaint-safe --set inpainter=DIR --set pairs=runs/pairs --out runs/sd15-inpaint-safe

Only LoRA weights are trained. Categories, class weights and the mixture of a batch come from the policy that the pairs
were encoded with. A finished run holds the merged pipeline (`model/`) and the LoRA alone (`lora/`); the figures
dynamics.png and activations.png are drawn at every checkpoint and at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from guardpaint.bases import load_inpainter
from guardpaint.errors import BadConfig, BadInput
from guardpaint.policy import Policy
from guardpaint.store.checkpoint import write_json
from guardpaint.train import alignment_loss as L
from guardpaint.train import dynamics, noise_seeds
from guardpaint.train.aligner import Aligner
from guardpaint.train.alignment_batch import AlignmentBatch
from guardpaint.train.alignment_config import AlignConfig, shares
from guardpaint.train.alignment_watch import AlignmentWatch
from guardpaint.train.engine import LOG, Run, TrainConfig, finished, fit, load_config, processes, write_card
from guardpaint.train.latents import tokenise
from guardpaint.train.memory import estimate, report
from guardpaint.train.pair_latents import PairLatents, leaked, load_pairs, policy_of


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
    g = torch.Generator().manual_seed(noise_seeds.training(train.seed, step))
    unsafe = pairs.category > 0
    if config.method == "sft":
        rows = draw(pairs, train.batch_size, unsafe, g)
        z0, category = pairs.target[rows], pairs.category[rows]
    else:
        counts = shares(config.mixture, train.batch_size, step)
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


def chosen_policy(pairs_dir: Path, given: Policy | None) -> Policy:
    """The policy that the pairs were encoded with, or the given one, which may differ in its weights alone."""
    encoded = policy_of(pairs_dir)
    if given is not None and given.names != encoded.names:
        raise BadConfig(
            f"policy {given.name!r} has the categories {', '.join(given.names)}, but {pairs_dir} was encoded with "
            f"{', '.join(encoded.names)}; run `guardpaint data latents` again with --policy"
        )
    return given or encoded


def check_categories(pairs: PairLatents, config: AlignConfig, names: tuple[str, ...], where: Path) -> None:
    """Raise BadInput if a category that batches draw from has no training pairs."""
    present = [bool((pairs.category == k).any()) for k in range(len(names))]
    lacking = [n for n, has, share in zip(names, present, config.mixture, strict=True) if share and not has]
    if config.method == "sft":
        lacking = [] if any(present[1:]) else ["any harm"]
    if lacking:
        raise BadInput(
            f"{where}: no training pairs of {', '.join(lacking)}; make some with `guardpaint data pairs`, "
            "or give the category 0 in the config's `mixture`"
        )


def run(run: Run, method: str, inpainter: str, pairs_dir: Path, policy_file: Path | None = None) -> None:
    """Train one stage; save the merged pipeline, the LoRA and plots of the training dynamics."""
    shape, config = load_config(run.config_file, AlignConfig)
    if shape.method != method:
        raise BadConfig(
            f"{run.config_file}: its method is {shape.method}, not {method}; train it as stage {shape.method}"
        )
    out = run.out
    torch.set_num_threads(config.threads)
    policy = chosen_policy(pairs_dir, None if policy_file is None else Policy.load(policy_file))
    shape = shape.under(policy)
    state = processes()
    noise_seeds.check_range(config.seed, config.steps * state.num_processes)
    pipe = load_inpainter(inpainter)
    train, held_out = (load_pairs(pairs_dir, split, pipe.vae) for split in ("train", "validation"))
    check_categories(train, shape, policy.names, pairs_dir)
    alphas = pipe.scheduler.alphas_cumprod
    if state.is_main_process:
        print(report(estimate(pipe.unet, shape, config, tuple(train.source.shape[1:]), pipe.text_encoder.config)))
    model = Aligner(pipe.unet, pipe.text_encoder, alphas, shape, config.seed, config.accumulate)
    empty = tokenise(pipe.tokenizer, [""])[0]
    watch = AlignmentWatch(held_out, empty, shape, policy.names, out, leaked(train, held_out))
    before = dynamics.activations(model, held_out, policy.names)
    # The model itself divides the batch of a step into `accumulate` parts, so that losses see the whole batch.
    whole = replace(config, batch_size=config.batch_size * config.accumulate, accumulate=1)
    whole = replace(whole, sample_minutes=config.checkpoint_minutes)  # figures come with the checkpoints

    def batches(step: int) -> AlignmentBatch:
        return batch_of(train, step, shape, whole, empty)

    def losses(net: nn.Module, batch: AlignmentBatch) -> Iterator[dict[str, Tensor]]:
        return net(batch)

    def figures(net: nn.Module, path: Path) -> None:
        dynamics.scatter(before, dynamics.activations(net, held_out, policy.names), policy.names, out)
        if (out / LOG).exists():
            dynamics.plot(out / LOG, out, method)

    fitted = fit(model, batches, losses, whole, run, sample=figures, validate=watch)
    assert isinstance(fitted, Aligner)
    if not state.is_main_process:
        return
    figures(fitted, out)
    note = finished(out, config)
    if note is None:
        return
    lora = sum(v.numel() for k, v in fitted.kept_state().items() if "lora_" in k)
    command = run.command(method, inpainter=inpainter, pairs=pairs_dir, policy=policy_file)
    fitted.unet.save_pretrained(out / "lora")
    write_json(out / "lora" / "card.json", {"command": command, "rank": shape.rank})
    pipe.unet = fitted.unet.merge_and_unload()
    pipe.to(torch.float16).save_pretrained(out / "model")
    trained_on = {"policy": policy.name, "categories": policy.names, "processes": state.num_processes}
    parameters = {"lora": lora}
    write_card(
        out, command, note, method=asdict(shape), parameters=parameters, alarms=watch.alarms(), trained_on=trained_on
    )
    print(f"saved to {out / 'model'}; alarms: {', '.join(watch.alarms()) or 'none'}")
