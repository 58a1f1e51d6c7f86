"""The model that alignment trains: a UNet with a LoRA, compared with the same UNet without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, starmap
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from guardpaint.train import alignment_loss as L
from guardpaint.train.alignment_batch import AlignmentBatch, Comparison, Pass, fraction, over_processes
from guardpaint.train.alignment_config import AlignConfig

UNROLL = 10
"""Timesteps of the second pass's unrolling, and its divisor for the timestep that follows."""
BANDS = ((0, 100), (100, 500), (500, 1000))
"""Timestep ranges whose noise error is logged separately."""


class Aligner(nn.Module):
    """A UNet with a LoRA (the policy), its frozen text encoder and the reward's running shift `delta`."""

    def __init__(
        self,
        unet: nn.Module,
        text: nn.Module,
        alphas: Tensor,
        config: AlignConfig,
        seed: int,
        parts: int = 1,
    ) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model

        if not config.weights:
            raise ValueError("the class weights are missing; take `config.under(policy)`")
        self.config, self.parts = config, parts
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
        """Number of optimiser steps begun; each has one batch, worked off in `parts`."""
        return int(self.batches)

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
        """The losses of a batch, in parts that the engine adds up: `parts` for each pass over the batch.

        The sum of the parts, and with it the gradient, is that of the whole batch at once.
        """
        if self.training:
            self.batches += 1
        parts = batch.parts(self.parts)
        if self.config.method == "sft":
            for part in parts:
                yield {k: v * len(part) / len(batch) for k, v in self.sft(part).items()}
            return
        if self.training and self.config.reference == "refresh" and self.steps % self.config.refresh_every == 0:
            self.refresh()
        every = self.config.unroll_every if self.config.method == "bco" else 0
        due = bool(every) and self.steps % every == 0
        late = [part.rows(part.t >= UNROLL) for part in parts] if due else []
        second = any(map(len, late))
        yield from self.first_pass(parts, 0.5 if second else 1.0, second)
        if due:  # on all processes alike, because they exchange their means
            yield from self.second_pass([part for part in late if len(part)])

    def sft(self, batch: AlignmentBatch) -> dict[str, Tensor]:
        """The supervised loss: weighted noise error on safe targets."""
        out = self.predict(self.noised(batch.z0, batch.t, batch.eps), batch.t, batch)
        alpha = self.alphas[batch.t]
        weight = L.min_snr_weight(alpha, 5.0) if self.config.weighting == "min_snr" else torch.ones_like(alpha)
        return {"loss": L.sft_loss(out, batch.eps, weight), "mse": ((out - batch.eps) ** 2).mean()}

    def compare(self, view: Pass, reference: Tensor) -> Comparison:
        """Errors of policy and reference inside the mask, and how far apart their clean estimates are."""
        batch, policy, alpha = view.batch, self.predict(view.z, view.t, view.batch), self.alphas[view.t]
        clean, anchor = (L.clean_estimate(view.z, e, alpha) for e in (policy, reference))
        pair = (clean, anchor, batch.z0) if self.config.reward == "x0" else (policy, reference, view.eps)
        own, other = (L.masked_error(p, pair[2], batch.mask) for p in pair[:2])
        signal = other - own if self.config.method == "bco" else own - other
        return Comparison(policy, signal, L.identity_gap(clean, anchor))

    def means(self, views: list[Pass], found: list[Comparison]) -> L.BatchMeans:
        """Means over the whole batch: all its parts, on all processes."""
        none = self.delta.new_zeros(0)
        signal, gap = (torch.cat([none, *(getattr(c, name).detach() for c in found)]) for name in ("signal", "gap"))
        desired = torch.cat([none.bool(), *(view.batch.desired for view in views)])
        return L.batch_means(signal, gap, desired, over_processes)

    def compared(self, views: list[Pass], move: bool) -> Iterator[tuple[Pass, Comparison, L.BatchMeans]]:
        """Every view's comparison, with the means of the whole batch; `move` updates the running shift first.

        With more than one part the means come from a forward pass over all parts ahead of the one with gradients.
        """
        references = [self.reference(view.z, view.t, view.batch) for view in views]
        with torch.set_grad_enabled(torch.is_grad_enabled() and len(views) == 1):
            found = [self.compare(view, reference) for view, reference in zip(views, references, strict=True)]
        means = self.means(views, found)
        if move:
            shift = L.bco_shift if self.config.method == "bco" else L.kto_shift
            self.delta.copy_(shift(self.delta, means))
        if len(views) == 1:
            yield views[0], found.pop(), means
            return
        for view, reference in zip(views, references, strict=True):
            yield view, self.compare(view, reference), means

    def preference(
        self, batch: AlignmentBatch, compared: Comparison, means: L.BatchMeans
    ) -> tuple[Float[Tensor, ""], Float[Tensor, " b"]]:
        """The preference loss, and every sample's margin: positive if it is on the loss's right side of the shift."""
        weight, desired = L.class_weight(batch.category, self.config.weights), batch.desired
        if self.config.method == "bco":
            gain = L.capped(compared.signal, desired, means.unsafe, self.config.cap)
            margin = L.bco_margin(gain, self.delta, desired)
            return L.bco_loss(margin, weight), margin.detach()
        margin = L.kto_margin(compared.signal, self.delta, desired, self.config.kto)
        return L.kto_loss(margin, weight), margin.detach()

    def first_pass(self, parts: list[AlignmentBatch], share: float, second: bool) -> Iterator[dict[str, Tensor]]:
        """Preference, anchor and identity losses at the batch's timesteps; `share` scales the preference.

        `second` says whether a second pass follows, which logs `preference_unrolled`.
        """
        views = [Pass(part, self.noised(part.z0, part.t, part.eps), part.t, part.eps) for part in parts]
        whole = torch.cat([part.desired for part in parts])
        bands = torch.cat([part.t for part in parts])
        nan = self.delta.new_full((), float("nan"))

        def values(view: Pass, compared: Comparison, means: L.BatchMeans) -> dict[str, Tensor]:
            found = self.losses(view.batch, compared, means, whole, share)
            found |= self.curves(view, compared, bands)
            return found if second else {**found, "preference_unrolled": nan}

        yield from starmap(values, self.compared(views, self.training))  # which keeps no graph that was used

    def losses(
        self,
        batch: AlignmentBatch,
        compared: Comparison,
        means: L.BatchMeans,
        whole: Bool[Tensor, " n"],
        share: float,
    ) -> dict[str, Tensor]:
        """A part's contribution to the losses of the batch; `whole` says which samples of the batch are desired."""
        config, desired, size = self.config, batch.desired, len(batch) / len(whole)
        loss, margin = self.preference(batch, compared, means)
        if config.method == "kto" and config.kto == "printed":
            recon = size * L.printed_anchor_loss(compared.policy, batch.eps, batch.mask)
        else:
            safe = desired.sum() / whole.sum().clamp_min(1)
            recon = safe * L.anchor_loss(compared.policy, batch.eps, batch.mask, desired)
        identity = size * L.identity_loss(compared.gap, desired, means.identity, config.identity)
        loss, right = size * loss, torch.sigmoid(margin)
        bad = ~desired
        gap = compared.signal if config.method == "kto" else -compared.signal
        return {
            "loss": 4 * share * loss + recon + identity,
            "preference": loss,
            "h_safe": fraction(right, desired, int(whole.sum())),
            "h_unsafe": fraction(right, bad, int((~whole).sum())),
            "gap_n": fraction(gap, bad, int((~whole).sum())),
            "saturated": size * L.saturation(margin),
            "delta": self.delta.clone() / self.parts,
            "recon": recon,
            "identity": identity,
            "identity_gap": size * compared.gap.detach().mean(),
        }

    def curves(self, view: Pass, compared: Comparison, t: Int[Tensor, " n"]) -> dict[str, Tensor]:
        """A part's contribution to the noise error in each band of timesteps; `t` has those of the whole batch."""
        error = ((compared.policy.detach() - view.batch.eps) ** 2).mean((1, 2, 3))
        return {
            f"mse_{low}_{high}": fraction(
                error, (view.t >= low) & (view.t < high), int(((t >= low) & (t < high)).sum())
            )
            for low, high in BANDS
        }

    def second_pass(self, parts: list[AlignmentBatch]) -> Iterator[dict[str, Tensor]]:
        """The preference loss on the policy's own results: denoise fully, then add noise of a tenth of the timestep."""
        views, count = [self.unrolled(part) for part in parts], sum(map(len, parts))

        def values(view: Pass, compared: Comparison, means: L.BatchMeans) -> dict[str, Tensor]:
            loss = self.preference(view.batch, compared, means)[0] * len(view.batch) / count
            return {"loss": 4 * 0.5 * loss, "preference_unrolled": loss}

        yield from starmap(values, self.compared(views, False))

    @torch.no_grad()
    def unrolled(self, batch: AlignmentBatch) -> Pass:
        """The batch denoised in nine DDIM steps and noised again to a tenth of its timesteps."""
        z = self.noised(batch.z0, batch.t, batch.eps)
        ladder = [(batch.t * (UNROLL - 1 - k)) // (UNROLL - 1) for k in range(UNROLL)]
        for here, there in pairwise(ladder):
            z = L.ddim(z, self.predict(z, here, batch), self.alphas[here], self.alphas[there])
        low = batch.t // UNROLL
        return Pass(batch, self.noised(z, low, batch.again), low, batch.again)
