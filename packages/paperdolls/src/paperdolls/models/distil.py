"""Distil many guided steps of a finished mini-sd3 into four unguided ones (mini-sd3-turbo), as a LoRA.

guardpaint train mini-sd3-turbo --out runs/mini-sd3-turbo
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from guardpaint.draft.denoiser import Denoiser
from guardpaint.draft.loading import load_pipeline
from guardpaint.errors import BadCheckpoint, BadConfig
from guardpaint.store.checkpoint import fingerprint as weights_of
from guardpaint.store.checkpoint import read_json, write_tensors
from guardpaint.store.images import save_image
from guardpaint.store.progress import track
from guardpaint.train.engine import Run, TrainConfig, finished, fit, load_config, write_card
from paperdolls.captions import caption
from paperdolls.models.generator import sample_sheet
from paperdolls.models.teachers import Text, sd3_velocity
from paperdolls.models.vae import TRAIN_SEEDS
from paperdolls.scene import sample_scene

FIRST = TRAIN_SEEDS + 2_000_000


@dataclass(frozen=True)
class DistilConfig:
    """Steps, guidance and data of the distillation."""

    steps: int = 4
    """The student's denoising steps."""
    substeps: int = 6
    """Teacher steps within one of the student's."""
    guidance: float = 4.0
    """The teacher's guidance."""
    trajectories: int = 3000
    rank: int = 32
    """Rank of the student's LoRA; 0 trains all weights."""

    def __post_init__(self) -> None:
        if min(self.steps, self.substeps, self.trajectories) < 1 or self.rank < 0:
            raise BadConfig(
                f"steps={self.steps}, substeps={self.substeps}, trajectories={self.trajectories} must be at least 1, "
                f"rank={self.rank} at least 0"
            )


@torch.no_grad()
def texts(pipe: Any, prompts: list[str], length: int) -> Text:
    """The prompt states and the pooled text that the pipeline encodes."""
    states, _, pooled, _ = pipe.encode_prompt(
        prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=length
    )
    return states, pooled


@torch.no_grad()
def trajectories(
    pipe: Any,
    nodes: Float[Tensor, " n"],
    prompts: list[str],
    shape: tuple[int, ...],
    config: DistilConfig,
    length: int,
    seed: int,
) -> Float[Tensor, "n b c h w"]:
    """The guided teacher's latents at the student's noise levels, with small Euler steps in between."""
    z = torch.randn((len(prompts), *shape), generator=torch.Generator().manual_seed(seed))
    states, pooled = texts(pipe, [""] * len(prompts) + prompts, length)
    both = {"encoder_hidden_states": states, "pooled_projections": pooled}
    teacher = Denoiser.from_states(pipe, both, len(prompts), config.guidance)
    kept = [z]
    for a, b in pairwise(nodes):
        levels = torch.linspace(float(a), float(b), config.substeps + 1)
        for here, there in pairwise(levels):
            z = z + (there - here) * teacher.output(z, teacher.level(float(here)))
        kept.append(z)
    return torch.stack(kept)


def student_levels(pipe: Any, steps: int) -> Float[Tensor, " n"]:
    """The σ of every step of the pipeline's own scheduler, ending in 0."""
    scheduler = copy.deepcopy(pipe.scheduler)
    scheduler.set_timesteps(steps)
    return scheduler.sigmas.float()


