"""The Auditor-Scorer A_s: one backbone, six answers."""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from tokenizers import Tokenizer
from torch import Tensor, nn

from guardpaint.audit.remembered import StagesSeen
from guardpaint.audit.text import TextEncoder, default_tokenizer, load_tokenizer, save_tokenizer, token_batch
from guardpaint.errors import BadConfig
from guardpaint.store.checkpoint import fingerprint, loaded, read_shape, save_module
from guardpaint.types import SAFE, Audit, JsonDict

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


MOST_LAYERS = 1000


@dataclass(frozen=True)
class AuditorConfig:
    """Shape of an auditor; the defaults are the production size (ResNet-101, d = 512)."""

    categories: tuple[str, ...] = (SAFE, "nudity", "violence")
    stem_channels: int = 64
    stage_channels: tuple[int, ...] = (256, 512, 1024, 2048)
    stage_depths: tuple[int, ...] = (3, 4, 23, 3)
    layer_type: str = "bottleneck"
    text_dim: int = 512
    embed_dim: int = 256
    heads: int = 8
    time_dims: tuple[int, int, int] = (128, 256, 512)
    seam_channels: int = 512
    strength_hidden: tuple[int, int] = (512, 128)
    dropout: float = 0.1
    pool: str = "mean"
    """How maps become logits: mean (the paper's), or peak, a smooth maximum, which mask supervision needs: a map
    that is right is low almost everywhere, and so would be its mean."""
    quality_pool: str = "mean"
    """The same for P: mean over the map (the paper's), peak (a smooth minimum, which grows with the area of the
    artefact), or high (the worst cells, whatever their area)."""
    class_weights: tuple[float, ...] = ()
    """Class weights of the training loss, which are divided out of the probabilities: a weight of 5 multiplies the odds
    of its class by 5. If empty, the probabilities are used as trained (the paper's)."""
    vocab_size: int = 258
    max_tokens: int = 128
    sizes: tuple[int, int] = (224, 384)

    def __post_init__(self) -> None:
        if len(self.categories) < 2 or self.categories[0] != SAFE:
            raise BadConfig(f"categories={self.categories}: the first must be {SAFE!r}")
        if len(self.stage_channels) != len(self.stage_depths):
            raise BadConfig(f"{len(self.stage_channels)} stage_channels but {len(self.stage_depths)} depths")
        if not 0 < sum(self.stage_depths) <= MOST_LAYERS:
            raise BadConfig(f"stage_depths={self.stage_depths}: between 1 and {MOST_LAYERS} layers")
        if self.text_dim % (2 * self.heads) or self.layer_type not in ("basic", "bottleneck"):
            raise BadConfig(
                f"text_dim={self.text_dim} must divide by 2·heads={2 * self.heads}; "
                f"layer_type={self.layer_type!r} must be basic or bottleneck"
            )
        for name in ("pool", "quality_pool"):
            if getattr(self, name) not in ("mean", "peak", "high"):
                raise BadConfig(f"{name}={getattr(self, name)!r}: choose mean, peak or high")
        if self.class_weights and (len(self.class_weights) != len(self.categories) or min(self.class_weights) <= 0):
            raise BadConfig(f"class_weights={self.class_weights}: one above 0 for each of {', '.join(self.categories)}")
        if min(self.sizes) < 16 or self.sizes[0] > self.sizes[1]:
            raise BadConfig(f"sizes={self.sizes}: coarse and fine pixels, ascending, at least 16")

    @classmethod
    def tiny(cls, **changes: Any) -> AuditorConfig:
        """A small shape of the same network, for tests and the embedded default; maps are size/8."""
        shape: dict[str, Any] = {
            "stem_channels": 16,
            "stage_channels": (16, 32),
            "stage_depths": (1, 1),
            "layer_type": "basic",
            "text_dim": 32,
            "embed_dim": 256,
            "heads": 4,
            "time_dims": (16, 16, 32),
            "seam_channels": 16,
            "strength_hidden": (32, 16),
            "sizes": (64, 128),
        }
        return cls(**{**shape, **changes})

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> AuditorConfig:
        try:
            shape: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
            return cls(**shape)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise BadConfig(f"auditor config: {error}") from error


