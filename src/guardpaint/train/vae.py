"""Train an autoencoder of the paper-doll world.

guardpaint train vae --config configs/train/vae4.yaml --out runs/vae4 [--minutes 60]
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from guardpaint.checkpoint import read_json, write_json
from guardpaint.images import save_image
from guardpaint.train.engine import TrainConfig, fit, load_config
from guardpaint.world.render import render
from guardpaint.world.scene import sample_scene

TRAIN_SEEDS, TEST_SEEDS = 10_000_000, 20_000_000
"""Scene seeds of training and of held-out data start here."""


@dataclass(frozen=True)
class VaeConfig:
    """Shape and losses of one autoencoder."""

    latent_channels: int = 4
    channels: tuple[int, ...] = (16, 32, 64)
    layers: int = 1
    kl: float = 1e-4
    edge: float = 0.5
    """Weight of the gradient-difference loss, which keeps edges sharp."""


def build(config: VaeConfig, seed: int) -> Any:
    """AutoencoderKL, factor 2^(levels − 1)."""
    from diffusers import AutoencoderKL

    levels = len(config.channels)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoencoderKL(
            block_out_channels=tuple(config.channels),
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            layers_per_block=config.layers,
            latent_channels=config.latent_channels,
            norm_num_groups=8,
            sample_size=64,
            mid_block_add_attention=False,
            force_upcast=False,
        )


def scenes(first: int, count: int) -> Float[Tensor, "b 3 64 64"]:
    """Renders of consecutive scene seeds in [−1, 1]."""
    images = np.stack([render(sample_scene(first + i)).image for i in range(count)])
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
    return pixels.contiguous(memory_format=torch.channels_last)


def reconstruction(
    model: Any, images: Float[Tensor, "b 3 h w"], config: VaeConfig, noise: torch.Generator
) -> dict[str, Tensor]:
    """L1 + MSE + edges + KL, with the latent sampled from the posterior by `noise`."""
    posterior = model.encode(images).latent_dist
    eps = torch.randn(posterior.mean.shape, generator=noise).to(posterior.mean)
    out = model.decode(posterior.mean + posterior.std * eps).sample
    l1, mse = (out - images).abs().mean(), ((out - images) ** 2).mean()
    edge = (out.diff(dim=-1) - images.diff(dim=-1)).abs().mean() + (out.diff(dim=-2) - images.diff(dim=-2)).abs().mean()
    kl = posterior.kl().mean() / posterior.mean[0].numel()
    return {"loss": l1 + mse + config.edge * edge + config.kl * kl, "mse": mse, "kl": kl}


def psnr(model: Any, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, " b"]:
    """Round-trip PSNR of each image, in decibels, through the mode of the posterior."""
    with torch.no_grad():
        out = model.decode(model.encode(images).latent_dist.mode()).sample.clamp(-1, 1)
    return -10 * torch.log10((((out - images) / 2) ** 2).mean((1, 2, 3)))


def train(shape: VaeConfig, config: TrainConfig, out: Path, minutes: float | None, quiet: bool = False) -> Any:
    held_out = scenes(TEST_SEEDS, 64)

    def batches(step: int) -> Tensor:
        return scenes(TRAIN_SEEDS + step * config.batch_size, config.batch_size)

    def losses(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(int(images.abs().sum() * 1000) % (1 << 31))
        return reconstruction(model, images, shape, g)

    def sample(model: nn.Module, path: Path) -> None:
        with torch.no_grad():
            back = model.decode(model.encode(held_out[:12]).latent_dist.mode()).sample  # type: ignore[operator]
        sheet = torch.cat([torch.cat(list(held_out[:12]), 2), torch.cat(list(back.clamp(-1, 1)), 2)], 1)
        array = ((sheet + 1) * 127.5).byte().permute(1, 2, 0).numpy()
        save_image(
            Image.fromarray(array).resize((array.shape[1] * 2, array.shape[0] * 2), Image.Resampling.NEAREST), path
        )
        print(f"{path.name}: {psnr(model, held_out).mean():.2f} dB on 64 held-out scenes", flush=True)

    return fit(build(shape, config.seed), batches, losses, config, out, minutes=minutes, sample=sample, quiet=quiet)


def measure_scaling(model: Any, count: int = 256) -> tuple[float, list[float]]:
    """1/std of the latents, and their channel means, over training scenes."""
    with torch.no_grad():
        z = torch.cat([model.encode(scenes(TRAIN_SEEDS + i * 32, 32)).latent_dist.mode() for i in range(count // 32)])
    return float(1 / z.std()), z.mean((0, 2, 3)).tolist()


def run(config_file: Path, out: Path, minutes: float | None) -> None:
    """Train from a config file; a finished run is measured and saved with its card."""
    model_shape, train_config = load_config(config_file, VaeConfig)
    model = train(model_shape, train_config, out, minutes)
    step = read_json(out / "run.json")["step"]
    if step < train_config.steps:
        print(f"stopped at step {step} of {train_config.steps}; run the same command to go on")
        return
    scale, _ = measure_scaling(model)
    model.register_to_config(scaling_factor=scale, shift_factor=0.0)
    values = torch.cat([psnr(model, scenes(TEST_SEEDS + i * 50, 50)) for i in range(10)])
    half = 1.96 * float(values.std()) / len(values) ** 0.5
    mean = float(values.mean())
    model.half().save_pretrained(out / "model")
    card = {
        "command": f"guardpaint train vae --config {config_file} --out {out.name}",
        "seed": train_config.seed,
        "steps": step,
        "minutes": read_json(out / "run.json")["minutes"],
        "parameters": sum(p.numel() for p in model.parameters()),
        "metrics": {"psnr": {"value": mean, "ci": [mean - half, mean + half], "n": len(values), "goal": ">=27"}},
    }
    write_json(out / "model" / "card.json", card)
    print(f"{mean:.2f} dB over {len(values)} held-out scenes; saved to {out / 'model'}")
