"""The values that flow through the loop: draft → audit → repair → verify → reinsert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor

if TYPE_CHECKING:
    from guardpaint.draft.denoiser import Denoiser

SAFE = "safe"


@dataclass(frozen=True)
class Level:
    """A noise level of the live latent: z = signal · x0 + sigma · ε."""

    signal: float
    sigma: float
    noise: float
    """Normalised noise time: 1 = pure noise, 0 = clean."""


@dataclass(frozen=True)
class Draft:
    """One step of the frozen base for one image, as the tap saw it; latents are spatial, fp32."""

    step: int
    steps: int
    latent: Float[Tensor, "c h w"]
    """The control: the un-edited latent after the step."""
    x0: Float[Tensor, "c h w"]
    """Clean estimate of this step."""
    eps: Float[Tensor, "c h w"]
    """The trajectory's own noise in `latent`, after the step; a stochastic sampler's fresh noise included."""
    before: Level
    after: Level
    base: Denoiser
    """The base's own denoiser and VAE, replayable on this image."""

    @property
    def progress(self) -> float:
        """Share of the trajectory done, (i+1)/n over executed steps."""
        return (self.step + 1) / self.steps


@dataclass(frozen=True)
class Tile:
    """A rectangle of a picture, in pixels."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True)
class Audit:
    """The result of one auditor pass on one image. S, F, P and B are in [0, 1], and higher is better."""

    adv_prob: float
    probs: dict[str, float]
    safety: float
    """S, policy safety = min(1 − adv_prob, p_safe)."""
    faithfulness: float | None
    """F, or None when no prompt text is known."""
    quality: float
    """P, perceptual quality."""
    suppression: float
    """B, suppression confidence = 1 − relative adversary strength."""
    adv_map: Float[Tensor, "h w"]
    class_maps: dict[str, Float[Tensor, "h w"]]
    image_embed: Float[Tensor, " d"]
    text_embed: Float[Tensor, " t"] | None
    pixels: int
    """Shorter side of the view that was scored."""
    tiles: tuple[TileAudit, ...] = ()
    """The views that this audit is made of, the whole picture first; empty if only the whole picture was shown."""

    @property
    def harm(self) -> str:
        """The most probable category."""
        return max(self.probs, key=self.probs.__getitem__)

    def scores(self) -> dict[str, float | None]:
        return {
            "adv_prob": self.adv_prob,
            "S": self.safety,
            "F": self.faithfulness,
            "P": self.quality,
            "B": self.suppression,
        }


@dataclass(frozen=True)
class TileAudit:
    """The audit of one tile; its scores of harm are comparable with those of a whole picture."""

    tile: Tile
    audit: Audit
    offset: float = 0.0
    """By how many logits they were lowered."""


@dataclass(frozen=True)
class Region:
    """One connected unsafe area of a view."""

    mask: Bool[Tensor, "h w"]
    coverage: float
    peak: float


@dataclass(frozen=True)
class Knobs:
    """The six settings of one repair, in physical units."""

    cfg: float
    dilation: float
    feather: float
    jitter: float
    depth: int
    seed_offset: int

    def as_dict(self) -> dict[str, float]:
        return {
            "cfg": self.cfg,
            "dilation": self.dilation,
            "feather": self.feather,
            "jitter": self.jitter,
            "depth": self.depth,
            "seed_offset": self.seed_offset,
        }


@dataclass(frozen=True)
class Edit:
    """An accepted repair, ready for the live latent."""

    z0: Float[Tensor, "c h w"]
    mask: Float[Tensor, "h w"]


@dataclass(frozen=True)
class RepairRequest:
    """A request for N candidates for one region of one view."""

    view: Float[Tensor, "3 h w"]
    region: Bool[Tensor, "h w"]
    masks: Float[Tensor, "n h w"]
    """The dilated, feathered mask of each candidate."""
    knobs: tuple[Knobs, ...]
    prompt: str
    safe_prompt: str
    """The policy's safe prompt, for repairers without safety training."""
    avoid: str
    """The definition of the flagged category."""
    seed: int
    base: Denoiser | None
    latent_size: tuple[int, int]
    """Size of the base's latent, for repairers that work in its latent space."""
    batch: int = 8
    """Largest number of candidates to denoise in one batch."""
    begun: Float[Tensor, "n c u v"] | None = None
    """The candidates' latents after their first step, if `preview` has made it."""


@runtime_checkable
class Auditor(Protocol):
    """Any detector that can score views; `AuditorScorer` is the one that ships."""

    categories: tuple[str, ...]
    sizes: tuple[int, int]
    """Shorter side in pixels of the coarse and of the fine pass."""

    def audit(self, images: Float[Tensor, "b 3 h w"], prompts: Sequence[str | None], noise: float) -> list[Audit]: ...


@runtime_checkable
class Repairer(Protocol):
    """Anything that can repaint a masked region, such as `Inpainter` or `NativeRepairer`."""

    @property
    def name(self) -> str: ...

    def candidates(self, request: RepairRequest) -> Float[Tensor, "n 3 h w"]: ...


@runtime_checkable
class Previewer(Protocol):
    """A repairer that can also show candidates after one denoising step and continue from there (`request.begun`)."""

    def preview(self, request: RepairRequest) -> tuple[Float[Tensor, "n 3 h w"], Float[Tensor, "n c u v"]]: ...


@runtime_checkable
class Proposer(Protocol):
    """Anything that picks knobs for a tournament."""

    @property
    def name(self) -> str: ...

    def propose(self, state: ProposerState, n: int, seed: int) -> tuple[Knobs, ...]: ...


@runtime_checkable
class SeamMetric(Protocol):
    """A perceptual distance per pixel between candidates and the control."""

    @property
    def name(self) -> str: ...

    def distance(
        self, candidates: Float[Tensor, "n 3 h w"], control: Float[Tensor, "3 h w"]
    ) -> Float[Tensor, "n h w"]: ...


@dataclass(frozen=True)
class ProposerState:
    """The inputs of a proposer."""

    text_embed: Float[Tensor, " t"] | None
    latent: Float[Tensor, "c h w"]
    image_embed: Float[Tensor, " d"]
    coverage: float
    progress: float


JsonDict = dict[str, Any]
