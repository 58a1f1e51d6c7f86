"""Train a tiny autoencoder (AutoencoderTiny) on the latents of a full one; the guard decodes cheap views with it.

guardpaint train tiny4 --out runs/tiny4
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from guardpaint.store.checkpoint import read_json, write_json
from guardpaint.store.images import save_image
from guardpaint.train.engine import Run, finished, fit, load_config, write_card
from paperdolls.models.vae import TEST_SEEDS, TRAIN_SEEDS, load_autoencoder, scenes

FIRST = TRAIN_SEEDS + 3_000_000


@dataclass(frozen=True)
class TinyConfig:
    """Width and number of blocks of each level, coarse to fine, for both encoder and decoder."""

    channels: tuple[int, ...] = (24, 24, 24)
    blocks: tuple[int, ...] = (2, 1, 1)
    noise: float = 0.15
    """Largest standard deviation of the noise on the latents, which imitates those of unfinished pictures."""


def build(config: TinyConfig, latent_channels: int, seed: int) -> Any:
    from diffusers import AutoencoderTiny

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoencoderTiny(
            latent_channels=latent_channels,
            encoder_block_out_channels=tuple(config.channels),
            decoder_block_out_channels=tuple(config.channels),
            num_encoder_blocks=tuple(reversed(config.blocks)),
            num_decoder_blocks=tuple(config.blocks),
        )


def imitation(
    model: Any, images: Float[Tensor, "b 3 H W"], z: Float[Tensor, "b c h w"], disturbed: Float[Tensor, "b c h w"]
) -> dict[str, Tensor]:
    """The losses of decoding the teacher's latents to the picture and of encoding the picture to those latents."""
    out = model.decode(disturbed).sample
    gap = out - images
    edge = (out.diff(dim=-1) - images.diff(dim=-1)).abs().mean() + (out.diff(dim=-2) - images.diff(dim=-2)).abs().mean()
    into = ((model.encode(images).latents - z) ** 2).mean()
    mse = (gap**2).mean()
    return {"loss": gap.abs().mean() + mse + 0.5 * edge + 0.1 * into, "mse": mse, "latent": into}


def quality(model: Any, vae: Any, images: Float[Tensor, "b 3 H W"]) -> Float[Tensor, " b"]:
    """PSNR of pictures decoded from the teacher's latents."""
    with torch.no_grad():
        out = model.decode(latents(vae, images)).sample.clamp(-1, 1)
    return -10 * torch.log10((((out - images) / 2) ** 2).mean((1, 2, 3)))


@torch.no_grad()
def latents(vae: Any, images: Float[Tensor, "b 3 H W"]) -> Float[Tensor, "b c h w"]:
    """The latents of pictures as a pipeline holds them, shifted and scaled."""
    return (vae.encode(images).latent_dist.mode() - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor


def run(run: Run, vae_dir: Path) -> None:
    """Train a tiny decoder for the latents of this autoencoder, measure it, save it with its card."""
    shape, config = load_config(run.config_file, TinyConfig)
    out = run.out
    torch.set_num_threads(config.threads)
    vae = load_autoencoder(vae_dir)
    side = int(vae.config.sample_size)
    held_out = scenes(TEST_SEEDS, 64, side)

    def batches(step: int) -> tuple[Tensor, Tensor, Tensor]:
        g = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        images = scenes(FIRST + step * config.batch_size, config.batch_size, side)
        z = latents(vae, images)
        strength = shape.noise * torch.rand((len(z), 1, 1, 1), generator=g)
        return images, z, z + strength * torch.randn(z.shape, generator=g)

    def sample(model: nn.Module, path: Path) -> None:
        few = held_out[:12]
        with torch.no_grad():
            back = model.decode(latents(vae, few)).sample.clamp(-1, 1)  # type: ignore[operator]
        sheet = torch.cat([torch.cat(list(few), 2), torch.cat(list(back), 2)], 1)
        picture = Image.fromarray(((sheet + 1) * 127.5).byte().permute(1, 2, 0).numpy())
        zoom = 128 // side
        save_image(picture.resize((picture.width * zoom, picture.height * zoom), Image.Resampling.NEAREST), path)
        print(f"{path.name}: {quality(model, vae, held_out).mean():.2f} dB on 64 held-out scenes", flush=True)

    model = build(shape, vae.config.latent_channels, config.seed)
    fit(model, batches, lambda m, b: imitation(m, *b), config, run, sample=sample)
    done = finished(out, config)
    if done is None:
        return
    sample(model.eval(), out / "samples.png")
    values = torch.cat([quality(model, vae, scenes(TEST_SEEDS + i * 50, 50, side)) for i in range(10)])
    model.half().save_pretrained(out / "model")
    saved = read_json(out / "model" / "config.json")
    saved.pop("block_out_channels", None)  # diffusers writes it, and warns about it on every load
    write_json(out / "model" / "config.json", saved)
    command = run.command("tiny", vae=vae_dir)
    metrics = {"psnr": {"value": float(values.mean()), "n": len(values)}}
    write_card(out, command, done, parameters=sum(p.numel() for p in model.parameters()), metrics=metrics)
    print(f"{float(values.mean()):.2f} dB; saved to {out / 'model'}")
