"""The model that alignment trains: a UNet with a LoRA, compared with the same UNet without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from guardpaint.errors import BadConfig
from guardpaint.train import alignment_loss as L

METHODS = ("sft", "kto", "bco")
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out")
CONVOLUTIONS = ("conv1", "conv2")
INPUT = ("conv_in",)
UNROLL = 10
"""Timesteps of the second pass's unrolling, and its divisor for the timestep that follows."""
BANDS = ((0, 100), (100, 500), (500, 1000))
"""Timestep ranges whose noise error is logged separately."""


@dataclass(frozen=True)
class AlignConfig:
    """Options of one alignment stage.

    The defaults are the BCO recipe; `weighting` and the fields after it select variants for baselines and ablations.
    """

    method: str = "bco"
    rank: int = 128
    dropout: float = 0.10
    """Share of samples trained with an empty prompt; the KTO baseline uses 0.30."""
    mixture: tuple[int, ...] = (8, 4, 4)
    """Proportions of safe, nudity and violence samples in a batch of KTO or BCO."""
    target_share: float = 0.5
    """Share of the safe samples that are repaired pictures with the unsafe prompt; the others are ordinary pictures."""
    unroll_every: int = 10
    """Steps between BCO's second passes; 0 turns them off."""
    checkpointing: bool = False
    """Save memory by recomputing activations in the backward pass."""
    weighting: str = "min_snr"
    """Weight of SFT's error by noise level: min_snr or uniform."""
    cap: str = "exploit_side"
    """How the gain of unsafe samples is bounded (`alignment_loss.capped`): exploit_side or printed."""
    reference: str = "frozen"
    """frozen, or refresh: a copy of the policy becomes the reference every `refresh_every` steps."""
    refresh_every: int = 500
    reward: str = "x0"
    """Whether rewards compare clean estimates (x0) or noise predictions (eps)."""
    identity: str = "hinge"
    """Shape of the identity loss (`alignment_loss.identity_loss`): hinge, batch (for KTO) or linear."""
    freeze: str = "none"
    """Which convolutions get no LoRA: none, conv_in or convs."""

    def __post_init__(self) -> None:
        choices = {
            "method": METHODS,
            "weighting": ("min_snr", "uniform"),
            "cap": ("exploit_side", "printed"),
            "reference": ("frozen", "refresh"),
            "reward": ("x0", "eps"),
            "identity": ("hinge", "batch", "linear"),
            "freeze": ("none", "conv_in", "convs"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise BadConfig(f"{name}={getattr(self, name)!r}: choose {', '.join(known)}")
        if self.rank < 1 or len(self.mixture) != 3 or not 0 <= self.dropout <= 1 or not 0 <= self.target_share <= 1:
            raise BadConfig(
                f"rank={self.rank} must be at least 1, mixture={self.mixture} three counts, "
                f"dropout={self.dropout} and target_share={self.target_share} in [0, 1]"
            )

    def targets(self) -> list[str]:
        """Names of the modules that get a LoRA."""
        convs = {"none": CONVOLUTIONS + INPUT, "conv_in": CONVOLUTIONS, "convs": ()}[self.freeze]
        return [*ATTENTION, *convs]


@dataclass(frozen=True)
class AlignmentBatch:
    """Samples of (z0, m, z̃0, prompt, y) with their timesteps and noise."""

    z0: Float[Tensor, "b c h w"]
    """Clean latents."""
    mask: Float[Tensor, "b 1 h w"]
    """1 in the area to paint."""
    masked: Float[Tensor, "b c h w"]
    """z̃0: latents of the pictures with the masked area greyed out."""
    ids: Int[Tensor, "b l"]
    """Prompts as token ids."""
    category: Int[Tensor, " b"]
    """Index into the policy's categories; 0 is safe."""
    t: Int[Tensor, " b"]
    eps: Float[Tensor, "b c h w"]
    """Noise of the first pass."""
    again: Float[Tensor, "b c h w"]
    """Noise of the second pass."""

    @property
    def desired(self) -> Bool[Tensor, " b"]:
        """True for safe samples."""
        return self.category == 0

    def rows(self, index: Bool[Tensor, " b"]) -> AlignmentBatch:
        """The samples that `index` selects."""
        return AlignmentBatch(**{k: v[index] for k, v in vars(self).items()})


class Aligner(nn.Module):
    """A UNet with a LoRA (the policy), its frozen text encoder and the reward's running shift `delta`."""

    def __init__(
        self,
        unet: nn.Module,
        text: nn.Module,
        alphas: Tensor,
        config: AlignConfig,
        seed: int,
        accumulate: int = 1,
    ) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model

        self.config, self.accumulate = config, accumulate
        shape = LoraConfig(r=config.rank, lora_alpha=config.rank, target_modules=config.targets())
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.unet: Any = get_peft_model(unet, shape)
            if config.reference == "refresh":
                self.unet.add_adapter("reference", shape)
                self.unet.set_adapter("default")
        if config.checkpointing:
            inner: Any = self.unet.get_base_model()
            inner.enable_gradient_checkpointing()
        self.text = text.requires_grad_(False).eval()
        self.alphas: Tensor
        self.register_buffer("alphas", alphas, persistent=False)
        self.register_buffer("delta", torch.zeros(()))
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))
        self.delta: Tensor
        self.batches: Tensor

    @property
    def steps(self) -> int:
        """Number of optimiser steps begun; each has `accumulate` batches."""
        return -(-int(self.batches) // self.accumulate)

    def kept_state(self) -> dict[str, Tensor]:
        """Adapter weights and running statistics; the frozen weights come from the model that the run starts from."""
        return {k: v for k, v in self.state_dict().items() if "lora_" in k or k in ("delta", "batches")}

    def predict(self, z: Tensor, t: Tensor, batch: AlignmentBatch) -> Float[Tensor, "b c h w"]:
        """The policy's noise prediction."""
        states = self.text(batch.ids)[0]
        return self.unet(torch.cat([z, batch.mask, batch.masked], 1), t, encoder_hidden_states=states).sample

    @torch.no_grad()
    def reference(self, z: Tensor, t: Tensor, batch: AlignmentBatch) -> Float[Tensor, "b c h w"]:
        """The reference's noise prediction for the same batch."""
        with self.as_reference():
            return self.predict(z, t, batch)

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Makes the UNet act as the reference inside a with block."""
        if self.config.reference == "frozen":
            with self.unet.disable_adapter():
                yield
            return
        self.unet.set_adapter("reference")
        try:
            yield
        finally:
            self.unet.set_adapter("default")

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the policy's adapter into the reference's."""
        own = self.unet.state_dict()
        for name, value in own.items():
            if ".reference." in name:
                value.copy_(own[name.replace(".reference.", ".default.")])

    def noised(self, z0: Tensor, t: Tensor, eps: Tensor) -> Float[Tensor, "b c h w"]:
        """z_t = √ᾱ z0 + √(1−ᾱ) ε."""
        a = self.alphas[t].view(-1, 1, 1, 1)
        return a.sqrt() * z0 + (1 - a).sqrt() * eps

    def forward(self, batch: AlignmentBatch) -> Iterator[dict[str, Tensor]]:
        """The losses of a batch in one or two parts, which the engine adds up."""
        if self.training:
            self.batches += 1
        if self.config.method == "sft":
            yield self.sft(batch)
            return
        refreshes = self.config.reference == "refresh" and int(self.batches) % self.accumulate == 0
        if self.training and refreshes and self.steps % self.config.refresh_every == 0:
            self.refresh()
        every = self.config.unroll_every if self.config.method == "bco" else 0
        late = batch.t >= UNROLL
        second = bool(every) and self.steps % every == 0 and bool(late.any())
        if not second:
            yield {**self.first_pass(batch, 1.0), "preference_unrolled": torch.tensor(float("nan"))}
            return
        yield self.first_pass(batch, 0.5)
        yield self.second_pass(batch.rows(late))

    def sft(self, batch: AlignmentBatch) -> dict[str, Tensor]:
        """The supervised loss: weighted noise error on safe targets."""
        out = self.predict(self.noised(batch.z0, batch.t, batch.eps), batch.t, batch)
        alpha = self.alphas[batch.t]
        weight = L.min_snr_weight(alpha, 5.0) if self.config.weighting == "min_snr" else torch.ones_like(alpha)
        return {"loss": L.sft_loss(out, batch.eps, weight), "mse": ((out - batch.eps) ** 2).mean()}

    def preference(
        self, z: Tensor, t: Tensor, batch: AlignmentBatch, eps: Tensor, move: bool
    ) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor, Tensor]:
        """The preference loss at one noise level, values to log, the policy's noise and both clean estimates.

        `move` updates the running shift.
        """
        policy, reference = self.predict(z, t, batch), self.reference(z, t, batch)
        alpha, desired = self.alphas[t], batch.desired
        clean, anchor = (L.clean_estimate(z, e, alpha) for e in (policy, reference))
        pair = (clean, anchor, batch.z0) if self.config.reward == "x0" else (policy, reference, eps)
        own, other = (L.masked_error(p, pair[2], batch.mask) for p in pair[:2])
        weight = L.class_weight(batch.category)
        if self.config.method == "bco":
            gain = other - own
            if move:
                self.delta.copy_(L.bco_shift(self.delta, gain.detach(), desired, self.accumulate))
            margin = L.bco_margin(L.capped(gain, desired, self.config.cap), self.delta, desired)
            loss = L.bco_loss(margin, weight)
        else:
            gain = own - other
            if move:
                self.delta.copy_(L.kto_shift(self.delta, gain.detach(), desired, self.accumulate))
            margin = L.kto_margin(gain, self.delta, desired)
            loss = L.kto_loss(margin, weight)
        right = torch.sigmoid(margin.detach())
        values = {
            "preference": loss,
            "h_safe": right[desired].mean() if desired.any() else torch.tensor(float("nan")),
            "h_unsafe": right[~desired].mean() if (~desired).any() else torch.tensor(float("nan")),
            "gap_n": (own - other)[~desired].mean() if (~desired).any() else torch.tensor(float("nan")),
            "saturated": L.saturation(margin.detach()),
            "delta": self.delta.clone(),
        }
        return loss, values, policy, clean, anchor

    def first_pass(self, batch: AlignmentBatch, share: float) -> dict[str, Tensor]:
        """Preference, anchor and identity losses at the batch's timesteps; `share` scales the preference."""
        z = self.noised(batch.z0, batch.t, batch.eps)
        loss, values, policy, clean, anchor = self.preference(z, batch.t, batch, batch.eps, self.training)
        recon = L.anchor_loss(policy, batch.eps, batch.mask, batch.desired)
        gap = L.identity_gap(clean, anchor)
        identity = L.identity_loss(gap, batch.desired, self.config.identity)
        error = ((policy - batch.eps) ** 2).mean((1, 2, 3)).detach()
        bands = {
            f"mse_{low}_{high}": error[inside].mean() if inside.any() else torch.tensor(float("nan"))
            for low, high in BANDS
            for inside in [(batch.t >= low) & (batch.t < high)]
        }
        total = 4 * share * loss + recon + identity
        return {"loss": total, **values, "recon": recon, "identity": identity, "identity_gap": gap.mean(), **bands}

    def second_pass(self, batch: AlignmentBatch) -> dict[str, Tensor]:
        """The preference loss on the policy's own results: denoise fully, then add noise of a tenth of the timestep."""
        with torch.no_grad():
            z = self.noised(batch.z0, batch.t, batch.eps)
            ladder = [(batch.t * (UNROLL - 1 - k)) // (UNROLL - 1) for k in range(UNROLL)]
            for here, there in pairwise(ladder):
                z = L.ddim(z, self.predict(z, here, batch), self.alphas[here], self.alphas[there])
            low = batch.t // UNROLL
            noisy = self.noised(z, low, batch.again)
        loss, values, *_ = self.preference(noisy, low, batch, batch.again, False)
        return {"loss": 4 * 0.5 * loss, "preference_unrolled": values["preference"]}
