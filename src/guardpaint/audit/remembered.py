"""What an auditor remembers of the pictures that it saw last: their feature maps, which the seam metric reads."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

import torch
from jaxtyping import Float
from torch import Tensor

MOST = 32_000_000
"""Numbers that are kept: the candidates of one tournament and its control at full size."""


class StagesSeen:
    """Feature maps of recent pictures by their content, shared by threads."""

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self._kept: OrderedDict[str, list[Tensor]] = OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, int]:
        return {"most": self.most}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def keep(self, images: Float[Tensor, "b 3 h w"], stages: list[Tensor]) -> None:
        """Remember the maps of a batch; the oldest pictures are forgotten first."""
        size = sum(s[0].numel() for s in stages)
        if size * len(images) > self.most:
            return
        names = [name_of(image) for image in images]
        with self._lock:
            for i, name in enumerate(names):
                self._kept.pop(name, None)
                self._kept[name] = [s[i] for s in stages]
            while sum(s.numel() for maps in self._kept.values() for s in maps) > self.most:
                self._kept.popitem(last=False)

    def recall(self, images: Float[Tensor, "b 3 h w"]) -> list[Tensor] | None:
        """The maps of a batch if all of its pictures are remembered."""
        names = [name_of(image) for image in images]
        with self._lock:
            rows = [self._kept.get(name) for name in names]
        if any(row is None for row in rows):
            return None
        return [torch.stack(maps) for maps in zip(*(row for row in rows if row is not None), strict=True)]

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()


def name_of(image: Float[Tensor, "3 h w"]) -> str:
    """A name for the content of a picture."""
    data = image.detach().float().cpu().contiguous().numpy().tobytes()
    return hashlib.blake2b(data, digest_size=16).hexdigest() + str(tuple(image.shape))
