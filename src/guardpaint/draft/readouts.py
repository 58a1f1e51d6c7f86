"""Readouts: pictures of a tiny decoder's early layers, by one linear map fitted with least squares.

A tiny decoder spends most of its time after its last upsampling. The layers before an upsampling know the picture at a
half, a quarter … of its size already; a 3×3 convolution, fitted once, reads it from their features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from guardpaint.errors import BadCheckpoint
from guardpaint.store.checkpoint import read_json, read_tensors, write_atomic, write_json

SHRINKS = (2, 4)
"""How many times smaller than the decoder's picture those of its exits are. The exit at an eighth of the size is not
used: it shows too little."""
RIDGE = 1e-6
"""Weight of the penalty on the map, as a share of the features' mean square."""
ROWS = 16
"""Rows of a feature map that enter the normal equations at once, to keep memory small."""
TENSORS, CARD = "readouts.safetensors", "readouts.json"


def stops(tiny: Any) -> dict[int, int]:
    """The number of layers to run for each exit of a tiny decoder, by how many times smaller its picture is."""
    found: dict[int, int] = {}
    shrink = 1
    for index in reversed(range(len(tiny.decoder.layers))):
        layer = tiny.decoder.layers[index]
        if isinstance(layer, nn.Upsample) and isinstance(layer.scale_factor, float):
            shrink *= int(layer.scale_factor)
            if shrink in SHRINKS:
                found[shrink] = index
    return found


def features(tiny: Any, latents: Float[Tensor, "b c h w"], shrink: int) -> Float[Tensor, "b f u v"]:
    """What the decoder's layers before an upsampling say of latents; its input is bounded as in a whole decode."""
    weight = next(tiny.decoder.parameters())
    x = torch.tanh(latents.to(weight).contiguous(memory_format=torch.channels_last) / 3) * 3
    for layer in tiny.decoder.layers[: stops(tiny)[shrink]]:
        x = layer(x)
    return x


@dataclass(frozen=True)
class Readout:
    """A 3×3 convolution from features to pictures in [0, 1]."""

    weight: Float[Tensor, "3 f 3 3"]
    bias: Float[Tensor, " 3"]

    def __call__(self, values: Float[Tensor, "b f u v"]) -> Float[Tensor, "b 3 u v"]:
        weight, bias = self.weight.to(values.device), self.bias.to(values.device)
        return F.conv2d(values.float(), weight, bias, padding=1).clamp(0, 1)


class NormalEquations:
    """Sums of a linear least-squares problem in fp64; examples are added in parts and never kept."""

    def __init__(self, channels: int) -> None:
        self.channels, size = channels, 9 * channels + 1
        self.gram = torch.zeros(size, size, dtype=torch.float64)
        self.cross = torch.zeros(size, 3, dtype=torch.float64)
        self.count = 0

    def add(
        self, values: Float[Tensor, "b f u v"], wanted: Float[Tensor, "b 3 u v"], kept: Tensor | None = None
    ) -> None:
        """Add every pixel as an example, or only those of each picture that `kept` indexes."""
        around = F.pad(values.float().cpu(), (1, 1, 1, 1))
        height, width = wanted.shape[-2:]
        for top in range(0, height, ROWS):
            rows = min(ROWS, height - top)
            part = F.unfold(around[:, :, top : top + rows + 2], 3).transpose(1, 2)
            target = wanted[:, :, top : top + rows].float().cpu().flatten(2).transpose(1, 2)
            if kept is not None:
                here = kept[(kept >= top * width) & (kept < (top + rows) * width)] - top * width
                part, target = part[:, here], target[:, here]
            part, target = part.flatten(0, 1).double(), target.flatten(0, 1).double()
            part = torch.cat([part, torch.ones(len(part), 1, dtype=torch.float64)], dim=1)
            self.gram += part.T @ part
            self.cross += part.T @ target
            self.count += len(part)

    def solve(self, ridge: float = RIDGE) -> Readout:
        """The map with the least squared error; the bias is not penalised."""
        scale = float(self.gram.diagonal()[:-1].mean())
        penalty = torch.full((len(self.gram),), ridge * max(scale, 1e-12), dtype=torch.float64)
        penalty[-1] = 0
        solution = torch.linalg.solve(self.gram + penalty.diag(), self.cross)
        return Readout(solution[:-1].T.reshape(3, self.channels, 3, 3).float(), solution[-1].float())


