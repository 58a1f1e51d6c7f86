"""Settings of a deployment: who may call it, how often, and within which limits."""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from guardpaint.errors import BadConfig
from guardpaint.store.uploads import Limits

ROLES = ("user", "operator", "metrics")
"""A key of the role `metrics` can read /metrics and nothing else."""


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
    per_key: int | None = None
    """Number of pictures of one key that may wait; further ones are refused with 429. None: a quarter of the queue, but
    at least `most_images`, and the whole queue if there is only one caller."""
    picture_timeout: float = 75.0
    """Seconds that drawing or auditing one picture may take, besides the guard's `timeout_s`. A batch may take as much
    longer as it has pictures; then the process that draws it is replaced."""
    grace: float = 20.0
    """Seconds that running pictures get to finish when the service is stopped."""
    slow_client: float = 20.0
    """Seconds to wait for the next part of a request's body."""
    body_time: float = 120.0
    """Seconds in which a request's body must be complete."""
    header_time: float = 10.0
    """Seconds in which a request's header must be complete."""
    idle_time: float = 5.0
    """Seconds that a connection is kept open between two requests."""
    write_time: float = 20.0
    """Seconds after which a client that has taken too little of its answer is cut off."""
    slowest_reader: int = 2**14
    """Bytes a second that a client must take of its answer."""
    connections: int = 0
    """Largest number of open connections; 0 takes half of the open files that the process may have, at most 1024."""
    address_connections: int = 0
    """Largest number of open connections from one address; 0 takes half of all."""
    hosts: tuple[str, ...] = ()
    """Further names by which the service may be called. Without keys only those of this machine are taken otherwise."""
    kept_images: int = 256
    """How many of the latest pictures and of the latest reports can be fetched."""
    kept_memory: int = 2**28
    """Bytes that those pictures may take, and those of the reports: clear evidence is large."""
    largest_pixels: int = Limits.largest_pixels
    """Pixels of an uploaded picture, all frames together; larger ones are refused with 413 before they are decoded."""
    most_frames: int = Limits.most_frames
    """Frames of an uploaded picture; with more it is refused with 413."""
    longest_side: int = Limits.longest_side
    """An uploaded picture with a longer side is shrunk to this before it is audited, and the answer says so."""
    upload_memory: int = 2**29
    """Bytes that uploads may take while they are decoded and audited. A picture waits for its share, or for all of it
    if its own estimate is larger."""
    upload_patience: float = 30.0
    """Seconds that an upload waits for its share of `upload_memory` before it is refused with 503."""

    def __post_init__(self) -> None:
        for name in ("queue", "batch", "most_images", "most_steps", "longest_prompt", "largest_body", "kept_images",
                     "kept_memory", "largest_pixels", "most_frames", "longest_side", "upload_memory"):  # fmt: skip
            if getattr(self, name) < 1:
                raise BadConfig(f"{name}={getattr(self, name)}: must be at least 1")
        for name in ("slow_client", "body_time", "header_time", "idle_time", "write_time"):
            if not getattr(self, name) > 0:
                raise BadConfig(f"{name}={getattr(self, name)}: must be more than 0 seconds")
        for name in ("connections", "address_connections"):
            if getattr(self, name) < 0:
                raise BadConfig(f"{name}={getattr(self, name)}: must be at least 1, or 0 to have it chosen")
        if self.per_key is not None and self.per_key < 1:
            raise BadConfig(f"per_key={self.per_key}: must be at least 1")
        if not self.picture_timeout > 0 or not self.grace >= 0:
            raise BadConfig(
                f"picture_timeout={self.picture_timeout} must be above 0, and grace={self.grace} must not be negative"
            )

    @property
    def uploads(self) -> Limits:
        """What is taken of an uploaded picture."""
        return Limits(self.largest_pixels, self.most_frames, self.longest_side)

    @property
    def share(self) -> int:
        """Number of pictures of one key that may wait."""
        if self.per_key is not None:
            return self.per_key
        return self.queue if len(self.keys) < 2 else max(self.most_images, self.queue // 4)

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
    """Read a JSON file of secret → {"name": …, "role": one of ROLES, "per_minute": 60}."""
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
