"""Distil a finished flow model: guidance into an input (mini-flux), or many guided steps into four (mini-sd3-turbo).

guardpaint train distil --config configs/train/mini-sd3-turbo.yaml --teacher runs/mini-sd3 --out runs/mini-sd3-turbo
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from rich.progress import track
from torch import Tensor, nn

from guardpaint.checkpoint import read_json, write_json
from guardpaint.errors import BadCheckpoint, BadConfig
from guardpaint.images import save_image
from guardpaint.train.engine import TrainConfig, fit, load_config, write_tensors
from guardpaint.train.generator import load_pipeline, sample_sheet
from guardpaint.train.latents import fingerprint
from guardpaint.train.recipes import logit_normal
from guardpaint.train.vae import TRAIN_SEEDS
from guardpaint.world.captions import caption
from guardpaint.world.scene import sample_scene

FIRST = TRAIN_SEEDS + 2_000_000


@dataclass(frozen=True)
class DistilConfig:
    """What the student learns from its teacher."""

    kind: str = "steps"
    """steps: few unguided steps; guidance: the guidance value as an input."""
    steps: int = 4
    """The student's denoising steps."""
    substeps: int = 6
    """Teacher steps within one of the student's."""
    guidance: float = 4.0
    """The teacher's guidance, for few steps."""
    most_guidance: float = 6.0
    """Guidance values learned lie in [1, this]."""
    trajectories: int = 3000
    rank: int = 32
    """Rank of the student's LoRA; 0 trains all weights."""

    def __post_init__(self) -> None:
        if self.kind not in ("steps", "guidance"):
            raise BadConfig(f"kind={self.kind!r}: choose steps or guidance")
        if min(self.steps, self.substeps, self.trajectories) < 1 or self.rank < 0:
            raise BadConfig(
                f"steps={self.steps}, substeps={self.substeps}, trajectories={self.trajectories} must be at least 1, "
                f"rank={self.rank} at least 0"
            )