@dataclass(frozen=True)
class Readouts:
    """The readouts of one decoder and where they come from."""

    decoder: str
    """Fingerprint of the decoder's weights."""
    maps: Mapping[int, Readout]
    """By how many times smaller the exit's picture is."""
    card: Mapping[str, Any]
    """What they were fitted with."""

    @property
    def identity(self) -> str:
        """SHA-256 over decoder and maps."""
        digest = hashlib.sha256(self.decoder.encode())
        for shrink, readout in sorted(self.maps.items()):
            for tensor in (readout.weight, readout.bias):
                digest.update(f"{shrink}{tuple(tensor.shape)}".encode() + tensor.half().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def save(self, directory: Path) -> None:
        """Write the maps in fp16 and their card."""
        from safetensors.torch import save

        state: dict[str, Tensor] = {}
        for shrink, readout in self.maps.items():
            state |= {f"{shrink}.weight": readout.weight.half(), f"{shrink}.bias": readout.bias.half()}
        write_atomic(directory / TENSORS, save({k: v.contiguous() for k, v in state.items()}))
        write_json(directory / CARD, {"decoder": self.decoder, "identity": self.identity, **self.card})

    @classmethod
    def load(cls, directory: Path) -> Readouts:
        """Read readouts; raises BadCheckpoint if a file is missing or was changed."""
        card, state = read_json(directory / CARD), read_tensors(directory / TENSORS)
        decoder, identity = card.pop("decoder", ""), card.pop("identity", "")
        try:
            shrinks = sorted({int(key.split(".")[0]) for key in state})
            maps = {s: Readout(state[f"{s}.weight"].float(), state[f"{s}.bias"].float()) for s in shrinks}
        except (KeyError, ValueError) as error:
            raise BadCheckpoint(f"{directory / TENSORS}: not the readouts of a decoder ({error})") from error
        found = cls(decoder, maps, card)
        if found.identity != identity:
            raise BadCheckpoint(f"{directory}: the readouts are not those that their card names; fit them again")
        return found


def rounded(readout: Readout) -> Readout:
    """A readout as it is after it was saved and loaded, so that both make the same views."""
    return Readout(readout.weight.half().float(), readout.bias.half().float())


@torch.no_grad()
def latents_of(tiny: Any, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b c u v"]:
    """Latents of pictures in [0, 1] by the autoencoder's own encoder."""
    weight = next(tiny.encoder.parameters())
    return tiny.encode((images * 2 - 1).to(weight), return_dict=False)[0].float()


@torch.no_grad()
def decoded(tiny: Any, latents: Float[Tensor, "b c h w"]) -> Float[Tensor, "b 3 H W"]:
    """The whole decode, in [0, 1]."""
    weight = next(tiny.decoder.parameters())
    latents = latents.to(weight).contiguous(memory_format=torch.channels_last)
    images: Tensor = tiny.decode(latents, return_dict=False)[0]
    return (images.float() / 2 + 0.5).clamp(0, 1)


@torch.no_grad()
def equations(
    tiny: Any, pictures: Iterable[Float[Tensor, "3 h w"]], most: int | None = None
) -> dict[int, NormalEquations]:
    """The least-squares problem of each exit: from features to the whole decode of the same latents, shrunk.

    `most` limits how many pixels of each picture are examples; they are spread evenly and at random.
    """
    generator = torch.Generator().manual_seed(0)
    sums: dict[int, NormalEquations] = {}
    for picture in pictures:
        z = latents_of(tiny, picture[None].to(tiny.device))
        whole = decoded(tiny, z)
        for shrink in stops(tiny):
            values = features(tiny, z, shrink)
            size = (int(values.shape[-2]), int(values.shape[-1]))
            wanted = F.interpolate(whole, size=size, mode="bilinear", antialias=True, align_corners=False)
            pixels = size[0] * size[1]
            kept = torch.randperm(pixels, generator=generator)[:most] if most and most < pixels else None
            sums.setdefault(shrink, NormalEquations(int(values.shape[1]))).add(values, wanted, kept)
    return sums


def solved(decoder: str, sums: Mapping[int, NormalEquations], card: Mapping[str, Any]) -> Readouts:
    """Readouts from their least-squares problems."""
    return Readouts(decoder, {shrink: rounded(problem.solve()) for shrink, problem in sums.items()}, card)
