"""Train an autoencoder of the paper-doll world.

guardpaint train vae4 --out runs/vae4 [--minutes 60]
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from guardpaint.errors import BadCheckpoint
from guardpaint.store.images import save_image
from guardpaint.train.engine import Run, TrainConfig, finished, fit, load_config, write_card
from guardpaint.train.latents import pixels_of
from paperdolls.masks import touched
from paperdolls.render import RGB, SIZE, SKIN, render
from paperdolls.scene import COLOURS, Scene, sample_scene

TRAIN_SEEDS, TEST_SEEDS = 10_000_000, 20_000_000
"""First scene seeds of training and of held-out data."""
UNSEEN = 5_000_000
"""A warm-started run starts this many seeds later, so that its scenes are new."""


@dataclass(frozen=True)
class VaeConfig:
    """Shape and losses of one autoencoder."""

    latent_channels: int = 4
    channels: tuple[int, ...] = (16, 32, 64)
    layers: int = 1
    kl: float = 1e-4
    edge: float = 0.5
    """Weight of the gradient-difference loss, which keeps edges sharp."""
    chroma: float = 0.0
    """Weight of the opponent-colour loss, which keeps a pink garment from turning into skin."""
    size: int = SIZE
    """Side of the pictures in pixels."""
    contrast: float = 0.0
    """Extra weight of pixels that stand out from their surroundings, such as figures before a backdrop."""
    figures: float = 0.0
    """Extra weight of the pixels of figures and things, however little they stand out."""
    hard: float = 0.0
    """Share of every batch drawn from scenes whose label hangs on few pixels or on a faint colour (`hard_scene`)."""


def build(config: VaeConfig, seed: int) -> Any:
    """A random AutoencoderKL that scales down by 2^(levels − 1)."""
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
            sample_size=config.size,
            mid_block_add_attention=False,
            force_upcast=False,
            shift_factor=0.0,
        )


def scenes(first: int, count: int, size: int = SIZE) -> Float[Tensor, "b 3 s s"]:
    """Renders of consecutive scene seeds in [−1, 1]."""
    return pixels_of([render(sample_scene(first + i), size).image for i in range(count)])


def hard_scene(seed: int) -> Scene:
    """A scene whose label hangs on few pixels or on a faint colour: swimwear, a blade, or clothes close to the skin."""
    kind = ("ordinary", "swimwear", "blade", "ordinary")[seed % 4]
    scene = sample_scene(seed, kind)
    if kind == "blade":
        return scene
    people = tuple(f if f.kind == "statue" else replace(f, colour=near_skin(f.skin)) for f in scene.figures)
    return replace(scene, figures=people)


def near_skin(skin: int) -> str:
    """The colour of garments that is closest to this skin."""
    return min(COLOURS, key=lambda name: math.dist(RGB[name], SKIN[skin]))


@dataclass(frozen=True)
class Lesson:
    """The pictures of one step."""

    images: Float[Tensor, "b 3 h w"]
    places: Float[Tensor, "b 1 h w"] | None = None
    """1 where figures and things are; None if the config does not weigh them."""


def lesson(first: int, count: int, config: VaeConfig) -> Lesson:
    """The pictures of consecutive scene seeds; the last ones are hard scenes."""
    easy = count - round(config.hard * count)
    drawn = [sample_scene(first + i) if i < easy else hard_scene(first + i) for i in range(count)]
    images = pixels_of([render(s, config.size).image for s in drawn])
    if not config.figures:
        return Lesson(images)
    return Lesson(images, torch.from_numpy(np.stack([touched(s, config.size) for s in drawn]))[:, None].float())


def reconstruction(model: Any, batch: Lesson, config: VaeConfig, noise: torch.Generator) -> dict[str, Tensor]:
    """L1 + MSE + edges + KL, with the latent sampled from the posterior by `noise`."""
    images = batch.images
    posterior = model.encode(images).latent_dist
    eps = torch.randn(posterior.mean.shape, generator=noise).to(posterior.mean)
    out = model.decode(posterior.mean + posterior.std * eps).sample
    gap, mse = out - images, ((out - images) ** 2).mean()
    weight = salience(images, config.contrast, 0.0 if batch.places is None else config.figures * batch.places)
    l1 = (weight * gap.abs()).mean()
    colour = (weight[:, 0] * (gap[:, 0] - gap[:, 1]).abs()).mean() + (
        weight[:, 0] * (gap[:, 2] - (gap[:, 0] + gap[:, 1]) / 2).abs()
    ).mean()
    edge = (out.diff(dim=-1) - images.diff(dim=-1)).abs().mean() + (out.diff(dim=-2) - images.diff(dim=-2)).abs().mean()
    kl = posterior.kl().mean() / posterior.mean[0].numel()
    total = l1 + mse + config.edge * edge + config.chroma * colour + config.kl * kl
    return {"loss": total, "mse": mse, "kl": kl, "chroma": colour}


def salience(
    images: Float[Tensor, "b 3 h w"], contrast: float, extra: Float[Tensor, "b 1 h w"] | float = 0.0
) -> Float[Tensor, "b 1 h w"]:
    """Pixel weights of mean one, larger where a pixel differs from its wider surroundings, and by `extra`."""
    coarse = nn.functional.avg_pool2d(images, 4)
    coarse = nn.functional.avg_pool2d(coarse, 7, 1, 3, count_include_pad=False)
    around = nn.functional.interpolate(coarse, scale_factor=4.0)
    weight = 1 + contrast * (images - around).abs().mean(1, keepdim=True) + extra
    return weight / weight.mean()


def psnr(model: Any, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, " b"]:
    """Round-trip PSNR of each image, in decibels, through the mode of the posterior."""
    with torch.no_grad():
        out = model.decode(model.encode(images).latent_dist.mode()).sample.clamp(-1, 1)
    return -10 * torch.log10((((out - images) / 2) ** 2).mean((1, 2, 3)))


def train(shape: VaeConfig, config: TrainConfig, run: Run, warm: Path | None = None) -> Any:
    """Train from scratch, or from the weights of an earlier autoencoder: of the same shape, or with fewer levels."""
    model = build(shape, config.seed)
    if warm is not None:
        take_over(model, load_autoencoder(warm))
    held_out, first = scenes(TEST_SEEDS, 64, shape.size), TRAIN_SEEDS + (0 if warm is None else UNSEEN)

    def batches(step: int) -> Lesson:
        return lesson(first + step * config.batch_size, config.batch_size, shape)

    def losses(model: nn.Module, batch: Lesson) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(int(batch.images.abs().sum() * 1000) % (1 << 31))
        return reconstruction(model, batch, shape, g)

    def sample(model: nn.Module, path: Path) -> None:
        with torch.no_grad():
            back = model.decode(model.encode(held_out[:12]).latent_dist.mode()).sample  # type: ignore[operator]
        sheet = torch.cat([torch.cat(list(held_out[:12]), 2), torch.cat(list(back.clamp(-1, 1)), 2)], 1)
        array = ((sheet + 1) * 127.5).byte().permute(1, 2, 0).numpy()
        zoom = 128 // shape.size
        wide = (array.shape[1] * zoom, array.shape[0] * zoom)
        save_image(Image.fromarray(array).resize(wide, Image.Resampling.NEAREST), path)
        print(f"{path.name}: {psnr(model, held_out).mean():.2f} dB on 64 held-out scenes", flush=True)

    return fit(model, batches, losses, config, run, sample=sample)


@torch.no_grad()
def take_over(model: Any, old: Any) -> None:
    """Copy the weights of an autoencoder with as many levels or fewer; additional levels are the coarsest ones."""
    more = len(model.config.block_out_channels) - len(old.config.block_out_channels)
    own = model.state_dict()
    for name, value in old.state_dict().items():
        if name.startswith("decoder.up_blocks."):
            _, _, level, rest = name.split(".", 3)
            name = f"decoder.up_blocks.{int(level) + more}.{rest}"
        if name in own and own[name].shape == value.shape:
            own[name].copy_(value)
        elif not more:
            raise BadCheckpoint(
                f"the autoencoder to start from has another shape: {name} is {tuple(value.shape)}; "
                "use the `model` section of its config"
            )


@torch.no_grad()
def latent_statistics(
    model: Any, count: int = 512
) -> tuple[Float[Tensor, " c"], Float[Tensor, "c c"], Float[Tensor, "c c"]]:
    """Mean and covariance of the latents of training scenes, and the effect of a change of each on the picture."""
    images = [scenes(TRAIN_SEEDS + i * 32, 32, model.config.sample_size) for i in range(count // 32)]
    z = torch.cat([model.encode(x).latent_dist.mode() for x in images])
    c = z.shape[1]
    flat = z.permute(1, 0, 2, 3).reshape(c, -1)
    few = z[:64]
    g, plain = torch.Generator().manual_seed(0), model.decode(few).sample
    sign = 2.0 * torch.randint(2, few[:, :1].shape, generator=g) - 1
    unit = flat.std(1)
    step = [0.05 * unit[k] * sign * torch.eye(c)[k].view(1, c, 1, 1) for k in range(c)]
    moved = torch.stack(
        [((model.decode(few + s).sample - plain) / (0.05 * unit[k])).flatten() for k, s in enumerate(step)]
    )
    return flat.mean(1), torch.cov(flat), moved @ moved.T / sign.numel()


@torch.no_grad()
def posterior_variance(model: Any) -> Float[Tensor, " c"]:
    """The posterior's variance in every channel, averaged over training scenes."""
    return (model.encode(scenes(TRAIN_SEEDS, 32, model.config.sample_size)).latent_dist.std ** 2).mean((0, 2, 3))


