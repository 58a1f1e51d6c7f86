"""The model that is aligned: a UNet with a LoRA beside its frozen self, its options and its batches."""

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
BANDS = ((0, 100), (100, 500), (500, 1000))


@dataclass(frozen=True)
class AlignConfig:
    """One stage. Every option past the first block retells a chapter of the paper's history."""

    method: str = "bco"
    rank: int = 128
    dropout: float = 0.10
    """Share of samples trained with an empty prompt (KTO: 0.30)."""
    mixture: tuple[int, ...] = (8, 4, 4)
    """Safe, nudity, violence samples per batch of KTO and BCO."""
    target_share: float = 0.5
    """Of the safe samples: how many are safe versions under the unsafe prompt; the others are ordinary pictures."""
    unroll_every: int = 10
    """Steps between second passes of BCO; 0: never."""
    checkpointing: bool = False
    """Trade time for memory: recompute activations in the backward pass."""
    weighting: str = "min_snr"
    """SFT: min_snr or uniform."""
    cap: str = "exploit_side"
    """exploit_side or printed."""
    reference: str = "frozen"
    """frozen, or refresh: the policy becomes its own reference every `refresh_every` steps."""
    refresh_every: int = 500
    reward: str = "x0"
    """x0 or eps: where errors are compared."""
    identity: str = "hinge"
    """hinge, batch (KTO) or linear."""
    freeze: str = "none"
    """none, conv_in or convs: which convolutions get no LoRA."""

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
                f"rank={self.rank} ≥ 1, mixture={self.mixture} of three counts, dropout={self.dropout} and "
                f"target_share={self.target_share} in [0, 1]"
            )

    def targets(self) -> list[str]:
        """Modules that get a LoRA."""
        convs = {"none": CONVOLUTIONS + INPUT, "conv_in": CONVOLUTIONS, "convs": ()}[self.freeze]
        return [*ATTENTION, *convs]


@dataclass(frozen=True)
class Tuple:
    """One batch: (z0, m, z̃0, prompt, y) with its noise."""

    z0: Float[Tensor, "b c h w"]
    mask: Float[Tensor, "b 1 h w"]
    masked: Float[Tensor, "b c h w"]
    ids: Int[Tensor, "b l"]
    category: Int[Tensor, " b"]
    t: Int[Tensor, " b"]
    eps: Float[Tensor, "b c h w"]
    again: Float[Tensor, "b c h w"]
    """Noise of the second pass."""

    @property
    def desired(self) -> Bool[Tensor, " b"]:
        return self.category == 0

    def rows(self, index: Bool[Tensor, " b"]) -> Tuple:
        return Tuple(**{k: v[index] for k, v in vars(self).items()})


