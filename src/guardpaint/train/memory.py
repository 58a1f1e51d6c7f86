"""Estimate the memory of a LoRA run before it starts, by a forward pass on the meta device."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from guardpaint.train.alignment_config import AlignConfig
    from guardpaint.train.engine import TrainConfig


@dataclass(frozen=True)
class Memory:
    """Estimated memory of a run, in bytes."""

    weights: int
    """Frozen weights."""
    adapters: int
    """LoRA weights, their gradients, both Adam moments and the moving average."""
    activations: int
    """Tensors saved for the backward pass of one batch."""

    @property
    def total(self) -> int:
        return self.weights + self.adapters + self.activations


def estimate(
    unet: Any, shape: AlignConfig, train: TrainConfig, latent: tuple[int, ...], text: Any, dtype_bytes: int = 4
) -> Memory:
    """The memory of a run: its weights, and the tensors that one forward pass on the meta device saves."""
    from peft import LoraConfig, get_peft_model

    ghost = copy.deepcopy(unet).to("meta") if next(unet.parameters()).device.type != "meta" else unet
    for p in ghost.parameters():
        p.requires_grad_(False)
    net: Any = get_peft_model(ghost, LoraConfig(r=shape.rank, lora_alpha=shape.rank, target_modules=shape.targets()))
    net = net.to("meta").train()
    if shape.checkpointing:
        net.get_base_model().enable_gradient_checkpointing()
    kept: dict[int, int] = {}

    def remember(x: Tensor) -> Tensor:
        if not isinstance(x, torch.nn.Parameter):
            kept[id(x.untyped_storage())] = x.numel() * x.element_size()
            alive.append(x)
        return x

    alive: list[Tensor] = []
    n = train.batch_size
    c, h, w = latent
    sample = torch.empty(n, 2 * c + 1, h, w, device="meta")
    states = torch.empty(n, text.max_position_embeddings, text.hidden_size, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(remember, lambda x: x):
        net(sample, torch.zeros(n, device="meta"), encoder_hidden_states=states)
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in net.parameters() if not p.requires_grad)
    return Memory(frozen * dtype_bytes, 20 * trained, sum(kept.values()))


def report(memory: Memory) -> str:
    """The estimate as a line of text."""
    parts = ", ".join(f"{name} {getattr(memory, name) / 2**30:.2f}" for name in ("weights", "adapters", "activations"))
    return f"memory: about {memory.total / 2**30:.2f} GiB ({parts})"
