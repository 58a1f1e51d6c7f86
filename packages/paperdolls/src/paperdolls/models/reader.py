"""Pre-train a T5 on captions: from its states, small heads predict the attributes of the scene.

guardpaint train mini-flux --stage words --out runs/mini-flux

A text encoder that is trained only through the error of generated pictures learns slowly. A generator that starts with
this T5 (input `words` of the trainer `generator`) can use its states from the first step on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from guardpaint.errors import BadCheckpoint, BadConfig
from guardpaint.store.seeds import derive
from guardpaint.train.engine import Run, finished, fit, load_config, write_card
from guardpaint.train.latents import tokenise
from paperdolls.captions import Caption, caption
from paperdolls.models.recipe import GeneratorConfig, t5_text
from paperdolls.models.vae import TEST_SEEDS, TRAIN_SEEDS
from paperdolls.scene import (
    BACKGROUNDS,
    COLOURS,
    GARMENTS,
    KINDS,
    LIGHTS,
    POSES,
    PROPS,
    STYLES,
    Figure,
    Scene,
    sample_scene,
)
from paperdolls.tokenizer import train_t5_tokenizer, world_captions

CLOTHES, TINTS = ("none", "swimsuit", *GARMENTS), ("none", *COLOURS)
SLOTS: dict[str, tuple[str, ...]] = {
    "kind": KINDS,
    "background": BACKGROUNDS,
    "light": LIGHTS,
    "style": STYLES,
    "subject": ("person", "statue"),
    "garment": CLOTHES,
    "colour": TINTS,
    "pose": POSES,
    "prop": PROPS,
    "prop_colour": COLOURS,
    "second_garment": CLOTHES,
    "second_colour": TINTS,
}
"""The attributes that are predicted from a caption, and their values."""
UNSAID = -100
"""Label of an attribute that the caption does not mention; the loss ignores it."""


def answers(scene: Scene, text: Caption) -> list[int]:
    """The label of each slot; UNSAID if the caption does not mention it."""
    values: dict[str, str] = {"kind": scene.kind, "background": scene.background}
    values |= {k: getattr(scene, k) for k in ("light", "style") if k in text.mentions}
    if scene.figures:
        main = scene.figures[0]
        values |= {"subject": main.kind, "garment": main.garment or "none", "colour": main.colour or "none"}
        values |= {k: value for k in ("pose", "prop", "prop_colour") if k in text.mentions and (value := of(main, k))}
    if len(scene.figures) > 1 and (scene.kind == "blade" or "beside" in text.text):
        second = scene.figures[1]
        values |= {"second_garment": second.garment or "none", "second_colour": second.colour or "none"}
    return [choices.index(values[name]) if name in values else UNSAID for name, choices in SLOTS.items()]


def of(figure: Figure, name: str) -> str | None:
    value: str | None = getattr(figure, name)
    return value


class Reader(nn.Module):
    """A T5 encoder and, for every slot, a learned query that attends to its states and a classifier."""

    def __init__(self, config: GeneratorConfig, vocab: int) -> None:
        super().__init__()
        self.text = t5_text(config, vocab)
        self.questions = nn.Parameter(torch.randn(len(SLOTS), config.joint_width) * config.joint_width**-0.5)
        self.heads = nn.ModuleList(nn.Linear(config.joint_width, len(c)) for c in SLOTS.values())

    def forward(self, ids: Int[Tensor, "b l"]) -> list[Float[Tensor, "b _"]]:
        states = self.text(ids)[0]
        where = torch.softmax(states @ self.questions.T, 1)
        seen = where.transpose(1, 2) @ states
        return [head(seen[:, k]) for k, head in enumerate(self.heads)]


@dataclass(frozen=True)
class Lesson:
    ids: Int[Tensor, "b l"]
    wanted: Int[Tensor, "b s"]


def lesson(tokenizer: Any, scenes: Sequence[int], way: int) -> Lesson:
    """Captions of these scenes with caption seed `way`, and their labels."""
    seen = [sample_scene(s) for s in scenes]
    texts = [caption(s, way) for s in seen]
    wanted = torch.tensor([answers(s, t) for s, t in zip(seen, texts, strict=True)])
    return Lesson(tokenise(tokenizer, [t.text for t in texts]), wanted)


def losses(net: nn.Module, batch: Lesson) -> dict[str, Tensor]:
    said = net(batch.ids)
    asked = [(s, w) for s, w in zip(said, batch.wanted.T, strict=True) if (w != UNSAID).any()]
    return {"loss": torch.stack([nn.functional.cross_entropy(s, w, ignore_index=UNSAID) for s, w in asked]).mean()}


@torch.no_grad()
def accuracy(net: Reader, batch: Lesson) -> dict[str, float]:
    """For each slot, the share of captions whose label is predicted rightly."""
    said = net.eval()(batch.ids)
    out: dict[str, float] = {}
    for name, logits, wanted in zip(SLOTS, said, batch.wanted.T, strict=True):
        asked = wanted != UNSAID
        if asked.any():
            out[name] = round(float((logits.argmax(1) == wanted)[asked].float().mean()), 4)
    return out


def run(run: Run) -> None:
    """Train the reader; when it is finished, measure its accuracy and save its T5 with its card."""
    shape, config = load_config(run.config_file, GeneratorConfig)
    out = run.out
    torch.set_num_threads(config.threads)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = t5_tokenizer(shape, out / "tokenizer")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = Reader(shape, len(tokenizer))

    def batches(step: int) -> Lesson:
        g = torch.Generator().manual_seed(derive(config.seed, "lesson", step))
        scenes = (TRAIN_SEEDS + torch.randint(shape.scenes, (config.batch_size,), generator=g)).tolist()
        return lesson(tokenizer, scenes, step % shape.captions)

    fitted = fit(model, batches, losses, config, run)
    done = finished(out, config)
    if done is None:
        return
    assert isinstance(fitted, Reader)
    read = accuracy(fitted, lesson(tokenizer, range(TEST_SEEDS, TEST_SEEDS + 1000), 0))
    fitted.text.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    write_card(out, run.command("reader"), done, read=read)
    print(f"saved to {out / 'model'}; read rightly: {read}")


def t5_tokenizer(shape: GeneratorConfig, folder: Path) -> Any:
    """The world's T5 tokenizer; trained once and kept in the run's folder."""
    from transformers import T5Tokenizer

    if not folder.exists():
        train_t5_tokenizer(world_captions(TRAIN_SEEDS, 12_000), shape.other_tokens).save_pretrained(folder)
    return T5Tokenizer.from_pretrained(folder, local_files_only=True)


def load_reader(path: Path, tokenizer: Any) -> Any:
    """A T5 that the trainer `reader` saved; raises BadConfig if it was trained with another tokenizer."""
    from transformers import T5EncoderModel, T5Tokenizer

    try:
        text = T5EncoderModel.from_pretrained(path, use_safetensors=True, local_files_only=True)
        own = T5Tokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{path}: not a T5 saved by the trainer `reader` ({error})") from error
    if own.get_vocab() != tokenizer.get_vocab():
        raise BadConfig(f"{path}: its tokenizer is another; train it with the `model` section of this config")
    return text