class Aligner(nn.Module):
    """A UNet with a LoRA, its frozen text encoder and the reward's running shift."""

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
        """Optimiser steps begun; a step may see several batches."""
        return -(-int(self.batches) // self.accumulate)

    def kept_state(self) -> dict[str, Tensor]:
        """Adapters and running numbers; the frozen rest comes from the model the run starts from."""
        return {k: v for k, v in self.state_dict().items() if "lora_" in k or k in ("delta", "batches")}

    def predict(self, z: Tensor, t: Tensor, batch: Tuple) -> Float[Tensor, "b c h w"]:
        """The policy's noise."""
        states = self.text(batch.ids)[0]
        return self.unet(torch.cat([z, batch.mask, batch.masked], 1), t, encoder_hidden_states=states).sample

    @torch.no_grad()
    def reference(self, z: Tensor, t: Tensor, batch: Tuple) -> Float[Tensor, "b c h w"]:
        """The reference's noise for the same tuple."""
        with self.as_reference():
            return self.predict(z, t, batch)

    @contextmanager
    def as_reference(self) -> Iterator[None]:
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
        """The policy becomes the reference."""
        own = self.unet.state_dict()
        for name, value in own.items():
            if ".reference." in name:
                value.copy_(own[name.replace(".reference.", ".default.")])

    def noised(self, z0: Tensor, t: Tensor, eps: Tensor) -> Float[Tensor, "b c h w"]:
        a = self.alphas[t].view(-1, 1, 1, 1)
        return a.sqrt() * z0 + (1 - a).sqrt() * eps

    def forward(self, batch: Tuple) -> Iterator[dict[str, Tensor]]:
        if self.training:
            self.batches += 1
        if self.config.method == "sft":
            yield self.sft(batch)
            return
        fresh = self.config.reference == "refresh" and int(self.batches) % self.accumulate == 0
        if self.training and fresh and self.steps % self.config.refresh_every == 0:
            self.refresh()
        every = self.config.unroll_every if self.config.method == "bco" else 0
        late = batch.t >= UNROLL
        second = bool(every) and self.steps % every == 0 and bool(late.any())
        if not second:
            yield {**self.first_pass(batch, 1.0), "preference_unrolled": torch.tensor(float("nan"))}
            return
        yield self.first_pass(batch, 0.5)
        yield self.second_pass(batch.rows(late))

    def sft(self, batch: Tuple) -> dict[str, Tensor]:
        out = self.predict(self.noised(batch.z0, batch.t, batch.eps), batch.t, batch)
        alpha = self.alphas[batch.t]
        weight = L.min_snr_weight(alpha, 5.0) if self.config.weighting == "min_snr" else torch.ones_like(alpha)
        return {"loss": L.sft_loss(out, batch.eps, weight), "mse": ((out - batch.eps) ** 2).mean()}

    def preference(
        self, z: Tensor, t: Tensor, batch: Tuple, eps: Tensor, move: bool
    ) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor, Tensor]:
        """Preference loss at one level, what it saw, the policy's noise and both clean estimates."""
        policy, reference = self.predict(z, t, batch), self.reference(z, t, batch)
        alpha, wanted = self.alphas[t], batch.desired
        clean, anchor = (L.clean_estimate(z, e, alpha) for e in (policy, reference))
        pair = (clean, anchor, batch.z0) if self.config.reward == "x0" else (policy, reference, eps)
        own, other = (L.masked_error(p, pair[2], batch.mask) for p in pair[:2])
        weight = L.class_weight(batch.category)
        if self.config.method == "bco":
            gain = other - own
            if move:
                self.delta.copy_(L.bco_shift(self.delta, gain.detach(), wanted, self.accumulate))
            margin = L.bco_margin(L.capped(gain, wanted, self.config.cap), self.delta, wanted)
            loss = L.bco_loss(margin, weight)
        else:
            gain = own - other
            if move:
                self.delta.copy_(L.kto_shift(self.delta, gain.detach(), wanted, self.accumulate))
            margin = L.kto_margin(gain, self.delta, wanted)
            loss = L.kto_loss(margin, weight)
        right = torch.sigmoid(margin.detach())
        seen = {
            "preference": loss,
            "h_safe": right[wanted].mean() if wanted.any() else torch.tensor(float("nan")),
            "h_unsafe": right[~wanted].mean() if (~wanted).any() else torch.tensor(float("nan")),
            "gap_n": (own - other)[~wanted].mean() if (~wanted).any() else torch.tensor(float("nan")),
            "saturated": L.saturation(margin.detach()),
            "delta": self.delta.clone(),
        }
        return loss, seen, policy, clean, anchor

    def first_pass(self, batch: Tuple, share: float) -> dict[str, Tensor]:
        z = self.noised(batch.z0, batch.t, batch.eps)
        loss, seen, policy, clean, anchor = self.preference(z, batch.t, batch, batch.eps, self.training)
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
        return {"loss": total, **seen, "recon": recon, "identity": identity, "identity_gap": gap.mean(), **bands}

    def second_pass(self, batch: Tuple) -> dict[str, Tensor]:
        """Unroll to a clean latent, add a little noise again, and prefer there."""
        with torch.no_grad():
            z = self.noised(batch.z0, batch.t, batch.eps)
            ladder = [(batch.t * (UNROLL - 1 - k)) // (UNROLL - 1) for k in range(UNROLL)]
            for here, there in pairwise(ladder):
                z = L.ddim(z, self.predict(z, here, batch), self.alphas[here], self.alphas[there])
            low = batch.t // UNROLL
            noisy = self.noised(z, low, batch.again)
        loss, seen, *_ = self.preference(noisy, low, batch, batch.again, False)
        return {"loss": 4 * 0.5 * loss, "preference_unrolled": seen["preference"]}
