"""Image sources: datasets on the hub, on disk or from a testbed, named in a manifest and read as streams.

guardpaint data ingest configs/data/paper.yaml --out corpora/paper
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import yaml
from PIL import Image

from guardpaint.data.store import SHARD, Corpus, Example, key_of
from guardpaint.errors import BadConfig, BadInput
from guardpaint.store.images import png_bytes
from guardpaint.store.progress import bar


@runtime_checkable
class Rows(Protocol):
    """A dataset that generates its own rows, such as a testbed's."""

    def rows(self, split: str, skip: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the rows of a split after the first `skip`, with encoded images."""
        ...


OpenDataset = Callable[[str | None], Rows]
"""Opens the dataset of a testbed by name; None means the default testbed."""
FORMATS = {"parquet": "parquet", "jsonl": "json", "imagefolder": "imagefolder", "webdataset": "webdataset"}


@dataclass(frozen=True)
class Source:
    """One dataset: its location and the columns to read."""

    name: str
    path: str
    """A hub id owner/name, or a local file or folder."""
    format: str = "hub"
    """hub, parquet, jsonl, imagefolder, webdataset, testbed (the path is NAME:SPLIT) or world (the default testbed; the
    path is the split)."""
    split: str = "train"
    config: str | None = None
    image: str = "image"
    """Column with the images: bytes, paths, or lists whose first item is one of these."""
    root: str | None = None
    """Folder that image paths are relative to; by default the folder of the file."""
    prompt: str | None = None
    """Column with the prompts; None if the source has none and captions will replace them."""
    category: str | None = None
    """Nominal category of the whole source. It is only recorded: labels come from the labeler."""
    category_column: str | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.format not in ("hub", "testbed", "world", *FORMATS):
            raise BadConfig(f"source {self.name}: format={self.format!r}; choose hub, testbed, {', '.join(FORMATS)}")
        if self.format == "testbed" and not all(self.path.rpartition(":")):
            raise BadConfig(f"source {self.name}: path={self.path!r}; write the path of a testbed as NAME:SPLIT")
        if not self.name.replace("-", "").replace("_", "").isalnum():
            raise BadConfig(f"source name {self.name!r}: use letters, digits, - and _ only")


def load_manifest(path: Path) -> list[Source]:
    """The sources of a YAML manifest; their names must be unique."""
    try:
        rows = yaml.safe_load(path.read_text(encoding="utf-8"))["sources"]
        sources = [Source(**row) for row in rows]
    except FileNotFoundError as error:
        raise BadConfig(f"{path}: no such manifest") from error
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise BadConfig(f"{path}: needs a list `sources` of known keys ({error})") from error
    names = [s.name for s in sources]
    if len(set(names)) != len(names) or not names:
        raise BadConfig(f"{path}: needs at least one source, and unique names; got {names}")
    return sources


def stream(source: Source, skip: int = 0, open_dataset: OpenDataset | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a source after the first `skip`, with encoded images."""
    if source.format in ("testbed", "world"):
        if open_dataset is None:
            raise BadInput(f"source {source.name}: testbeds cannot be opened here; use `guardpaint data ingest`")
        name, _, split = source.path.rpartition(":")
        yield from open_dataset(name or None).rows(split, skip)
        return
    try:
        from datasets import Image as ImageColumn
        from datasets import load_dataset
    except ImportError as error:
        raise BadInput("reading datasets needs the `datasets` library: pip install 'guardpaint[data]'") from error
    try:
        if source.format == "hub":
            data = load_dataset(source.path, source.config, split=source.split, streaming=True)
        else:
            builder = FORMATS[source.format]
            where: dict[str, Any] = {"data_files": local_files(source)}
            data = load_dataset(builder, **where, split="train", streaming=True)
        if isinstance((data.features or {}).get(source.image), ImageColumn):
            data = data.cast_column(source.image, ImageColumn(decode=False))
        yield from data.skip(skip)
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"source {source.name} ({source.path}): cannot be read ({error})") from error


def local_files(source: Source) -> str | list[str]:
    """The files of a local source: those of its format in a folder, or its path or pattern as it is."""
    path = Path(source.path)
    if not path.exists() and not any(c in source.path for c in "*{"):
        raise BadInput(f"source {source.name}: {source.path} does not exist")
    if path.is_dir():
        ends = {"parquet": "*.parquet", "jsonl": "*.jsonl", "webdataset": "*.tar", "imagefolder": "**/*"}
        files = sorted(str(p) for p in path.glob(ends[source.format]) if p.is_file())
        if not files:
            raise BadInput(f"source {source.name}: no file {ends[source.format]} in {source.path}")
        return files
    return source.path


def image_bytes(value: Any, source: Source) -> bytes | None:
    """The encoded bytes of a dataset's image value; None if it has no image."""
    if isinstance(value, list):
        value = value[0] if value else None
    if isinstance(value, dict):
        if value.get("bytes") is not None:
            return bytes(value["bytes"])
        value = value.get("path")
    if isinstance(value, bytes):
        return value
    if isinstance(value, Image.Image):
        return png_bytes(value.convert("RGB"))
    if isinstance(value, str):
        path = Path(value)
        if not path.is_absolute():
            path = (Path(source.root) if source.root else Path(source.path).parent) / path
        return path.read_bytes() if path.is_file() else None
    return None


def ingest(
    sources: list[Source],
    corpus: Corpus,
    limit: int | None = None,
    quiet: bool = False,
    open_dataset: OpenDataset | None = None,
) -> dict[str, Any]:
    """Read every source into the corpus, resuming where an earlier run stopped; returns counts per source."""
    known = corpus.keys() if corpus.files() else set()
    for source in sources:
        most = min((n for n in (source.limit, limit) if n is not None), default=None)
        seen = {"read": 0, "kept": 0, "repeated": 0, "broken": 0, **corpus.state().get(source.name, {})}
        if most is not None and seen["read"] >= most:
            continue
        batch: list[Example] = []
        with bar(source.name, most, quiet, seen["read"]) as advance:
            left = None if most is None else most - seen["read"]
            for row in islice(stream(source, seen["read"], open_dataset), left):
                take(row, source, batch, known, seen)
                advance(1)
                if len(batch) >= SHARD:
                    corpus.add(source.name, batch, seen)
                    batch = []
        corpus.add(source.name, batch, seen)
    return corpus.state()


def take(row: dict[str, Any], source: Source, batch: list[Example], known: set[str], seen: dict[str, int]) -> None:
    """Add a row to the batch and to the counts; repeated and broken images are only counted."""
    seen["read"] += 1
    if source.image not in row:
        raise BadInput(f"source {source.name}: no column {source.image!r}; it has {', '.join(row)}")
    data = image_bytes(row[source.image], source)
    if data is None:
        seen["broken"] += 1
        return
    prompt = row.get(source.prompt) if source.prompt else None
    nominal = row.get(source.category_column) if source.category_column else source.category
    text = str(prompt).strip() if prompt else None
    example = Example(key_of(data), data, text or None, source.name, None if nominal is None else str(nominal))
    if example.key in known:
        seen["repeated"] += 1
        return
    try:
        example.picture()
    except BadInput:
        seen["broken"] += 1
        return
    known.add(example.key)
    batch.append(example)
    seen["kept"] += 1
