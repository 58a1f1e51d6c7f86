"""Train a small text-to-image model of the paper-doll world (UNet, ε-prediction).

guardpaint train generator --config configs/train/mini-sd.yaml --vae runs/vae4/model --out runs/mini-sd
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor, nn

from guardpaint.draft.schedule import sd_scheduler
from guardpaint.images import save_image
from guardpaint.train.engine import TrainConfig, fit, load_config
from guardpaint.train.latents import SceneLatents, encode_scenes, tokenise
from guardpaint.train.vae import TEST_SEEDS, TRAIN_SEEDS
from guardpaint.world.captions import caption
from guardpaint.world.scene import sample_scene
from guardpaint.world.tokenizer import train_tokenizer, world_captions


@dataclass(frozen=True)
class GeneratorConfig:
    """Shape of a UNet generator and its text encoder."""

    channels: tuple[int, ...] = (64, 96, 128)
    text_width: int = 96
    text_layers: int = 2
    tokens: int = 64
    merges: int = 1000
    scenes: int = 24_000
    captions: int = 3
    caption_drop: float = 0.10
    min_snr: float = 5.0


class TextToImage(nn.Module):
    """UNet and text encoder, trained together."""

    def __init__(self, config: GeneratorConfig, vocab: int, latent_channels: int, size: int, seed: int) -> None:
        super().__init__()
        from diffusers import UNet2DConditionModel
        from transformers import CLIPTextConfig, CLIPTextModel

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.unet = UNet2DConditionModel(
                sample_size=size,
                in_channels=latent_channels,
                out_channels=latent_channels,
                block_out_channels=tuple(config.channels),
                layers_per_block=1,
                down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
                cross_attention_dim=config.text_width,
                attention_head_dim=16,
                norm_num_groups=16,
            )
            self.text = CLIPTextModel(
                CLIPTextConfig(
                    vocab_size=vocab,
                    hidden_size=config.text_width,
                    intermediate_size=4 * config.text_width,
                    num_hidden_layers=config.text_layers,
                    num_attention_heads=4,
                    max_position_embeddings=config.tokens,
                    bos_token_id=0,
                    eos_token_id=1,
                    pad_token_id=1,
                )
            )

    def forward(
        self, z: Float[Tensor, "b c h w"], t: Int[Tensor, " b"], ids: Int[Tensor, "b l"]
    ) -> Float[Tensor, "b c h w"]:
        states = self.text(ids).last_hidden_state
        return self.unet(z, t, encoder_hidden_states=states).sample


def min_snr_weight(alpha: Float[Tensor, " b"], gamma: float) -> Float[Tensor, " b"]:
    """min(SNR, γ)/SNR for ε-prediction (SPEC §4)."""
    snr = alpha / (1 - alpha)
    return snr.clamp(max=gamma) / snr


def batch_of(
    data: SceneLatents, step: int, config: TrainConfig, shape: GeneratorConfig, empty: Int[Tensor, " l"]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Latents, noise, timesteps and token ids of one step, from (seed, step) alone."""
    g = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    rows = torch.randint(len(data), (config.batch_size,), generator=g)
    which = torch.randint(data.ids.shape[1], (config.batch_size,), generator=g)
    ids = data.ids[rows, which].clone()
    ids[torch.rand(config.batch_size, generator=g) < shape.caption_drop] = empty
    z = data.latents[rows]
    return z, torch.randn(z.shape, generator=g), torch.randint(1000, (config.batch_size,), generator=g), ids


def denoising_losses(
    model: nn.Module, batch: tuple[Tensor, Tensor, Tensor, Tensor], alphas: Float[Tensor, " t"], gamma: float
) -> dict[str, Tensor]:
    """Min-SNR weighted ε loss."""
    z, eps, t, ids = batch
    alpha = alphas[t]
    a, s = alpha.sqrt().view(-1, 1, 1, 1), (1 - alpha).sqrt().view(-1, 1, 1, 1)
    noisy = (a * z + s * eps).contiguous(memory_format=torch.channels_last)
    error = ((model(noisy, t, ids) - eps) ** 2).mean((1, 2, 3))
    return {"loss": (min_snr_weight(alpha, gamma) * error).mean(), "mse": error.mean()}


def assemble(model: Any, vae: Any, tokenizer: Any) -> Any:
    """A StableDiffusionPipeline of these parts."""
    from diffusers import StableDiffusionPipeline

    pipe = StableDiffusionPipeline(
        vae=vae,
        text_encoder=model.text,
        tokenizer=tokenizer,
        unet=model.unet,
        scheduler=sd_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run(config_file: Path, vae_dir: Path, out: Path, minutes: float | None, quiet: bool = False) -> None:
    """Encode the scenes once, train, and save the pipeline with its card when done."""
    from diffusers import AutoencoderKL
    from transformers import CLIPTokenizer

    from guardpaint.checkpoint import read_json, write_json

    shape, config = load_config(config_file, GeneratorConfig)
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(config.threads)
    vae = AutoencoderKL.from_pretrained(vae_dir).float().eval().requires_grad_(False)
    vae = vae.to(memory_format=torch.channels_last)
    words = out / "tokenizer"
    if not words.exists():
        train_tokenizer(world_captions(TRAIN_SEEDS, shape.scenes // 2), shape.merges, shape.tokens).save_pretrained(
            words
        )
    tokenizer = CLIPTokenizer.from_pretrained(words)
    data = encode_scenes(vae, tokenizer, TRAIN_SEEDS, shape.scenes, shape.captions, out / "latents.pt")
    size, channels = int(data.latents.shape[-1]), int(data.latents.shape[1])
    model = TextToImage(shape, len(tokenizer), channels, size, config.seed)
    empty = tokenise(tokenizer, [""])[0]
    alphas = sd_scheduler().alphas_cumprod

    def sample(snapshot: nn.Module, path: Path) -> None:
        pipe = assemble(snapshot, vae, tokenizer)
        prompts = [caption(sample_scene(TEST_SEEDS + i), 0).text for i in range(12)]
        images = pipe(
            prompts, num_inference_steps=25, guidance_scale=4.0, generator=torch.Generator().manual_seed(0)
        ).images
        sheet = Image.new("RGB", (6 * 130, 2 * 130), "white")
        for i, image in enumerate(images):
            sheet.paste(image.resize((128, 128), Image.Resampling.NEAREST), (130 * (i % 6), 130 * (i // 6)))
        save_image(sheet, path)
        path.with_suffix(".txt").write_text("\n".join(prompts) + "\n", encoding="utf-8")

    fit(
        model,
        lambda step: batch_of(data, step, config, shape, empty),
        lambda net, batch: denoising_losses(net, batch, alphas, shape.min_snr),
        config,
        out,
        minutes=minutes,
        sample=sample,
        quiet=quiet,
    )
    done = read_json(out / "run.json")
    if done["step"] < config.steps:
        print(f"stopped at step {done['step']} of {config.steps}; run the same command to go on")
        return
    pipe = assemble(model.eval(), vae, tokenizer)
    pipe.to(torch.float16).save_pretrained(out / "model")
    card = {
        "command": f"guardpaint train generator --config {config_file} --vae {vae_dir.name} --out {out.name}",
        "seed": config.seed,
        "steps": done["step"],
        "minutes": done["minutes"],
        "parameters": {"unet": count(model.unet), "text_encoder": count(model.text)},
    }
    write_json(out / "model" / "card.json", card)


def count(module: Any) -> int:
    return sum(p.numel() for p in module.parameters())
