"""The world as a dataset: parquet with images and masks, and contact sheets to look at."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from guardpaint.errors import BadInput
from guardpaint.store.images import png_bytes, save_image
from paperdolls.captions import caption
from paperdolls.render import SIZE, render
from paperdolls.scene import KINDS, sample_scene

SPLITS = {"train": 10_000_000, "validation": 30_000_000, "test": 20_000_000}
"""First scene seed of each split. The splits have no scene in common."""


def record(seed: int, kind: str | None = None, size: int = SIZE) -> dict[str, Any]:
    """One example of the dataset: picture, mask, caption and ground truth."""
    scene = sample_scene(seed, kind)
    drawn = render(scene, size)
    text = caption(scene, seed)
    return {
        "seed": seed,
        "image": drawn.image,
        "mask": drawn.mask,
        "caption": text.text,
        "hidden": text.hidden,
        "category": scene.category,
        "kind": scene.kind,
        "style": scene.style,
        "light": scene.light,
        **{f"attribute_{k}": scene.attributes().get(k) for k in ("background", "subject", "garment", "colour", "prop")},
    }


def records(split: str, count: int, size: int = SIZE) -> Iterator[dict[str, Any]]:
    if split not in SPLITS:
        raise BadInput(f"split {split!r}: choose one of {', '.join(SPLITS)}")
    for i in range(count):
        yield record(SPLITS[split] + i, size=size)


class WorldRows:
    """The world as an endless dataset (`Dataset`)."""

    def rows(self, split: str, skip: int = 0) -> Iterator[dict[str, Any]]:
        if split not in SPLITS:
            raise BadInput(f"split {split!r}: choose one of {', '.join(SPLITS)}")
        for seed in itertools.count(SPLITS[split] + skip):
            row = record(seed)
            yield {"image": {"bytes": png(row["image"])}, "caption": row["caption"], "category": row["category"]}


def export(out: Path, split: str, count: int, size: int = SIZE) -> Path:
    """Write a split as one parquet file, whose image and mask columns the `datasets` library decodes."""
    try:
        from datasets import Dataset, Features, Value
        from datasets import Image as ImageColumn
    except ImportError as error:
        raise BadInput("world export needs the `datasets` library: pip install 'guardpaint[data]'") from error

    def rows() -> Iterator[dict[str, Any]]:
        for r in records(split, count, size):
            mask = r["mask"].astype(np.uint8) * 255
            yield {**r, "image": {"bytes": png(r["image"]), "path": None}, "mask": {"bytes": png(mask), "path": None}}

    text = ("caption", "category", "kind", "style", "light")
    attributes = ("background", "subject", "garment", "colour", "prop")
    features = Features(
        {"seed": Value("int64"), "image": ImageColumn(), "mask": ImageColumn(), "hidden": Value("bool")}
        | {name: Value("string") for name in text}
        | {f"attribute_{name}": Value("string") for name in attributes}
    )
    out.mkdir(parents=True, exist_ok=True)
    path, part = out / f"{split}.parquet", out / f"{split}.parquet.part"
    Dataset.from_list(list(rows()), features=features).to_parquet(str(part))
    part.rename(path)
    return path


def png(array: np.ndarray) -> bytes:
    """The bytes of a PNG file with this picture or mask."""
    return png_bytes(Image.fromarray(array))


def contact_sheet(
    path: Path,
    first: int = 0,
    columns: int = 12,
    kinds: Sequence[str] = KINDS,
    masks: bool = False,
    size: int = SIZE,
) -> None:
    """Write a sheet with one row per kind of scene, scaled up to 128 pixels each. `masks` tints the unsafe pixels."""
    rows = []
    for kind in kinds:
        tiles = []
        for i in range(columns):
            drawn = render(sample_scene(first + i, kind), size)
            tile = drawn.image.astype(np.float32)
            if masks:
                tile[drawn.mask] = 0.4 * tile[drawn.mask] + 0.6 * np.array([0, 255, 255], np.float32)
            tiles.append(tile.astype(np.uint8))
        rows.append(np.concatenate(tiles, axis=1))
    sheet = Image.fromarray(np.concatenate(rows, axis=0))
    zoom = 128 // size
    save_image(sheet.resize((zoom * sheet.width, zoom * sheet.height), Image.Resampling.NEAREST), path)
