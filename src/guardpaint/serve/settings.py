"""Settings of a deployment: who may call it, how often, and within which limits."""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from guardpaint.errors import BadConfig

ROLES = ("user", "operator")


@dataclass(frozen=True)
class Key:
    """One caller: a name, a role and a rate."""

    name: str
    role: str = "user"
    per_minute: int = 60
    """Pictures a minute."""

    def __post_init__(self) -> None:
        if self.role not in ROLES or self.per_minute < 1:
            raise BadConfig(
                f"key {self.name!r}: role={self.role!r} must be one of {', '.join(ROLES)}, "
                f"and per_minute={self.per_minute} at least 1"
            )

    @property
    def operator(self) -> bool:
        return self.role == "operator"


@dataclass(frozen=True)
class Settings:
    """Limits of one service."""

    keys: Mapping[str, Key] = field(default_factory=dict)
    """Secret → caller. If it is empty, every caller is a user; that is allowed on a loopback address only."""
    queue: int = 32
    """Number of pictures that may wait; further ones are refused with 503."""
    batch: int = 4
    """Number of pictures with equal settings that are drawn in one batch."""
    linger: float = 0.02
    """Seconds to wait for more pictures before a batch that is not full is started."""
    most_images: int = 8
    most_steps: int = 100
    longest_prompt: int = 2000
    largest_body: int = 8 * 2**20
    timeout: float = 300.0
    """Seconds after which a request fails with 504."""
    slow_client: float = 20.0
    """Seconds to wait for the next part of a request's body."""
    kept_images: int = 256
    """How many of the latest pictures and of the latest reports can be fetched."""

    def __post_init__(self) -> None:
        for name in ("queue", "batch", "most_images", "most_steps", "longest_prompt", "largest_body", "kept_images"):
            if getattr(self, name) < 1:
                raise BadConfig(f"{name}={getattr(self, name)}: must be at least 1")

    def caller(self, secret: str | None) -> Key | None:
        """The key that a secret belongs to, compared in constant time; None if there is none."""
        if not self.keys:
            return Key("anyone")
        match = None
        for known, key in self.keys.items():
            if secret is not None and hmac.compare_digest(known.encode(), secret.encode()):
                match = key
        return match


def load_keys(path: Path) -> dict[str, Key]:
    """Read a JSON file of secret → {"name": …, "role": "user" or "operator", "per_minute": 60}."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        keys = {str(secret): Key(**value) for secret, value in data.items()}
    except FileNotFoundError as error:
        raise BadConfig(f"{path}: no such key file") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise BadConfig(f"{path}: not a key file ({error})") from error
    names = [k.name for k in keys.values()]
    if len(set(names)) < len(names):
        raise BadConfig(f"{path}: {max(names, key=names.count)!r} has two secrets; give every key a name of its own")
    short = [k.name for secret, k in keys.items() if len(secret) < 16]
    if short or not keys:
        raise BadConfig(
            f"{path}: {f'the secret of {short[0]!r} is shorter than 16 characters' if short else 'it holds no keys'}"
        )
    return keys