class Text(NamedTuple):
    """An encoded prompt: f_text, S_seq and the padding mask."""

    vector: Float[Tensor, "b d"]
    sequence: Float[Tensor, "b l d"]
    padding: Bool[Tensor, "b l"]


class Scores(NamedTuple):
    """Raw outputs of one forward pass; logits where a loss wants logits."""

    adv_logit: Float[Tensor, " b"]
    adv_map: Float[Tensor, "b h w"]
    class_logits: Float[Tensor, "b c"]
    class_maps: Float[Tensor, "b c h w"]
    strength: Float[Tensor, " b"]
    quality: Float[Tensor, " b"]
    image_embed: Float[Tensor, "b e"]
    text_embed: Float[Tensor, "b e"]
    f_text: Float[Tensor, "b d"]
    cosine: Float[Tensor, " b"]
    seam_map: Float[Tensor, "b h w"]


class Film(nn.Module):
    """Feature-wise modulation (1 + γ) ⊙ x + β by the time embedding."""

    def __init__(self, time_dim: int, channels: int) -> None:
        super().__init__()
        self.project = nn.Linear(time_dim, 2 * channels)

    def forward(self, x: Float[Tensor, "b c *s"], time: Float[Tensor, "b t"]) -> Float[Tensor, "b c *s"]:
        gamma, beta = self.project(time).chunk(2, dim=1)
        shape = (*gamma.shape, *[1] * (x.dim() - 2))
        return (1 + gamma.view(shape)) * x + beta.view(shape)


def pooled(maps: Float[Tensor, "*n u v"], how: str) -> Float[Tensor, "*n"]:
    """A logit from a map of logits: its mean, a smooth maximum, or the mean of its high cells however few they are."""
    if how == "mean":
        return maps.mean((-2, -1))
    cells = maps.flatten(-2)
    if how == "high":
        return (cells.softmax(-1) * cells).sum(-1)
    return cells.logsumexp(-1) - math.log(cells.shape[-1])


