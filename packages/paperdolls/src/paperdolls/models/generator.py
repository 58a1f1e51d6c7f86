"""Train a base model of the paper-doll world: mini-sd, mini-inpaint, mini-sdxl, mini-sd3 or mini-flux.

guardpaint train mini-sd --out runs/mini-sd
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from PIL import Image
from torch import Tensor, nn

from guardpaint.draft.loading import load_pipeline
from guardpaint.errors import BadConfig
from guardpaint.store.checkpoint import read_json
from guardpaint.store.images import save_image
from guardpaint.train.engine import Run, TrainConfig, finished, fit, load_config, write_card
from guardpaint.train.latents import fingerprint, tokenise
from paperdolls.captions import caption
from paperdolls.masks import boxed, figure_mask
from paperdolls.models.focus import Focus, look_at, weights
from paperdolls.models.latents import SceneLatents, SceneRange, encode_scenes
from paperdolls.models.reader import load_reader, t5_tokenizer
from paperdolls.models.recipe import Batch, GeneratorConfig, Latents, Recipe
from paperdolls.models.recipes import build
from paperdolls.models.vae import TEST_SEEDS, TRAIN_SEEDS, load_autoencoder
from paperdolls.render import render
from paperdolls.scene import sample_scene
from paperdolls.tokenizer import train_tokenizer, world_captions

MASKS_PER_SCENE = 2


def batch_of(
    data: SceneLatents,
    step: int,
    config: TrainConfig,
    shape: GeneratorConfig,
    empty: Int[Tensor, " l"],
    other_empty: Int[Tensor, " m"] | None = None,
    focus: Focus | None = None,
) -> Batch:
    """Latents, noise, levels and captions of one step; they depend only on the seed and the step."""
    g = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    n = config.batch_size
    rows = torch.randint(len(data), (n,), generator=g)
    if focus is not None and shape.hard:
        hard = torch.nonzero(focus.hard)[:, 0]
        rows = torch.where(
            torch.rand(n, generator=g) < shape.hard, hard[torch.randint(len(hard), (n,), generator=g)], rows
        )
    which = torch.randint(data.ids.shape[1], (n,), generator=g)
    dropped = torch.rand(n, generator=g) < shape.caption_drop
    ids = data.ids[rows, which].clone()
    ids[dropped] = empty
    other = None
    if data.other_ids is not None and other_empty is not None:
        other = data.other_ids[rows, which].clone()
        other[dropped] = other_empty
    z = data.latents[rows]
    level = (torch.randperm(n, generator=g) + torch.rand(n, generator=g)) / n
    long = float(torch.rand((), generator=g)) < shape.long_text
    mask = masked = None
    if data.masks is not None and data.masked is not None:
        hole = torch.randint(data.masks.shape[1], (n,), generator=g)
        mask, masked = data.masks[rows, hole], data.masked[rows, hole]
    eps = torch.randn(z.shape, generator=g)
    guidance = (torch.randperm(n, generator=g) + torch.rand(n, generator=g)) / n
    weight = weights(focus.figures[rows], shape.focus) if focus is not None else None
    return Batch(z, eps, level, ids, other, mask, masked, long, guidance, weight)


def tokenizers(shape: GeneratorConfig, out: Path) -> tuple[Any, Any]:
    """The world's CLIP tokenizer and, for sd3 and flux, its T5 tokenizer; trained once and kept in the run's folder."""
    from transformers import CLIPTokenizer

    words, pieces = out / "tokenizer", out / "tokenizer_2"
    if not words.exists():
        train_tokenizer(world_captions(TRAIN_SEEDS, 12_000), shape.merges, shape.tokens).save_pretrained(words)
    other = t5_tokenizer(shape, pieces) if shape.family in ("sd3", "flux") else None
    return CLIPTokenizer.from_pretrained(words, local_files_only=True), other


@dataclass(frozen=True)
class Start:
    """Finished models that a generator starts from; each is optional."""

    warm: Path | None = None
    """A pipeline whose weights it takes over (inpaint and sdxl: a mini-sd; flux: a mini-sd3)."""
    teacher: Path | None = None
    """A pipeline whose guided predictions it imitates (flux: a mini-sd, a mini-sd3 or a mini-flux)."""
    words: Path | None = None
    """A T5 that the trainer `reader` saved, to start from (flux)."""


def run(run: Run, vae_dir: Path, start: Start) -> None:
    """Encode the scenes once, train, and save the pipeline with its card when done."""
    shape, config = load_config(run.config_file, GeneratorConfig)
    out = run.out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(config.threads)
    vae = load_autoencoder(vae_dir)
    tokenizer, other = tokenizers(shape, out)
    masks = MASKS_PER_SCENE if shape.family == "inpaint" else 0
    kind = "masked" if masks else "two-texts" if other else "one-text"
    cache = out.parent / f"latents-{fingerprint(vae)}-{kind}.pt"
    wanted = SceneRange(TRAIN_SEEDS, shape.scenes, shape.captions, masks)
    data = encode_scenes(vae, tokenizer, wanted, cache, other_tokenizer=other)
    latents = Latents(int(data.latents.shape[1]), int(data.latents.shape[-1]), int(vae.config.sample_size))
    focus = None
    if shape.focus or shape.hard:
        places = out.parent / f"figures-{latents.pixels}-{TRAIN_SEEDS}-{shape.scenes}.pt"
        focus = look_at(TRAIN_SEEDS, shape.scenes, latents, places)
    model = build(shape, len(tokenizer), len(other) if other else 0, latents, config.seed)
    if start.warm is not None:
        pipe = load_pipeline(start.warm)
        model.adopt(with_words(pipe, tokenizer, other, start.warm, shorter=shape.family in ("sd3", "flux")))
    if start.words is not None:
        model.read_with(load_reader(start.words, other) if other is not None else None)
    if start.teacher is not None:
        model.learn_from(with_words(load_pipeline(start.teacher), tokenizer, other, start.teacher))
    for part in model.adopted:
        part.requires_grad_(False)
    empty = tokenise(tokenizer, [""])[0]
    other_empty = tokenise(other, [""])[0] if other else None

    def sample(snapshot: nn.Module, path: Path) -> None:
        assert isinstance(snapshot, Recipe)
        sheet, prompts = sample_sheet(snapshot.assemble(vae, tokenizer, other), snapshot.settings)
        save_image(sheet, path)
        path.with_suffix(".txt").write_text("\n".join(prompts) + "\n", encoding="utf-8")

    def batches(step: int) -> Batch:
        return batch_of(data, step, config, shape, empty, other_empty, focus)

    fit(model, batches, lambda net, batch: net(batch), config, run, sample=sample)
    done = finished(out, config)
    if done is None:
        return
    pipe = model.eval().assemble(vae, tokenizer, other)
    sample(model, out / "samples.png")
    parameters = {
        name: sum(p.numel() for p in part.parameters())
        for name, part in pipe.components.items()
        if isinstance(part, nn.Module)
    }
    pipe.to(torch.float16).save_pretrained(out / "model")
    command = run.command("generator", vae=vae_dir, warm=start.warm, teacher=start.teacher, words=start.words)
    card = start.words / "card.json" if start.words is not None else None
    read = {"words": read_json(card)} if card is not None and card.exists() else {}
    write_card(out, command, done, start.warm, settings=model.settings, parameters=parameters, **read)
    print(f"saved to {out / 'model'}")


def with_words(pipe: Any, tokenizer: Any, other: Any, path: Path, shorter: bool = False) -> Any:
    """The pipeline, after a check that its tokenizers are those of the new model.

    With `shorter`, its CLIP text may be shorter than the new model's.
    """
    cut = not shorter and pipe.tokenizer.model_max_length < len(tokenise(tokenizer, [""])[0])
    pieces = getattr(pipe, "tokenizer_2" if type(pipe).__name__ == "FluxPipeline" else "tokenizer_3", None)
    another = other is not None and pieces is not None and pieces.get_vocab() != other.get_vocab()
    if pipe.tokenizer.get_vocab() != tokenizer.get_vocab() or cut or another:
        raise BadConfig(f"{path}: its tokenizer is another; use the `merges` and `tokens` of that model's config")
    return pipe


def sample_sheet(pipe: Any, settings: dict[str, Any], rows: int = 2, columns: int = 6) -> tuple[Image.Image, list[str]]:
    """A sheet of held-out prompts drawn by the pipeline, and the prompts. An inpainter fills the main figure's box."""
    count = rows * columns
    scenes = [sample_scene(TEST_SEEDS + i) for i in range(count)]
    prompts = [caption(s, 0).text for s in scenes]
    extra: dict[str, Any] = {}
    tiles: list[list[Image.Image]] = []
    if "Inpaint" in type(pipe).__name__:
        side = int(pipe.vae.config.sample_size)
        pictures = [Image.fromarray(render(s, side).image) for s in scenes]
        holes = [Image.fromarray(boxed(figure_mask(s, True, side), 2).astype(np.uint8) * 255) for s in scenes]
        extra = {"image": pictures, "mask_image": holes, "height": side, "width": side}
        tiles.append(
            [
                Image.composite(Image.new("RGB", p.size, "grey"), p, h.resize(p.size))
                for p, h in zip(pictures, holes, strict=True)
            ]
        )
    tiles.append(pipe(prompts, generator=torch.Generator().manual_seed(0), **{**settings, **extra}).images)
    sheet = Image.new("RGB", (columns * 130, rows * 130 * len(tiles)), "white")
    for k, images in enumerate(tiles):
        for i, image in enumerate(images):
            spot = (130 * (i % columns), 130 * (len(tiles) * (i // columns) + k))
            sheet.paste(image.resize((128, 128), Image.Resampling.NEAREST), spot)
    return sheet, prompts
