"""Distil an inpainter into few steps without guidance cost: each step of its LoRA does the work of several of the
teacher's.

guardpaint train mini-inpaint-few --set pairs=runs/pairs --out runs/mini-inpaint-few

The student walks down the ladders that repairs use (`repair.ladder`): as many levels as its depth deserves, at most
`evaluations`. At a level it is given, the teacher takes `substeps` guided DDIM steps for each of the student's, and the
student learns the one clean estimate that leads to the same latent in a single step without guidance. Levels below the
first are reached by the student itself, so that it learns to go on from its own mistakes. The teacher is the model that
the LoRA lies on, switched off.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save
from torch import Tensor, nn

from guardpaint.bases import load_inpainter
from guardpaint.draft.denoiser import Denoiser
from guardpaint.draft.loading import LORA, fuse
from guardpaint.draft.schedule import level_at
from guardpaint.errors import BadConfig
from guardpaint.repair.ladder import DEPTHS, count_steps, own_ladder
from guardpaint.store.checkpoint import write_atomic
from guardpaint.store.seeds import derive
from guardpaint.train.alignment_config import ATTENTION, CONVOLUTIONS, INPUT
from guardpaint.train.engine import Run, TrainConfig, finished, fit, load_config, processes, write_card
from guardpaint.train.latents import tokenise
from guardpaint.train.pair_latents import PairLatents, load_pairs
from guardpaint.train.stack import stacked
from guardpaint.types import Level

ADAPTER = "few"
TARGETS = [*ATTENTION, *CONVOLUTIONS, *INPUT]
HELD_OUT = 32
"""Held-out pairs that a validation walks down from every depth."""


@dataclass(frozen=True)
class FewStepsConfig:
    """Options of a distillation."""

    rank: int = 64
    evaluations: int = 4
    """Denoiser evaluations of the student at depth 10; shallower depths take fewer, in proportion."""
    substeps: int = 3
    """Teacher's steps for one of the student's."""
    guidance: float = 7.5
    """The teacher's guidance scale, which the student learns to do without."""
    outside: float = 0.1
    """Weight of the error outside the mask, where a repair is not used."""
    most_weight: float = 5.0
    """Bound of the weight that grows with the signal-to-noise ratio of a level."""

    def __post_init__(self) -> None:
        if min(self.rank, self.evaluations, self.substeps) < 1 or self.evaluations > DEPTHS:
            raise BadConfig(
                f"rank={self.rank}, evaluations={self.evaluations}, substeps={self.substeps}: all must be at least 1, "
                f"evaluations at most {DEPTHS}"
            )
        if self.guidance < 1 or not 0 <= self.outside <= 1 or self.most_weight < 1:
            raise BadConfig(
                f"guidance={self.guidance} and most_weight={self.most_weight} must be at least 1, "
                f"outside={self.outside} in [0, 1]"
            )


@dataclass(frozen=True)
class FewStepsBatch:
    """Samples of (z0, m, z̃0, prompt), the depth that each is repaired at, and the step of that repair to learn."""

    z0: Float[Tensor, "b c h w"]
    mask: Float[Tensor, "b 1 h w"]
    masked: Float[Tensor, "b c h w"]
    ids: Int[Tensor, "b l"]
    eps: Float[Tensor, "b c h w"]
    depth: int
    """One for the whole batch, so that it takes its steps together."""
    step: int
    """How many steps the student has taken before the one to learn."""

    def __len__(self) -> int:
        return len(self.z0)


