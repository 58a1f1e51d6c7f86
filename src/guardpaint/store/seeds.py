"""The guard's own randomness: derived from the request, never drawn from the caller's or global RNG."""

from __future__ import annotations

import hashlib
import secrets

import torch


def derive(*parts: int | str) -> int:
    """A 63-bit seed from (request seed, image, step, region, purpose, …)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A CPU generator seeded by `derive`."""
    return torch.Generator("cpu").manual_seed(derive(*parts))


def fresh() -> int:
    """A seed that no earlier request had; it is drawn from the operating system, not from a random state of ours."""
    return secrets.randbits(48)
