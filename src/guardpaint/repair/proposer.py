"""The learned proposer: state encoder, policy MLP, hybrid continuous/discrete actions."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from guardpaint.config import GateSettings
from guardpaint.errors import BadConfig
from guardpaint.repair.knobs import CONTINUOUS, SEED_BUCKETS, denormalise
from guardpaint.store.checkpoint import fingerprint, loaded, read_shape, save_module
from guardpaint.store.seeds import generator
from guardpaint.types import JsonDict, Knobs, ProposerState

POOL = 4
LOG_STD = (-4.0, 0.5)


@dataclass(frozen=True)
class ProposerConfig:
    text_dim: int = 512
    image_dim: int = 256
    latent_channels: int = 16
    """The most that any base has; latents with fewer channels are padded with zeros."""
    projection: int = 64
    hidden: tuple[int, int, int] = (256, 128, 64)
    gate: GateSettings | None = None
    """The gates of the utility that it was trained for; None if it was not trained, or nobody wrote them down."""

    @property
    def state_dim(self) -> int:
        return 4 * self.projection + 1


class Actions(NamedTuple):
    """n sampled knob sets and how likely they were."""

    unclipped: Float[Tensor, "n 5"]
    buckets: Int[Tensor, " n"]
    log_prob: Float[Tensor, " n"]


def _orthogonal(module: nn.Module, gain: float) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.orthogonal_(layer.weight, gain=gain)
            nn.init.zeros_(layer.bias)


class StateEncoder(nn.Module):
    """Text, latent, image and coverage, 64 each, plus progress: 257 numbers."""

    def __init__(self, config: ProposerConfig) -> None:
        super().__init__()
        self.config = config
        p = config.projection
        self.text = nn.Linear(config.text_dim, p)
        self.latent = nn.Linear(POOL * POOL * config.latent_channels, p)
        self.image = nn.Linear(config.image_dim, p)
        self.coverage = nn.Linear(1, p)
        _orthogonal(self, 0.1)

    def forward(
        self,
        text: Float[Tensor, "b t"],
        latent: Float[Tensor, "b c h w"],
        image: Float[Tensor, "b e"],
        coverage: Float[Tensor, "b 1"],
        progress: Float[Tensor, "b 1"],
    ) -> Float[Tensor, "b s"]:
        pooled = fold_channels(F.adaptive_avg_pool2d(latent, POOL), self.config.latent_channels).flatten(1)
        parts = [self.text(text), self.latent(pooled), self.image(image), self.coverage(coverage)]
        return torch.cat([*(F.relu(p) for p in parts), progress], dim=1)


def fold_channels(x: Float[Tensor, "b c h w"], channels: int) -> Float[Tensor, "b k h w"]:
    """One proposer for every latent space: missing channels are zeros.

    A proposer that was trained on bases with fewer channels than this latent sees averages of groups of them.
    """
    c = x.shape[1]
    if c == channels:
        return x
    if c < channels:
        return F.pad(x, (0, 0, 0, 0, 0, channels - c))
    if c % channels:
        raise BadConfig(f"{c} latent channels do not fold into {channels}")
    return x.view(x.shape[0], channels, c // channels, *x.shape[2:]).mean(2)


class TournamentProposer(nn.Module):
    """π(a | s) over five continuous knobs and a seed bucket. Implements the `Proposer` protocol."""

    name = "learned"
    kind: ClassVar[str] = "learned"

    def __init__(self, config: ProposerConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or ProposerConfig()
        self.encoder = StateEncoder(config)
        layers: list[nn.Module] = []
        width = config.state_dim
        for hidden in config.hidden:
            layers += [nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.SiLU()]
            width = hidden
        self.trunk = nn.Sequential(*layers)
        self.mean = nn.Linear(width, len(CONTINUOUS))
        self.log_std = nn.Linear(width, len(CONTINUOUS))
        self.seed = nn.Linear(width, SEED_BUCKETS)
        for module in (self.trunk, self.mean, self.log_std, self.seed):
            _orthogonal(module, 0.01)

    def forward(
        self, state: Float[Tensor, "b s"]
    ) -> tuple[Float[Tensor, "b 5"], Float[Tensor, "b 5"], Float[Tensor, "b 10"]]:
        """Mean, log-std and seed logits."""
        h = self.trunk(state)
        return self.mean(h).sigmoid(), self.log_std(h).clamp(*LOG_STD), self.seed(h)

    def encode(self, state: ProposerState) -> Float[Tensor, "1 s"]:
        device = self.mean.weight.device
        text = state.text_embed if state.text_embed is not None else torch.zeros(self.config.text_dim)
        return self.encoder(
            text[None].to(device),
            state.latent[None].to(device),
            state.image_embed[None].to(device),
            torch.tensor([[state.coverage]], device=device),
            torch.tensor([[state.progress]], device=device),
        )

    def sample(self, state: Float[Tensor, "1 s"], n: int, g: torch.Generator) -> Actions:
        """n actions with the log-probability of the pre-clip sample; noise comes from `g` alone.

        One candidate is drawn after the other, so that few are a prefix of many.
        """
        mean, log_std, logits = self(state)
        chances = logits.softmax(1)[0].detach().cpu()
        drawn = [
            (torch.randn(mean.shape[1], generator=g), torch.multinomial(chances, 1, generator=g)) for _ in range(n)
        ]
        unclipped = mean + log_std.exp() * torch.stack([noise for noise, _ in drawn]).to(mean)
        buckets = torch.cat([bucket for _, bucket in drawn])
        return Actions(unclipped, buckets, self.log_prob(state, unclipped, buckets))

    def log_prob(
        self, state: Float[Tensor, "1 s"], unclipped: Float[Tensor, "n 5"], buckets: Int[Tensor, " n"]
    ) -> Float[Tensor, " n"]:
        mean, log_std, logits = self(state)
        normal = torch.distributions.Normal(mean, log_std.exp(), validate_args=False)
        return normal.log_prob(unclipped).sum(1) + logits.log_softmax(1)[0][buckets.to(logits.device)]

    @torch.no_grad()
    def propose(self, state: ProposerState, n: int, seed: int) -> tuple[Knobs, ...]:
        actions = self.sample(self.encode(state), n, generator(seed, "proposer"))
        return tuple(denormalise(a.cpu(), b) for a, b in zip(actions.unclipped, actions.buckets.tolist(), strict=True))

    def options(self) -> JsonDict:
        return {}

    def digest(self) -> str:
        return fingerprint(self)

    def save_pretrained(self, directory: str | Path, dtype: torch.dtype | None = None) -> None:
        save_module(self, {"kind": "TournamentProposer", **asdict(self.config)}, Path(directory), dtype)

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> TournamentProposer:
        directory = Path(directory)
        shape = read_shape(directory, "TournamentProposer")
        if shape.get("gate") is not None:
            shape = {**shape, "gate": GateSettings.from_dict(shape["gate"])}
        return loaded(lambda: cls(ProposerConfig(**shape)), directory).eval()