class Distiller(nn.Module):
    """An inpainter's UNet with a LoRA (the student) and without it (the teacher)."""

    def __init__(self, pipe: Any, config: FewStepsConfig, seed: int) -> None:
        super().__init__()
        from peft import LoraConfig

        self.config, self.pipe = config, pipe
        self.unet = pipe.unet.requires_grad_(False)
        self.text = pipe.text_encoder.requires_grad_(False).eval()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            shape = LoraConfig(r=config.rank, lora_alpha=config.rank, target_modules=TARGETS)
            self.unet.add_adapter(shape, ADAPTER)
        self.empty = tokenise(pipe.tokenizer, [""])

    def kept_state(self) -> dict[str, Tensor]:
        """The LoRA; the frozen weights come from the model that the run starts from."""
        return {k: v for k, v in self.state_dict().items() if "lora_" in k}

    def ladder(self, depth: int) -> list[Level]:
        return own_ladder(depth, self.config.evaluations, lambda noise: level_at(self.pipe.scheduler, noise))

    def denoiser(self, ids: Int[Tensor, "b l"], guided: bool) -> Denoiser:
        """The model under these prompts: the teacher's two branches, or the student's one."""
        with torch.no_grad():
            states = self.text(ids)[0]
            if guided:
                none = self.text(self.empty.to(ids.device))[0].expand(len(ids), *states.shape[1:])
                states = torch.cat([none, states])
        guidance = self.config.guidance if guided else 1.0
        return Denoiser.from_states(self.pipe, {"encoder_hidden_states": states}, len(ids), guidance)

    @torch.no_grad()
    def start(self, batch: FewStepsBatch) -> Float[Tensor, "b c h w"]:
        """The view's latents with the noise of the batch's depth."""
        return started(batch.z0, batch.eps, self.ladder(batch.depth)[0], batch.depth)

    @torch.no_grad()
    def walked(self, batch: FewStepsBatch, steps: int) -> Float[Tensor, "b c h w"]:
        """The latents after the student's first steps."""
        z, ladder = self.start(batch), self.ladder(batch.depth)
        student, extra = self.denoiser(batch.ids, guided=False), torch.cat([batch.mask, batch.masked], 1)
        for here, there in pairwise(ladder[: steps + 1]):
            x0, eps = student.estimate(z, here, extra=extra)
            z = there.signal * x0 + there.sigma * eps
        return z

    @torch.no_grad()
    def taught(
        self, z: Float[Tensor, "b c h w"], batch: FewStepsBatch, here: Level, there: Level
    ) -> Float[Tensor, "b c h w"]:
        """Where the teacher comes to from a level, in guided steps of even size."""
        self.unet.disable_adapters()
        try:
            teacher, extra = self.denoiser(batch.ids, guided=True), torch.cat([batch.mask, batch.masked], 1)
            count = self.config.substeps
            for k in range(count):
                times = [here.noise + (there.noise - here.noise) * j / count for j in (k, k + 1)]
                now, then = (level_at(self.pipe.scheduler, t) for t in times)
                x0, eps = teacher.estimate(z, now, extra=extra)
                z = then.signal * x0 + then.sigma * eps
        finally:
            self.unet.enable_adapters()
        return z

    def forward(self, batch: FewStepsBatch) -> dict[str, Tensor]:
        """The error of the student's clean estimate against the one that the teacher's steps imply."""
        ladder = self.ladder(batch.depth)
        here, there = ladder[batch.step], ladder[batch.step + 1]
        z = self.walked(batch, batch.step)
        goal = implied(z, self.taught(z, batch, here, there), here, there)
        student, extra = self.denoiser(batch.ids, guided=False), torch.cat([batch.mask, batch.masked], 1)
        x0, _ = student.estimate(z, here, extra=extra)
        error = torch.lerp(torch.full_like(batch.mask, self.config.outside), torch.ones_like(batch.mask), batch.mask)
        error = (error * (x0 - goal) ** 2).mean()
        weight = min(max((here.signal / here.sigma) ** 2, 1.0), self.config.most_weight)
        return {"loss": weight * error, "error": error, f"error_{batch.step}": error.detach()}


def started(
    z0: Float[Tensor, "b c h w"], eps: Float[Tensor, "b c h w"], level: Level, depth: int
) -> Float[Tensor, "b c h w"]:
    """Clean latents noised to a depth, as repairs begin; depth 10 is pure noise."""
    return (0.0 if depth == DEPTHS else level.signal) * z0 + level.sigma * eps


def implied(
    z: Float[Tensor, "b c h w"], then: Float[Tensor, "b c h w"], here: Level, there: Level
) -> Float[Tensor, "b c h w"]:
    """The clean estimate with which a single DDIM step goes from one latent to another."""
    ratio = there.sigma / here.sigma
    return (then - ratio * z) / (there.signal - ratio * here.signal)


def batch_of(pairs: PairLatents, step: int, config: FewStepsConfig, train: TrainConfig) -> FewStepsBatch:
    """The batch of a step; it depends on (seed, step) alone. Deep repairs have more steps to learn and come oftener."""
    g = torch.Generator().manual_seed(derive(train.seed, "few steps", step))
    turns = [(depth, k) for depth in range(1, DEPTHS + 1) for k in range(count_steps(depth, config.evaluations))]
    depth, taken = turns[int(torch.randint(len(turns), (), generator=g))]
    rows = torch.randint(len(pairs), (train.batch_size,), generator=g)
    eps = torch.randn((len(rows), *pairs.source.shape[1:]), generator=g)
    return FewStepsBatch(pairs.source[rows], pairs.mask[rows], pairs.masked[rows], pairs.ids[rows], eps, depth, taken)


