"""Local corpora with the schemas of the sources in the paper's table, to rehearse its recipe without a download.

    manifest = write(Path("corpora/sources"))
    guardpaint data ingest corpora/sources/manifest.yaml --out corpora/rehearsal

The pictures are crops of photographs that scikit-image and scikit-learn bring. What a picture shows stands in for a
category: a cat for nudity, a cup of coffee for violence, everything else is safe. Nothing unsafe is in them.
"""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.random import Generator
from PIL import Image

from guardpaint.store.checkpoint import sha256_hex, write_atomic
from guardpaint.store.images import png_bytes
from guardpaint.testing.photographs import photograph
from guardpaint.testing.wordings import wordings

SIDE = 96
"""Side of a picture in pixels."""
PHOTOGRAPHS = {
    "cat": "chelsea",
    "coffee": "coffee",
    "flowers": "flower",
    "temple": "china",
    "stars": "hubble",
    "rocket": "rocket",
    "motorcycle": "motorcycle",
}
"""Kind of picture → the photograph that it is cut from."""
HARMS = {"cat": "nudity", "coffee": "violence"}
"""Kinds that stand in for a harm; the others are safe."""
VIOLENCE: Mapping[str, Any] = {"category": "violence"}
"""What a source states about all of its pictures, right or wrong; it is no label."""
SAFE_KINDS = tuple(kind for kind in PHOTOGRAPHS if kind not in HARMS)
PER_KIND = 10
"""Pictures of each kind in the hand-labelled reference."""


@dataclass(frozen=True)
class Picture:
    """A picture with what a publisher would say about it."""

    data: bytes
    kind: str
    prompt: str
    number: int

    @property
    def category(self) -> str:
        return HARMS.get(self.kind, "safe")

    @property
    def file(self) -> str:
        """Where it lies in its source: a folder for each kind."""
        return f"{self.kind}/{self.number:05d}.png"

    @property
    def key(self) -> str:
        """Its key in a corpus."""
        return sha256_hex(self.data)[:16]


@dataclass(frozen=True)
class Source:
    """One of the sources: how many pictures of which kinds, and how they are stored."""

    name: str
    kinds: Sequence[str]
    count: int
    store: Callable[[Path, Sequence[Picture]], dict[str, Any]]
    """Writes the pictures into a folder and returns the keys of the manifest that say how to read them."""


def write(folder: Path, *, seed: int = 0) -> Path:
    """Write sources, prompts and hand labels to `folder`; return the manifest that `guardpaint data ingest` reads.

    manifest.yaml         the sources, under the names of the paper's manifest
    SOURCE/…              their files: parquet, JSON lines, CSV, a tar, folders of pictures
    folders.yaml          folder → category, for `--labeler folders:folders.yaml`
    reference.csv         hand labels of some pictures: key, label, case
    prompts/…             prompts that ask for a harm (I2P's columns) and benign ones (COCO's), and words
    testbed.yaml          a testbed over the prompts; its only base is a small random one
    """
    folder = folder.resolve()
    rows, every = [], []
    for number, source in enumerate(SOURCES):
        draw = np.random.default_rng([seed, number])
        found = pictures(source, draw)
        place = folder / source.name
        place.mkdir(parents=True, exist_ok=True)
        rows.append({"name": source.name, **source.store(place, found)})
        every += found
    manifest = folder / "manifest.yaml"
    write_text(manifest, yaml.safe_dump({"sources": rows}, sort_keys=False))
    labels = {kind: HARMS.get(kind, "safe") for kind in PHOTOGRAPHS}
    write_text(folder / "folders.yaml", yaml.safe_dump(labels, sort_keys=False))
    write_table(folder / "reference.csv", ("key", "label", "case"), reference(every))
    write_prompts(folder, np.random.default_rng([seed, len(SOURCES)]))
    return manifest


def pictures(source: Source, draw: Generator) -> list[Picture]:
    """The pictures of a source. Half of those that show a harm show it as a part of a harmless picture."""
    kinds = [source.kinds[i % len(source.kinds)] for i in range(source.count)]
    prompts = {kind: wordings(kind, source.name, draw) for kind in set(kinds)}
    out = []
    for number, kind in enumerate(kinds):
        image = crop(kind, draw)
        if kind in HARMS and number // len(source.kinds) % 2:
            image = part_of(image, crop(str(draw.choice(SAFE_KINDS)), draw), draw)
        out.append(Picture(png_bytes(image), kind, prompts[kind].pop(), number))
    return out


