"""Group near-duplicates, split the groups 70/15/15 within each class, and check the splits for leakage."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool
from PIL import Image
from scipy.fft import dctn

from guardpaint.errors import BadInput
from guardpaint.store.seeds import derive

SHARES = {"train": 0.70, "validation": 0.15, "test": 0.15}
NEAR = 6
"""Images whose 64-bit hashes differ in at most this many bits count as duplicates."""


def perceptual_hash(image: Image.Image) -> int:
    """A 64-bit hash: which low DCT coefficients of the 32×32 grey image exceed their median."""
    grey = np.asarray(image.convert("L").resize((32, 32), Image.Resampling.LANCZOS), float)
    low = dctn(grey, norm="ortho")[:8, :8].ravel()
    bits: Bool[np.ndarray, " 64"] = low > np.median(low[1:])
    return int("".join("1" if b else "0" for b in bits), 2)


def normal_prompt(text: str) -> str:
    """The prompt without differences in case, accents, punctuation and spacing."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    return " ".join(re.sub(r"[^\w]+", " ", "".join(c for c in plain if not unicodedata.combining(c))).split())


class Groups:
    """Union–find over keys."""

    def __init__(self) -> None:
        self.parent: dict[str, str] = {}

    def find(self, key: str) -> str:
        self.parent.setdefault(key, key)
        while self.parent[key] != key:
            self.parent[key] = self.parent[self.parent[key]]
            key = self.parent[key]
        return key

    def join(self, a: str, b: str) -> None:
        first, second = sorted((self.find(a), self.find(b)))
        self.parent[second] = first


def group(rows: Sequence[Mapping[str, Any]], near: int = NEAR) -> dict[str, str]:
    """Key → group. Near-duplicate images and images with equal prompts share a group; rows have key, hash and prompt.

    Two hashes within `near` bits of each other are equal on at least one of near + 1 bands, so only hashes that share
    a band are compared.
    """
    groups = Groups()
    bands: dict[tuple[int, int], list[tuple[str, int]]] = defaultdict(list)
    prompts: dict[str, str] = {}
    edges = np.linspace(0, 64, near + 2).astype(int)
    for row in rows:
        key, code = row["key"], int(row["hash"])
        groups.find(key)
        for k in range(near + 1):
            band = (code >> int(edges[k])) & ((1 << int(edges[k + 1] - edges[k])) - 1)
            for other, other_code in bands[k, band]:
                if (code ^ other_code).bit_count() <= near:
                    groups.join(key, other)
            bands[k, band].append((key, code))
        text = normal_prompt(row["prompt"]) if row.get("prompt") else ""
        if text:
            groups.join(key, prompts.setdefault(text, key))
    return {row["key"]: groups.find(row["key"]) for row in rows}


def split(
    labels: Mapping[str, str], groups: Mapping[str, str], seed: int = 0, shares: Mapping[str, float] = SHARES
) -> dict[str, str]:
    """Key → split. Groups are never divided; within each class the shares are met as closely as the groups allow."""
    if abs(sum(shares.values()) - 1) > 1e-9:
        raise BadInput(f"shares={dict(shares)} add up to {sum(shares.values())}; they must add up to 1")
    members: dict[str, list[str]] = defaultdict(list)
    for key in labels:
        members[groups[key]].append(key)
    total = Counter(labels.values())
    placed: dict[str, Counter[str]] = {name: Counter() for name in shares}
    order = sorted(members, key=lambda g: (-len(members[g]), derive(seed, "split", g)))
    out: dict[str, str] = {}
    for g in order:
        classes = Counter(labels[k] for k in members[g])

        def lack(name: str, classes: Counter[str] = classes) -> float:
            """How far a split is behind its share in the classes this group has."""
            return sum(n * (shares[name] - placed[name][c] / total[c]) for c, n in classes.items())

        best = max(shares, key=lack)
        placed[best].update(classes)
        out.update(dict.fromkeys(members[g], best))
    return out


def leaks(splits: Mapping[str, str], groups: Mapping[str, str]) -> list[str]:
    """The groups that lie in more than one split; a correct split has none."""
    where: dict[str, set[str]] = defaultdict(set)
    for key, name in splits.items():
        where[groups[key]].add(name)
    return sorted(g for g, names in where.items() if len(names) > 1)


def counts(labels: Mapping[str, str], splits: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Split → class → number of images."""
    out: dict[str, Counter[str]] = defaultdict(Counter)
    for key, name in splits.items():
        out[name][labels[key]] += 1
    return {name: dict(c) for name, c in sorted(out.items())}