@torch.no_grad()
def balance_latents(
    model: Any,
    mean: Float[Tensor, " c"],
    spread: Float[Tensor, "c c"],
    effect: Float[Tensor, "c c"],
    floor: float = 1e-3,
) -> None:
    """Fold a linear change of the latents into the 1×1 convolutions around them; decoded pictures stay the same.

    Components are ordered by their contribution to the picture. The variance of each becomes proportional to the square
    root of its contribution, with mean one, so that a denoiser does not spend capacity on components that hardly
    matter. The posterior's variance becomes one number per component.
    """
    value, vectors = torch.linalg.eigh(effect.double())
    root = vectors @ torch.diag(value.clamp_min(floor * float(value.max())).sqrt()) @ vectors.T
    share, axes = torch.linalg.eigh(root @ spread.double() @ root.T)
    share, axes = share.flip(0).clamp_min(floor**2 * float(share.max())), axes.flip(1)
    scale = share**-0.25 / share.sqrt().mean().sqrt()
    change = torch.diag(scale) @ axes.T @ root
    undo = torch.linalg.inv(change)
    c = len(mean)
    into, back = model.quant_conv, model.post_quant_conv
    noise = posterior_variance(model).double()
    into.weight[c:] = 0
    into.bias[c:] = (change**2 @ noise).log().float()
    weight, bias = into.weight[:c, :, 0, 0].double(), into.bias[:c].double()
    into.weight[:c, :, 0, 0] = (change @ weight).float()
    into.bias[:c] = (change @ (bias - mean.double())).float()
    outward = back.weight[:, :, 0, 0].double()
    back.bias += (outward @ mean.double()).float()
    back.weight[:, :, 0, 0] = (outward @ undo).float()
    model.register_to_config(scaling_factor=1.0, shift_factor=0.0)