@dataclass(frozen=True)
class Watch:
    """Validation: how far the student's repairs are from the teacher's, inside the mask, over all depths."""

    pairs: PairLatents

    def __call__(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, Distiller)
        found = {f"gap_{depth}": self.gap(model, depth) for depth in (2, 5, 8, 10)}
        mean = sum(found.values()) / len(found)
        return {**found, "score": -mean}

    @torch.no_grad()
    def gap(self, model: Distiller, depth: int) -> float:
        """Mean squared difference of the finished latents, as a share of their variance."""
        rows = torch.arange(min(HELD_OUT, len(self.pairs)))
        p, g = self.pairs, torch.Generator().manual_seed(depth)
        eps = torch.randn((len(rows), *p.source.shape[1:]), generator=g)
        device = next(model.parameters()).device
        z0, mask, masked, ids, eps = (
            t.to(device) for t in (p.source[rows], p.mask[rows], p.masked[rows], p.ids[rows], eps)
        )
        batch = FewStepsBatch(z0, mask, masked, ids, eps, depth=depth, step=0)
        own = model.walked(batch, len(model.ladder(depth)) - 1)
        then, ladder = model.start(batch), model.ladder(depth)
        for here, there in pairwise(ladder):
            then = model.taught(then, batch, here, there)
        inside = batch.mask.expand_as(own) > 0
        return float(((own - then)[inside] ** 2).mean() / then[inside].var())


def run(run: Run, inpainter: str, pairs_dir: Path, lora: Path | None = None) -> None:
    """Train the LoRA; `model/` gets it as a file that an adapter of a repairer can name.

    `lora` is a folder with a LoRA that is merged into the inpainter first, such as that of an alignment.
    """
    shape, config = load_config(run.config_file, FewStepsConfig)
    torch.set_num_threads(config.threads)
    state = processes()
    pipe = load_inpainter(inpainter)
    if lora is not None:
        fuse(pipe, lora)
    train, held_out = (load_pairs(pairs_dir, split, pipe.vae) for split in ("train", "validation"))
    model = Distiller(pipe, shape, config.seed)

    def losses(net: nn.Module, batch: FewStepsBatch) -> dict[str, Tensor]:
        values: dict[str, Tensor] = net(batch)
        return {**{f"error_{k}": values["loss"].new_full((), float("nan")) for k in range(shape.evaluations)}, **values}

    batches = partial(batch_of, train, config=shape, train=config)
    fitted = fit(model, batches, losses, config, run, validate=Watch(held_out))
    if not state.is_main_process:
        return
    note = finished(run.out, config)
    if note is None:
        return
    assert isinstance(fitted, Distiller)
    save_lora(fitted, run.out / "model", lora)
    gaps = Watch(held_out)(fitted)
    write_card(
        run.out,
        run.command("few-steps", inpainter=inpainter, pairs=pairs_dir, lora=lora),
        note,
        method=asdict(shape),
        parameters={"lora": sum(v.numel() for v in fitted.kept_state().values())},
        gaps={name: value for name, value in gaps.items() if name != "score"},
    )
    print(f"saved to {run.out / 'model'}; difference from the teacher: {-gaps['score']:.3f} of the latents' variance")


WHOLE = "whole"
"""Folder beside a run's LoRA with the same LoRA and the one it was trained on top of, joined."""


def save_lora(model: Distiller, folder: Path, below: Path | None = None) -> None:
    """Write the LoRA in half precision, as diffusers loads it; with one `below` it, also both joined into one."""
    from peft import get_peft_model_state_dict

    layers = get_peft_model_state_dict(model.unet, adapter_name=ADAPTER)
    halves = {name: value.detach().half().cpu().contiguous() for name, value in layers.items()}
    type(model.pipe).save_lora_weights(folder, unet_lora_layers=halves, safe_serialization=True)
    if below is not None:
        parts = [{k.removeprefix("unet."): v for k, v in load_file(f / LORA).items()} for f in (below, folder)]
        write_atomic(folder / WHOLE / LORA, save(stacked(parts)))
