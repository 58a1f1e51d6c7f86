"""What the recipes of all base models share: config, batch, text encoders and the `Recipe` interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from guardpaint.errors import BadConfig
from paperdolls.render import SIZE

FAMILIES = ("sd", "inpaint", "sdxl", "sd3", "flux")
LONG_TEXT = {"sd3": 256, "flux": 512}
"""T5 length of the pipelines unless `max_sequence_length` is given."""


@dataclass(frozen=True)
class GeneratorConfig:
    """Shape of a generator and of its text encoders."""

    family: str = "sd"
    channels: tuple[int, ...] = (64, 96, 128)
    """UNet widths, full resolution first."""
    layers: int = 5
    """Transformer: joint layers."""
    single_layers: int = 0
    """Transformer (flux): single-stream layers after the joint ones."""
    heads: int = 6
    head_dim: int = 32
    patch: int = 2
    """Transformer (sd3): latents per token and side."""
    rope: tuple[int, ...] = (8, 12, 12)
    """Transformer (flux): how the head's channels are shared among the three position axes."""
    text_width: int = 96
    text_layers: int = 2
    tokens: int = 48
    other_tokens: int = 40
    """Length of the T5 text, for families that have one."""
    other_width: int = 0
    """Width of the T5 states; 0: twice `text_width`."""
    other_layers: int = 0
    """T5 layers; 0: as many as `text_layers`."""
    merges: int = 1000
    scenes: int = 40_000
    captions: int = 4
    caption_drop: float = 0.10
    min_snr: float = 5.0
    sigma_shift: float = 1.0
    """Flow models: above 1, more of the training happens at high noise, where the composition is decided."""
    most_guidance: float = 6.0
    """Guidance values that a taught flux learns lie in [1, this]."""
    long_text: float = 0.0
    """Share of steps with the T5 length that the family's pipeline uses by default."""
    own_words: bool = False
    """Flux: keep training the T5 that it took over. An sd3 model gets nearly all of the text from CLIP, not from T5."""
    focus: float = 0.0
    """Extra loss weight where figures are. The optimum stays the same, but is reached there first."""
    hard: float = 0.0
    """Share of every batch drawn from scenes that are hard to draw (see focus.py)."""

    @property
    def joint_width(self) -> int:
        """Width of the text states that transformers attend to."""
        return self.other_width or 2 * self.text_width

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise BadConfig(f"family={self.family!r}: choose one of {', '.join(FAMILIES)}")
        if not 0 <= self.caption_drop < 1 or not 0 <= self.long_text <= 1:
            raise BadConfig(f"caption_drop={self.caption_drop}, long_text={self.long_text}: shares within [0, 1)")
        if self.focus < 0 or not 0 <= self.hard < 1:
            raise BadConfig(f"focus={self.focus}, hard={self.hard}: a weight of at least 0, a share within [0, 1)")
        if self.family == "flux" and sum(self.rope) != self.head_dim:
            raise BadConfig(f"rope={self.rope} must add up to head_dim={self.head_dim}")


@dataclass(frozen=True)
class Latents:
    """The latents that a generator draws, and the side of the pictures that they stand for."""

    channels: int
    size: int
    """Side of the latents."""
    pixels: int = SIZE
    """Side of the pictures."""


@dataclass(frozen=True)
class Batch:
    """The data of one step; it depends only on the seed and the step."""

    z: Float[Tensor, "b c h w"]
    eps: Float[Tensor, "b c h w"]
    level: Float[Tensor, " b"]
    """Stratified in [0, 1): the recipe turns it into a timestep or a σ."""
    ids: Int[Tensor, "b l"]
    other_ids: Int[Tensor, "b m"] | None
    """The same captions in the family's second tokenizer."""
    mask: Float[Tensor, "b 1 h w"] | None
    masked: Float[Tensor, "b c h w"] | None
    long: bool
    """Pad the T5 text to the pipeline's default length in this step."""
    guidance: Float[Tensor, " b"]
    """Stratified in [0, 1): the strength of the teacher's guidance."""
    weight: Float[Tensor, "b 1 h w"] | None = None
    """Loss weight of each latent, 1 on average; None weighs all the same."""

    def mean_of(self, error: Float[Tensor, "b c h w"]) -> Float[Tensor, " b"]:
        """Weighted mean of every sample's squared error."""
        return (error if self.weight is None else self.weight * error).mean((1, 2, 3))