class Velocity:
    """A flow pipeline's velocity as a function of latent, σ and prompt, on unpacked latents."""

    def __init__(self, pipe: Any) -> None:
        self.pipe, self.packed = pipe, "Flux" in type(pipe).__name__

    def texts(self, prompts: list[str], length: int) -> tuple[Tensor, Tensor]:
        """Prompt states and pooled text, as the pipeline encodes them."""
        with torch.no_grad():
            if self.packed:
                states, pooled, _ = self.pipe.encode_prompt(prompts, None, max_sequence_length=length)
            else:
                states, _, pooled, _ = self.pipe.encode_prompt(
                    prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=length
                )
        return states, pooled

    def __call__(
        self,
        net: nn.Module,
        z: Float[Tensor, "b c h w"],
        sigma: Float[Tensor, " b"],
        text: tuple[Tensor, Tensor],
        guidance: Float[Tensor, " b"] | None = None,
    ) -> Float[Tensor, "b c h w"]:
        states, pooled = text
        if not self.packed:
            return net(z, encoder_hidden_states=states, pooled_projections=pooled, timestep=sigma * 1000).sample
        b, c, h, w = z.shape
        out = net(
            hidden_states=self.pipe._pack_latents(z, b, c, h, w),
            timestep=sigma,
            guidance=torch.ones_like(sigma) if guidance is None else guidance,
            pooled_projections=pooled,
            encoder_hidden_states=states,
            txt_ids=torch.zeros(states.shape[1], 3),
            img_ids=self.pipe._prepare_latent_image_ids(b, h // 2, w // 2, z.device, z.dtype),
        ).sample
        return out.view(b, h // 2, w // 2, c, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(b, c, h, w)


def guided(
    conditional: Float[Tensor, "b c h w"], unconditional: Float[Tensor, "b c h w"], scale: Float[Tensor, " b"]
) -> Float[Tensor, "b c h w"]:
    """Classifier-free guidance."""
    return unconditional + scale.view(-1, 1, 1, 1) * (conditional - unconditional)


@torch.no_grad()
def trajectories(
    teacher: Velocity,
    nodes: Float[Tensor, " n"],
    prompts: list[str],
    shape: tuple[int, ...],
    config: DistilConfig,
    length: int,
    seed: int,
) -> Float[Tensor, "n b c h w"]:
    """The guided teacher's latents at the student's levels, by small Euler steps in between."""
    z = torch.randn((len(prompts), *shape), generator=torch.Generator().manual_seed(seed))
    text, empty = teacher.texts(prompts, length), teacher.texts([""] * len(prompts), length)
    both = (torch.cat([text[0], empty[0]]), torch.cat([text[1], empty[1]]))
    scale = torch.full((len(prompts),), config.guidance)
    kept = [z]
    for a, b in pairwise(nodes):
        levels = torch.linspace(float(a), float(b), config.substeps + 1)
        for here, there in pairwise(levels):
            v = teacher(teacher.pipe.transformer, torch.cat([z, z]), here.repeat(2 * len(z)), both)
            z = z + (there - here) * guided(v[: len(z)], v[len(z) :], scale)
        kept.append(z)
    return torch.stack(kept)


def student_levels(pipe: Any, steps: int) -> Float[Tensor, " n"]:
    """The σ that the pipeline's own scheduler will visit, ending in 0."""
    scheduler = copy.deepcopy(pipe.scheduler)
    scheduler.set_timesteps(steps)
    return scheduler.sigmas.float()


def collect(teacher: Velocity, config: DistilConfig, length: int, cache: Path, batch: int = 50) -> dict[str, Tensor]:
    """Trajectories of training prompts, cached; an interrupted collection goes on where it stopped."""
    pipe = teacher.pipe
    nodes = student_levels(pipe, config.steps)
    size = pipe.transformer.config.sample_size or 16
    shape = (pipe.vae.config.latent_channels, size, size)
    made: list[Tensor] = []
    if cache.exists():
        try:
            made = list(torch.load(cache, weights_only=True)["paths"].float().split(batch, 1))
        except Exception as error:
            raise BadCheckpoint(f"{cache}: unreadable ({error}); delete it to collect anew") from error
    total = -(-config.trajectories // batch)
    for k in track(range(len(made), total), description="teacher trajectories"):
        prompts = [prompt(k * batch + i) for i in range(batch)]
        made.append(trajectories(teacher, nodes, prompts, shape, config, length, FIRST + k))
        if k % 5 == 4 or k == total - 1:
            write_tensors(cache, {"paths": torch.cat(made, 1).half()})
    return {"paths": torch.cat(made, 1), "nodes": nodes}


def prompt(index: int) -> str:
    return caption(sample_scene(FIRST + index), 0).text


def jump_loss(
    velocity: Callable[..., Tensor],
    net: nn.Module,
    here: Float[Tensor, "b c h w"],
    there: Float[Tensor, "b c h w"],
    sigma: Float[Tensor, " b"],
    following: Float[Tensor, " b"],
    text: tuple[Tensor, Tensor],
) -> dict[str, Tensor]:
    """One step of the student should land where the teacher's many did; velocities are compared."""
    want = (there - here) / (following - sigma).view(-1, 1, 1, 1)
    return {"loss": ((velocity(net, here, sigma, text) - want) ** 2).mean()}


def guidance_loss(
    velocity: Callable[..., Tensor],
    net: nn.Module,
    teacher: nn.Module,
    z: Float[Tensor, "b c h w"],
    sigma: Float[Tensor, " b"],
    scale: Float[Tensor, " b"],
    text: tuple[Tensor, Tensor],
    empty: tuple[Tensor, Tensor],
) -> dict[str, Tensor]:
    """The student at guidance w should say what the teacher says with classifier-free guidance w."""
    with torch.no_grad():
        both = (torch.cat([text[0], empty[0]]), torch.cat([text[1], empty[1]]))
        v = velocity(teacher, torch.cat([z, z]), torch.cat([sigma, sigma]), both)
        want = guided(v[: len(z)], v[len(z) :], scale)
    return {"loss": ((velocity(net, z, sigma, text, scale) - want) ** 2).mean()}


def with_lora(net: Any, rank: int, seed: int) -> Any:
    """Attention and feed-forward projections get low-rank updates; nothing else trains."""
    from peft import LoraConfig

    net.requires_grad_(rank == 0)
    if rank:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=LORA_TARGETS))
    return net


LORA_TARGETS = r".*\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out|net\.0\.proj|net\.2)"


def run(config_file: Path, teacher_dir: Path, out: Path, minutes: float | None, quiet: bool = False) -> None:
    """Distil and save: a LoRA beside the teacher, or a whole pipeline."""
    shape, config = load_config(config_file, DistilConfig)
    torch.set_num_threads(config.threads)
    pipe = load_pipeline(teacher_dir / "model")
    card = read_json(teacher_dir / "model" / "card.json")
    length = int(card["settings"]["max_sequence_length"])
    velocity = Velocity(pipe)
    student = with_lora(copy.deepcopy(pipe.transformer), shape.rank, config.seed)
    out.mkdir(parents=True, exist_ok=True)
    if shape.kind == "steps":
        settings = {**card["settings"], "num_inference_steps": shape.steps, "guidance_scale": 1.0}
        step = few_steps(velocity, shape, config, length, out)
    else:
        settings = card["settings"]
        step = any_guidance(velocity, shape, config, length, teacher_dir)

    def sample(net: nn.Module, path: Path) -> None:
        drawn = copy.copy(pipe)
        drawn.register_modules(transformer=net)
        sheet, _ = sample_sheet(drawn, settings)
        save_image(sheet, path)

    fit(student, *step, config, out, minutes=minutes, sample=sample, quiet=quiet)
    done = read_json(out / "run.json")
    if done["step"] < config.steps:
        print(f"stopped at step {done['step']} of {config.steps}; run the same command to go on")
        return
    sample(student, out / "samples.png")
    save_student(pipe, student, shape, out / "model")
    card = {
        "command": f"guardpaint train distil --config {config_file} --teacher {teacher_dir} --out {out}",
        "seed": config.seed,
        "steps": done["step"],
        "minutes": done["minutes"],
        "settings": settings,
        "parameters": {"trained": sum(p.numel() for p in student.parameters() if p.requires_grad)},
        "starts_from": card,
    }
    write_json(out / "model" / "card.json", card)
    print(f"saved to {out / 'model'}")


def save_student(pipe: Any, student: Any, shape: DistilConfig, folder: Path) -> None:
    if shape.rank:
        from peft import get_peft_model_state_dict

        layers = {k: v.half().contiguous() for k, v in get_peft_model_state_dict(student).items()}
        type(pipe).save_lora_weights(folder, transformer_lora_layers=layers)
    else:
        pipe.register_modules(transformer=student)
        pipe.to(torch.float16).save_pretrained(folder)


def few_steps(velocity: Velocity, shape: DistilConfig, config: TrainConfig, length: int, out: Path) -> tuple[Any, Any]:
    """Batches and loss of step distillation."""
    data = collect(velocity, shape, length, out / "trajectories.pt")
    paths, nodes = data["paths"], data["nodes"]

    def batches(step: int) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
        g = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        rows = torch.randint(paths.shape[1], (config.batch_size,), generator=g)
        k = torch.randint(len(nodes) - 1, (config.batch_size,), generator=g)
        text = velocity.texts([prompt(int(i)) for i in rows], length)
        return paths[k, rows], paths[k + 1, rows], nodes[k], nodes[k + 1], text

    return batches, lambda net, batch: jump_loss(velocity, net, *batch)


def any_guidance(
    velocity: Velocity, shape: DistilConfig, config: TrainConfig, length: int, teacher_dir: Path
) -> tuple[Any, Any]:
    """Batches and loss of guidance distillation, on the latents the teacher was trained on."""
    pipe = velocity.pipe
    cache = teacher_dir.parent / f"latents-{fingerprint(pipe.vae)}-flux.pt"
    if not cache.exists():
        raise BadCheckpoint(f"{cache}: the teacher's scenes are missing; run its training command again to encode them")
    latents = torch.load(cache, weights_only=True)["latents"]
    teacher = copy.deepcopy(pipe.transformer).requires_grad_(False)
    empty = velocity.texts([""], length)

    def batches(step: int) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        g = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        n = config.batch_size
        rows: Int[Tensor, " b"] = torch.randint(len(latents), (n,), generator=g)
        level = (torch.randperm(n, generator=g) + torch.rand(n, generator=g)) / n
        sigma = logit_normal(level)
        wide = sigma.view(-1, 1, 1, 1)
        z = latents[rows].float()
        noisy = (1 - wide) * z + wide * torch.randn(z.shape, generator=g)
        scale = 1 + (shape.most_guidance - 1) * torch.rand(n, generator=g)
        text = velocity.texts([caption(sample_scene(TRAIN_SEEDS + int(i)), 0).text for i in rows], length)
        return noisy, sigma, scale, text, (empty[0].repeat(n, 1, 1), empty[1].repeat(n, 1))

    return batches, lambda net, batch: guidance_loss(velocity, net, teacher, *batch)
