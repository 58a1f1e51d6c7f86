"""Feature maps that an auditor remembers during a step, because the seam metric reads them too."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor

MOST = 32_000_000
"""Numbers that are kept: the candidates of one tournament and its control at full size."""


class StagesSeen:
    """Feature maps of pictures by their content, within a `with` block of one thread; nothing outlives the block."""

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self._local = threading.local()

    def __getstate__(self) -> dict[str, int]:
        return {"most": self.most}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """Keep what the auditor sees until the block ends; a block within another one changes nothing."""
        if self.kept is not None:
            yield
            return
        self._local.kept = OrderedDict()
        try:
            yield
        finally:
            del self._local.kept

    @property
    def kept(self) -> OrderedDict[str, list[Tensor]] | None:
        """The maps by the names of their pictures; None outside of a block."""
        return getattr(self._local, "kept", None)

    def keep(self, images: Float[Tensor, "b 3 h w"], stages: list[Tensor]) -> None:
        """Remember the maps of a batch, in a block only; the oldest pictures are forgotten first."""
        kept = self.kept
        if kept is None:
            return
        size = sum(s[0].numel() for s in stages)
        room = self.most // size
        for i in range(max(0, len(images) - room), len(images)):
            kept[name_of(images[i])] = [s[i].clone() for s in stages]
        while len(kept) > 1 and sum(s.numel() for maps in kept.values() for s in maps) > self.most:
            kept.popitem(last=False)

    def recall(self, images: Float[Tensor, "b 3 h w"]) -> list[Tensor] | None:
        """The maps of a batch if all of its pictures are remembered."""
        kept = self.kept
        if not kept:
            return None
        rows = [kept.get(name_of(image)) for image in images]
        if any(row is None for row in rows):
            return None
        return [torch.stack(maps) for maps in zip(*(row for row in rows if row is not None), strict=True)]


def name_of(image: Float[Tensor, "3 h w"]) -> str:
    """A name for the content of a picture."""
    data = image.detach().float().cpu().contiguous().numpy().tobytes()
    return hashlib.blake2b(data, digest_size=16).hexdigest() + str(tuple(image.shape))