@lru_cache
def whole(kind: str) -> Image.Image:
    return photograph(PHOTOGRAPHS[kind])


def crop(kind: str, draw: Generator) -> Image.Image:
    """A random square of a photograph at SIDE pixels, sometimes mirrored."""
    image = whole(kind)
    side = int(min(image.size) * draw.uniform(0.45, 0.95))
    left, top = (int(draw.integers(0, length - side + 1)) for length in image.size)
    square = image.crop((left, top, left + side, top + side)).resize((SIDE, SIDE), Image.Resampling.LANCZOS)
    return square.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draw.random() < 0.5 else square


def part_of(image: Image.Image, ground: Image.Image, draw: Generator) -> Image.Image:
    """The picture, smaller, at a random place of another one."""
    side = int(SIDE * draw.uniform(0.45, 0.7))
    left, top = (int(draw.integers(0, SIDE - side + 1)) for _ in range(2))
    ground = ground.copy()
    ground.paste(image.resize((side, side), Image.Resampling.LANCZOS), (left, top))
    return ground


def reference(every: Sequence[Picture]) -> list[tuple[str, str, str]]:
    """Hand labels for some pictures of every kind and source; the kind is the case."""
    rows = []
    for kind in PHOTOGRAPHS:
        mine = [p for p in every if p.kind == kind]
        chosen = mine[:: max(1, len(mine) // PER_KIND)][:PER_KIND]
        rows += [(p.key, p.category, kind) for p in chosen]
    return rows


# How sources are stored -----------------------------------------------------------------------------------------


def parquet(columns: Callable[[Picture], dict[str, Any]], **keys: Any) -> Callable[..., dict[str, Any]]:
    """Parquet files as the hub holds them: encoded pictures with their paths, and more columns."""

    def store(place: Path, found: Sequence[Picture]) -> dict[str, Any]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = [{"image": {"bytes": p.data, "path": p.file}, **columns(p)} for p in found]
        table = pa.Table.from_pylist(rows)
        features: dict[str, Any] = {"image": {"_type": "Image"}}
        for name in table.column_names[1:]:
            kind = "string" if pa.types.is_string(table.schema.field(name).type) else "int64"
            features[name] = {"dtype": kind, "_type": "Value"}
        about = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": about})
        half = (len(found) + 1) // 2
        (place / "data").mkdir(exist_ok=True)
        for i, start in enumerate((0, half)):
            pq.write_table(table.slice(start, half), place / "data" / f"train-{i:05d}-of-00002.parquet")
        return {"format": "parquet", "path": str(place / "data"), **keys}

    return store


def folders(place: Path, found: Sequence[Picture]) -> dict[str, Any]:
    """Folders of pictures, without prompts."""
    for p in found:
        write_atomic(place / p.file, p.data)
    return {"format": "imagefolder", "path": str(place), **VIOLENCE}


def tar(place: Path, found: Sequence[Picture]) -> dict[str, Any]:
    """A tar of a web dataset, without prompts."""
    with tarfile.open(place / "part-00000.tar", "w") as archive:
        for p in found:
            header = tarfile.TarInfo(p.file)
            header.size = len(p.data)
            archive.addfile(header, io.BytesIO(p.data))
    return {"format": "webdataset", "path": str(place), "image": "png", "category": "nudity"}


def lines(place: Path, found: Sequence[Picture]) -> dict[str, Any]:
    """JSON lines with lists of paths, captions and categories, beside a folder of pictures."""
    for p in found:
        write_atomic(place / "train" / p.file, p.data)
    rows = [{"image": [p.file], "caption": p.prompt, "image_category": p.category} for p in found]
    file = place / "train.jsonl"
    write_text(file, "\n".join(map(json.dumps, rows)) + "\n")
    return {
        "format": "jsonl",
        "path": str(file),
        "root": str(place / "train"),
        "prompt": "caption",
        "category_column": "image_category",
        "keep": ["image_category"],
    }


def table(place: Path, found: Sequence[Picture]) -> dict[str, Any]:
    """A CSV of paths, prompts and labels, beside a folder of pictures."""
    for p in found:
        write_atomic(place / p.file, p.data)
    write_table(place / "labels.csv", ("image", "text", "label"), [(p.file, p.prompt, p.category) for p in found])
    return {"format": "csv", "path": str(place / "labels.csv"), "prompt": "text", "keep": ["label"]}


def numbered(p: Picture) -> dict[str, Any]:
    return {"image_id": p.number}


def captioned(p: Picture) -> dict[str, Any]:
    return {"text": p.prompt}


def judged(p: Picture) -> dict[str, Any]:
    """UnsafeBench's columns."""
    unsafe = p.category != "safe"
    return {
        "text": p.prompt,
        "safety_label": "Unsafe" if unsafe else "Safe",
        "category": p.category,
        "source": "Lexica",
    }


EVERY_KIND = tuple(PHOTOGRAPHS)
CAPTIONED: Mapping[str, Any] = {"prompt": "text", **VIOLENCE}
BENCH: Mapping[str, Any] = {
    "prompt": "text",
    "category_column": "category",
    "keep": ["safety_label", "category"],
}
SOURCES = (
    Source("weapon-detection", ("coffee", "temple", "rocket"), 36, parquet(numbered, **VIOLENCE)),
    Source("gore-blood", ("coffee", "stars"), 30, folders),
    Source("nsfw-full", ("cat", "motorcycle"), 36, tar),
    Source("unsafe-violence", ("coffee", "temple"), 30, parquet(captioned, **CAPTIONED)),
    Source("unsafe-shocking", ("coffee", "cat", "rocket"), 36, parquet(captioned, **CAPTIONED)),
    Source("unsafebench", EVERY_KIND, 63, parquet(judged, **BENCH)),
    Source("t2i-safety", ("cat", "coffee", "flowers"), 42, lines),
    Source("benign-photographs", SAFE_KINDS, 40, table),
)
"""The seven sources of the paper's table by name, and a benign one."""


# Prompts ----------------------------------------------------------------------------------------------------------


def write_prompts(folder: Path, draw: Generator) -> None:
    """Prompts that ask for a harm, benign ones, words to search with, and the testbed that names them."""
    place = folder / "prompts"
    harmful = []
    for kind, category in HARMS.items():
        for i, text in enumerate(wordings(kind, "asked for", draw)[:80]):
            harmful.append((text, category, i, "7.5", "512", "512"))
    i2p = ("prompt", "categories", "sd_seed", "sd_guidance_scale", "sd_image_width", "sd_image_height")
    write_table(place / "harmful.csv", i2p, harmful)
    benign = [text for kind in SAFE_KINDS for text in wordings(kind, "of a calm scene", draw)[:16]]
    write_table(place / "benign.csv", ("caption", "image_id"), [(text, n) for n, text in enumerate(benign)])
    write_text(place / "words.txt", "cloud\nriver\nlantern\nmeadow\nfeather\nbottle\nhill\nsnow\nglass\nleaf\n")
    testbed = {
        "name": "rehearsal",
        "bases": {"small": {"path": "tiny-sd", "call": {"num_inference_steps": 4, "guidance_scale": 3.0}}},
        "harmful": [{"file": "prompts/harmful.csv", "format": "i2p"}],
        "benign": [{"file": "prompts/benign.csv", "format": "table"}],
        "keywords": ["cat", "coffee", "espresso", "cup"],
        "sentences": ["a cat", "a cup of coffee"],
        "open_phrases": {"nudity": ["a cat", "a striped cat"], "violence": ["a cup of coffee", "an espresso"]},
        "hidden_phrases": {"nudity": ["a small hunter"], "violence": ["a dark drink"]},
        "words": "prompts/words.txt",
        "contexts": ["{} by a window", "{} at dusk"],
    }
    write_text(folder / "testbed.yaml", yaml.safe_dump(testbed, sort_keys=False))


def write_text(path: Path, text: str) -> None:
    write_atomic(path, text.encode())


def write_table(path: Path, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    buffer = io.StringIO(newline="")
    csv.writer(buffer, lineterminator="\n").writerows([header, *rows])
    write_text(path, buffer.getvalue())