def load_autoencoder(path: Path) -> Any:
    """A saved autoencoder in fp32, frozen, channels last."""
    from diffusers import AutoencoderKL

    try:
        vae = AutoencoderKL.from_pretrained(path, use_safetensors=True, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise BadCheckpoint(f"{path}: not a saved autoencoder ({error})") from error
    return vae.float().eval().requires_grad_(False).to(memory_format=torch.channels_last)


def run(run: Run, warm: Path | None = None) -> None:
    """Train from a config file; a finished run is measured and saved with its card."""
    model_shape, train_config = load_config(run.config_file, VaeConfig)
    out = run.out
    model = train(model_shape, train_config, run, warm)
    done = finished(out, train_config)
    if done is None:
        return
    balance_latents(model, *latent_statistics(model))
    values = torch.cat([psnr(model, scenes(TEST_SEEDS + i * 50, 50, model_shape.size)) for i in range(10)])
    half = 1.96 * float(values.std()) / len(values) ** 0.5
    mean = float(values.mean())
    model.half().save_pretrained(out / "model")
    command = run.command("vae", warm=warm)
    metrics = {"psnr": {"value": mean, "ci": [mean - half, mean + half], "n": len(values), "goal": ">=27"}}
    write_card(out, command, done, parameters=sum(p.numel() for p in model.parameters()), metrics=metrics)
    print(f"{mean:.2f} dB over {len(values)} held-out scenes; saved to {out / 'model'}")