def collect(pipe: Any, config: DistilConfig, length: int, cache: Path, batch: int = 50) -> dict[str, Tensor]:
    """The teacher's trajectories for training prompts. They are cached, and an interrupted collection resumes."""
    nodes = student_levels(pipe, config.steps)
    size = pipe.transformer.config.sample_size or 16
    shape = (pipe.vae.config.latent_channels, size, size)
    made: list[Tensor] = []
    key = {"teacher": weights_of(pipe.transformer), "config": asdict(config), "length": length, "nodes": nodes.tolist()}
    if cache.exists():
        try:
            kept = torch.load(cache, weights_only=True)
        except Exception as error:
            raise BadCheckpoint(
                f"{cache}: unreadable ({error}); delete it to collect the trajectories again"
            ) from error
        if kept.get("key") == key:
            made = list(kept["paths"].float().split(batch, 1))
    total = -(-config.trajectories // batch)
    for k in track(range(len(made), total), "teacher trajectories"):
        prompts = [prompt(k * batch + i) for i in range(batch)]
        made.append(trajectories(pipe, nodes, prompts, shape, config, length, FIRST + k))
        if k % 5 == 4 or k == total - 1:
            write_tensors(cache, {"key": key, "paths": torch.cat(made, 1).half()})
    return {"paths": torch.cat(made, 1), "nodes": nodes}


def prompt(index: int) -> str:
    return caption(sample_scene(FIRST + index), 0).text


def jump_loss(
    net: nn.Module,
    here: Float[Tensor, "b c h w"],
    there: Float[Tensor, "b c h w"],
    sigma: Float[Tensor, " b"],
    following: Float[Tensor, " b"],
    text: Text,
) -> dict[str, Tensor]:
    """Squared error of the student's velocity against the one that leads to the teacher's latent in one step."""
    want = (there - here) / (following - sigma).view(-1, 1, 1, 1)
    return {"loss": ((sd3_velocity(net, here, sigma, text) - want) ** 2).mean()}


def with_lora(net: Any, rank: int, seed: int) -> Any:
    """The network with a trainable LoRA on its attention and feed-forward projections; rank 0 trains all weights."""
    from peft import LoraConfig

    net.requires_grad_(rank == 0)
    if rank:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=LORA_TARGETS))
    return net


LORA_TARGETS = r".*\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out|net\.0\.proj|net\.2)"


def run(run: Run, teacher: Path) -> None:
    """Distil a finished mini-sd3 and save the student: a LoRA for the teacher, or a whole pipeline."""
    shape, config = load_config(run.config_file, DistilConfig)
    out = run.out
    torch.set_num_threads(config.threads)
    pipe = load_pipeline(teacher)
    card = read_json(teacher / "card.json")
    length = int(card["settings"]["max_sequence_length"])
    if type(pipe).__name__ != "StableDiffusion3Pipeline":
        raise BadConfig(f"{teacher}: a {type(pipe).__name__} cannot be distilled; give a StableDiffusion3Pipeline")
    student = with_lora(copy.deepcopy(pipe.transformer), shape.rank, config.seed)
    out.mkdir(parents=True, exist_ok=True)
    settings = {**card["settings"], "num_inference_steps": shape.steps, "guidance_scale": 1.0}
    step = few_steps(pipe, shape, config, length, out)

    def sample(net: nn.Module, path: Path) -> None:
        drawn = copy.copy(pipe)
        drawn.register_modules(transformer=net)
        sheet, _ = sample_sheet(drawn, settings)
        save_image(sheet, path)

    fit(student, *step, config, run, sample=sample)
    done = finished(out, config)
    if done is None:
        return
    sample(student, out / "samples.png")
    save_student(pipe, student, shape, out / "model")
    command = run.command("distil", teacher=teacher)
    trained = sum(p.numel() for p in student.parameters() if p.requires_grad)
    write_card(out, command, done, settings=settings, parameters={"trained": trained}, starts_from=card)
    print(f"saved to {out / 'model'}")


def save_student(pipe: Any, student: Any, shape: DistilConfig, folder: Path) -> None:
    if shape.rank:
        from peft import get_peft_model_state_dict

        layers = {k: v.half().contiguous() for k, v in get_peft_model_state_dict(student).items()}
        type(pipe).save_lora_weights(folder, transformer_lora_layers=layers)
    else:
        pipe.register_modules(transformer=student)
        pipe.to(torch.float16).save_pretrained(folder)


def few_steps(pipe: Any, shape: DistilConfig, config: TrainConfig, length: int, out: Path) -> tuple[Any, Any]:
    """The batches and the loss of step distillation."""
    data = collect(pipe, shape, length, out / "trajectories.pt")
    paths, nodes = data["paths"], data["nodes"]

    def batches(step: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Text]:
        g = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        rows = torch.randint(paths.shape[1], (config.batch_size,), generator=g)
        k = torch.randint(len(nodes) - 1, (config.batch_size,), generator=g)
        text = texts(pipe, [prompt(int(i)) for i in rows], length)
        return paths[k, rows], paths[k + 1, rows], nodes[k], nodes[k + 1], text

    return batches, lambda net, batch: jump_loss(net, *batch)
