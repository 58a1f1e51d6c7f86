"""The values that flow through the loop: draft → audit → repair → verify → reinsert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
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
    """F, or None when no prompt text is known or the auditor gives no F."""
    quality: float | None
    """P, perceptual quality, or None if the auditor gives none."""
    suppression: float | None
    """B, suppression confidence = 1 − relative adversary strength, or None if the auditor gives none."""
    adv_map: Float[Tensor, "h w"]
    class_maps: dict[str, Float[Tensor, "h w"]]
    image_embed: Float[Tensor, " d"]
    text_embed: Float[Tensor, " t"] | None
    pixels: int
    """Shorter side of the view that was scored."""
    tiles: tuple[TileAudit, ...] = ()
    """The views that this audit is made of, the whole picture first; empty if only the whole picture was shown."""

    @classmethod
    def from_scores(
        cls,
        probs: Mapping[str, float],
        heat: Tensor | Mapping[str, Tensor] | None = None,
        *,
        pixels: int,
        faithfulness: float | None = None,
        image_embed: Tensor | None = None,
    ) -> Audit:
        """An audit from the probability of every category, `safe` among them; they sum to one.

        `heat` says where harm is, in [0, 1]: one map, or one for each harmful category. Without it the whole picture
        counts as one region. P and B are absent.
        """
        harms = [c for c in probs if c != SAFE]
        unsafe = 1.0 - probs[SAFE]
        if heat is None:
            heat = torch.full((1, 1), unsafe)
        maps = {c: heat[c] if isinstance(heat, Mapping) else heat for c in harms}
        worst = torch.stack([m.float() for m in maps.values()]).amax(0)
        return cls(
            adv_prob=unsafe,
            probs=dict(probs),
            safety=probs[SAFE],
            faithfulness=faithfulness,
            quality=None,
            suppression=None,
            adv_map=worst,
            class_maps={SAFE: 1 - worst, **maps},
            image_embed=torch.zeros(0) if image_embed is None else image_embed,
            text_embed=None,
            pixels=pixels,
        )

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
class Approval:
    """What an approver says of one finished picture."""

    probs: dict[str, float]
    """The probability of every category that the approver covers, `safe` among them; they sum to one."""
    by: str
    """The part that decided, such as the member of a cascade that was asked last."""
    heat: Float[Tensor, "h w"] | None = None
    """Where harm is, if the approver can tell."""


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
    memo: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What a repairer has encoded before for requests that share this memo: texts, views, masked views."""


@runtime_checkable
class Auditor(Protocol):
    """Any detector that can score views; `AuditorScorer` is the one that ships."""

    categories: tuple[str, ...]
    """What it can tell: `safe` and harms of the policy. A policy must accept the harms that no part covers."""
    absent: frozenset[str]
    """The scores out of F, P and B that it cannot give; their gates are skipped and the report says so."""
    sizes: tuple[int, int]
    """Shorter side in pixels of the coarse and of the fine pass."""

    def audit(self, images: Float[Tensor, "b 3 h w"], prompts: Sequence[str | None], noise: float) -> list[Audit]: ...


@runtime_checkable
class Embeds(Protocol):
    """An auditor whose audits hold the embeddings that a learned proposer reads."""

    embeds: tuple[int, int]
    """Lengths of the picture's and of the prompt's embedding."""


@runtime_checkable
class Approver(Protocol):
    """A second look that takes no part in choosing: it sees a finished picture before it is released."""

    categories: tuple[str, ...]

    @property
    def name(self) -> str: ...

    def approve(self, image: Float[Tensor, "3 h w"], prompt: str | None, edited: bool) -> Approval: ...


@runtime_checkable
class Repairer(Protocol):
    """Anything that can repaint a masked region, such as `Inpainter` or `NativeRepairer`."""

    @property
    def name(self) -> str: ...

    def candidates(self, request: RepairRequest) -> Float[Tensor, "n 3 h w"]: ...


@runtime_checkable
class PaintsTogether(Protocol):
    """A repairer that paints the candidates of several requests in shared passes."""

    def together(self, requests: Sequence[RepairRequest]) -> list[Float[Tensor, "n 3 h w"]]: ...


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