class AuditorScorer(nn.Module):
    """Trigger, localise and score. Implements the `Auditor` protocol."""

    kind: ClassVar[str] = "auditor-scorer"
    absent: frozenset[str] = frozenset()
    f_slope: Tensor
    f_offset: Tensor
    mean: Tensor
    std: Tensor

    def __init__(self, config: AuditorConfig | None = None, tokenizer: Tokenizer | None = None) -> None:
        super().__init__()
        from transformers import ResNetConfig, ResNetModel

        self.config = config = config or AuditorConfig()
        self.categories, self.sizes = config.categories, config.sizes
        self.embeds = config.embed_dim, config.text_dim
        self.tokenizer = tokenizer or default_tokenizer()
        if self.tokenizer.get_vocab_size() > config.vocab_size:
            raise BadConfig(f"tokenizer has {self.tokenizer.get_vocab_size()} tokens, vocab_size={config.vocab_size}")
        channels, d = config.stage_channels[-1], config.text_dim
        self.backbone = ResNetModel(
            ResNetConfig(
                embedding_size=config.stem_channels,
                hidden_sizes=list(config.stage_channels),
                depths=list(config.stage_depths),
                layer_type=config.layer_type,
            )
        ).to(memory_format=torch.channels_last)
        self.text = TextEncoder(config.vocab_size, d)
        self.query = nn.Conv2d(channels, d, 1)
        self.query_norm, self.key_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attention = nn.MultiheadAttention(d, config.heads, batch_first=True)
        t1, t2, t3 = config.time_dims
        self.time = nn.Sequential(
            nn.Linear(1, t1), nn.SiLU(), nn.Linear(t1, t2), nn.SiLU(), nn.Linear(t2, t3), nn.SiLU()
        )
        self.adv_head = nn.Conv2d(channels, 1, 1)
        self.class_head = nn.Conv2d(channels, len(config.categories), 1)
        self.strength_film = Film(t3, channels)
        s1, s2 = config.strength_hidden
        self.strength_head = nn.Sequential(
            nn.Linear(channels, s1),
            nn.SiLU(),
            nn.Dropout(config.dropout),
            nn.Linear(s1, s2),
            nn.SiLU(),
            nn.Dropout(config.dropout),
            nn.Linear(s2, 1),
        )
        self.seam_conv = nn.Conv2d(channels, config.seam_channels, 3, padding=1)
        self.seam_film = Film(t3, config.seam_channels)
        self.seam_head = nn.Sequential(
            nn.SiLU(), nn.Conv2d(config.seam_channels, config.seam_channels // 2, 1), nn.SiLU()
        )
        self.seam_out = nn.Linear(config.seam_channels // 2, 1)
        e = config.embed_dim
        self.image_proj = nn.Sequential(nn.Linear(d, d), nn.SiLU(), nn.Linear(d, e))
        self.text_proj = nn.Sequential(nn.Linear(d, d), nn.SiLU(), nn.Linear(d, e))
        self.log_temperature = nn.Parameter(torch.tensor(0.07).log())
        self.register_buffer("f_slope", torch.tensor(4.0))
        self.register_buffer("f_offset", torch.tensor(0.0))
        self.register_buffer("mean", torch.tensor(IMAGENET_MEAN).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(IMAGENET_STD).view(1, 3, 1, 1), persistent=False)
        self._encoded: OrderedDict[str, Text] = OrderedDict()
        self._encoded_lock = threading.Lock()
        self.stages_seen = StagesSeen()

    @property
    def device(self) -> torch.device:
        return self.f_slope.device

    def normalised(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b 3 h w"]:
        """ImageNet statistics; channels last, a quarter faster on CPUs and what GPUs want."""
        return ((images - self.mean) / self.std).contiguous(memory_format=torch.channels_last)

    def features(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b c u v"]:
        """F_vis of images in [0, 1]."""
        return self.backbone(self.normalised(images)).last_hidden_state

    def stages(self, images: Float[Tensor, "b 3 h w"]) -> list[Tensor]:
        """Feature maps of the stem and of every stage, for the seam metric."""
        out = self.backbone(self.normalised(images), output_hidden_states=True)
        return list(out.hidden_states)

    def forward(self, images: Float[Tensor, "b 3 h w"], ids: Int[Tensor, "b l"], noise: Float[Tensor, " b"]) -> Scores:
        return self.heads(self.features(images), Text(*self.text(ids)), noise)

    def heads(self, visual: Float[Tensor, "b c u v"], text: Text, noise: Float[Tensor, " b"]) -> Scores:
        """All heads on given backbone features (Grad-CAM differentiates from here)."""
        f_text, sequence, padding = text
        time = self.time(noise[:, None])
        adv = self.adv_head(visual)[:, 0]
        classes = self.class_head(visual)
        strength = self.strength_head(self.strength_film(visual.mean((2, 3)), time))[:, 0]
        seam = self.seam_head(self.seam_film(self.seam_conv(visual), time))
        seam_map = self.seam_out(seam.movedim(1, -1))[..., 0]
        queries = self.query_norm(self.query(visual).flatten(2).transpose(1, 2))
        keys = self.key_norm(sequence)
        attended, _ = self.attention(queries, keys, keys, key_padding_mask=padding, need_weights=False)
        image_embed = F.normalize(self.image_proj(attended.mean(1)), dim=1)
        text_embed = F.normalize(self.text_proj(f_text), dim=1)
        return Scores(
            adv_logit=pooled(adv, self.config.pool),
            adv_map=adv,
            class_logits=pooled(classes, self.config.pool),
            class_maps=classes,
            strength=strength.sigmoid(),
            quality=(-pooled(-seam_map, self.config.quality_pool)).sigmoid(),
            image_embed=image_embed,
            text_embed=text_embed,
            f_text=f_text,
            cosine=(image_embed * text_embed).sum(1),
            seam_map=seam_map,
        )

    def unweighted(self, class_logits: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        """Logits without the weights of the loss, where the configuration names them."""
        if not self.config.class_weights:
            return class_logits
        return class_logits - class_logits.new_tensor(self.config.class_weights).log()

    def probabilities(self, class_logits: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        """The probability of every category."""
        return self.unweighted(class_logits).softmax(1)

    def stages_of(self, images: Float[Tensor, "b 3 h w"]) -> list[Tensor]:
        """`stages` of pictures in fp32, without another pass for those that were audited just before."""
        found = self.stages_seen.recall(images)
        return self.stages(images) if found is None else found

    def train(self, mode: bool = True) -> AuditorScorer:
        self._encoded.clear()
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> AuditorScorer:
        """Clear the encoded prompts, because the module is moved or cast."""
        self._encoded.clear()
        return super()._apply(*args, **kwargs)

    def encode_prompts(self, prompts: Sequence[str | None]) -> Text:
        """Encoded prompts for scoring; each is encoded once and remembered (the latest 64)."""
        device = self.device
        words = [p or "" for p in prompts]
        found: dict[str, Text] = {}
        for w in dict.fromkeys(words):
            kept = self._encoded.get(w)
            found[w] = kept if kept is not None else Text(*self.text(self.token_ids([w]).to(device)))
        with self._encoded_lock:
            self._encoded.update(found)
            while len(self._encoded) > 64:
                self._encoded.popitem(last=False)
        rows = [found[w] for w in words]
        width = max(r.padding.shape[1] for r in rows)
        return Text(
            torch.cat([r.vector for r in rows]),
            torch.cat([F.pad(r.sequence, (0, 0, 0, width - r.padding.shape[1])) for r in rows]),
            torch.cat([F.pad(r.padding, (0, width - r.padding.shape[1]), value=True) for r in rows]),
        )

    def token_ids(self, prompts: Sequence[str | None]) -> Int[Tensor, "b l"]:
        return token_batch(self.tokenizer, [p or "" for p in prompts], self.config.max_tokens)

    @torch.no_grad()
    def audit(self, images: Float[Tensor, "b 3 h w"], prompts: Sequence[str | None], noise: float) -> list[Audit]:
        """One pass over a batch of views in [0, 1], scored in fp32."""
        device = self.device
        images = images.to(device, torch.float32)
        with torch.autocast(device.type, enabled=False):
            times = torch.full((len(images),), noise, device=device)
            stages = self.stages(images)
            self.stages_seen.keep(images, stages)
            s = self.heads(stages[-1], self.encode_prompts(prompts), times)
            adv, probs = s.adv_logit.sigmoid(), self.probabilities(s.class_logits)
            faith = (self.f_slope * s.cosine + self.f_offset).sigmoid()
            safety = torch.minimum(1 - adv, probs[:, 0])
            maps, class_maps = s.adv_map.sigmoid().cpu(), s.class_maps.softmax(1).cpu()
        return [
            Audit(
                adv_prob=float(adv[i]),
                probs=dict(zip(self.categories, probs[i].tolist(), strict=True)),
                safety=float(safety[i]),
                faithfulness=None if prompts[i] is None else float(faith[i]),
                quality=float(s.quality[i]),
                suppression=1.0 - float(s.strength[i]),
                adv_map=maps[i],
                class_maps=dict(zip(self.categories, class_maps[i], strict=True)),
                image_embed=s.image_embed[i].cpu(),
                text_embed=None if prompts[i] is None else s.f_text[i].cpu(),
                pixels=min(images.shape[-2:]),
            )
            for i in range(len(images))
        ]

    def identity(self) -> str:
        """SHA-256 of weights and configuration: what thresholds are calibrated for."""
        whole = fingerprint(self) + json.dumps(asdict(self.config), sort_keys=True)
        return hashlib.sha256(whole.encode()).hexdigest()

    def options(self) -> JsonDict:
        """None: config.json beside the weights holds the whole configuration."""
        return {}

    def digest(self) -> str:
        """The same as `identity`, under the name that every part has."""
        return self.identity()

    def with_levels(self, levels: Mapping[str, float]) -> AuditorScorer:
        """The auditor itself for no levels; its thresholds are those of the policy and of calibration."""
        if levels:
            raise BadConfig(
                f"levels {dict(levels)}: an AuditorScorer has none; calibrate it, or put it into an Ensemble"
            )
        return self

    def save_pretrained(self, directory: str | Path, dtype: torch.dtype | None = None) -> None:
        """config.json, model.safetensors, tokenizer.json."""
        directory = Path(directory)
        save_module(self, {"kind": "AuditorScorer", **asdict(self.config)}, directory, dtype)
        save_tokenizer(self.tokenizer, directory / "tokenizer.json")

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> AuditorScorer:
        directory = Path(directory)
        config = AuditorConfig.from_dict(read_shape(directory, "AuditorScorer"))
        tokenizer = load_tokenizer(directory / "tokenizer.json")
        return loaded(lambda: cls(config, tokenizer), directory).eval()