class Recipe(nn.Module, ABC):
    """A trainable base model."""

    settings: dict[str, Any]
    """Call settings of the finished pipeline."""

    @abstractmethod
    def losses(self, batch: Batch) -> dict[str, Tensor]: ...

    @abstractmethod
    def assemble(self, vae: Any, tokenizer: Any, other_tokenizer: Any = None) -> Any:
        """The diffusers pipeline of these parts, with its progress bar off."""

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return self.losses(batch)

    def adopt(self, pipe: Any) -> None:
        """Take over the weights of a finished pipeline that this recipe can use."""
        raise BadConfig(f"{type(self).__name__} cannot start from {type(pipe).__name__}")

    adopted: tuple[nn.Module, ...] = ()
    """Parts that were taken over unchanged: they are not trained, and are stored once for both models."""

    def read_with(self, text: Any) -> None:
        """Take over a T5 that the trainer `reader` trained."""
        raise BadConfig(f"{type(self).__name__} does not start with a reader; flux does")

    def learn_from(self, pipe: Any) -> None:
        """Imitate a finished pipeline instead of the scenes alone."""
        raise BadConfig(f"{type(self).__name__} cannot be taught by {type(pipe).__name__}")


def clip_text(config: GeneratorConfig, vocab: int, *, projection: bool) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    shape = CLIPTextConfig(
        vocab_size=vocab,
        hidden_size=config.text_width,
        intermediate_size=4 * config.text_width,
        num_hidden_layers=config.text_layers,
        num_attention_heads=4,
        max_position_embeddings=config.tokens,
        projection_dim=config.text_width,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return CLIPTextModelWithProjection(shape) if projection else CLIPTextModel(shape)


def t5_text(config: GeneratorConfig, vocab: int) -> Any:
    from transformers import T5Config, T5EncoderModel

    width = config.joint_width
    return T5EncoderModel(
        T5Config(
            vocab_size=vocab,
            d_model=width,
            d_kv=width // 4,
            d_ff=2 * width,
            num_layers=config.other_layers or config.text_layers,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
        )
    )


def t5_ids(batch: Batch, family: str) -> Int[Tensor, "b m"]:
    """The batch's T5 text, in a long step padded to the pipeline's default length (pad id 0)."""
    if batch.other_ids is None:
        raise BadConfig(f"{family} needs its captions in both tokenizers")
    more = LONG_TEXT[family] - batch.other_ids.shape[1] if batch.long else 0
    return nn.functional.pad(batch.other_ids, (0, more), value=0)


@torch.no_grad()
def take_text(mine: Any, theirs: Any) -> bool:
    """Take over a CLIP text encoder. A longer one repeats the last position; returns whether there were as many."""
    state = {name: value.float() for name, value in theirs.state_dict().items()}
    name = next(k for k in state if k.endswith("position_embedding.weight"))
    own = mine.state_dict()[name]
    more = len(own) - len(state[name])
    state[name] = torch.cat([state[name], state[name][-1:].expand(max(0, more), -1)])
    mine.load_state_dict(state)
    return more == 0


@torch.no_grad()
def take(mine: nn.Module, theirs: nn.Module) -> int:
    """Copy the tensors that have the same name and shape; return how many there were."""
    own, taken = mine.state_dict(), 0
    for name, value in theirs.state_dict().items():
        if name in own and own[name].shape == value.shape:
            own[name].copy_(value)
            taken += 1
    return taken


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe
