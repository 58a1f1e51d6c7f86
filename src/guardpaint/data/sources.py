"""Image sources: datasets on the hub, on disk or from a testbed, named in a manifest and read as streams.

guardpaint data ingest configs/data/paper.yaml --out corpora/paper
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import yaml
from PIL import Image

from guardpaint.data.store import SHARD, Corpus, Example, key_of
from guardpaint.errors import BadConfig, BadInput
from guardpaint.store.folders import HUB, HUB_ID, refusal
from guardpaint.store.images import png_bytes, read_bytes
from guardpaint.store.progress import bar


@runtime_checkable
class Rows(Protocol):
    """A dataset that generates its own rows, such as a testbed's."""

    def rows(self, split: str, skip: int = 0) -> Iterator[dict[str, Any]]:
        """Yield the rows of a split after the first `skip`, with encoded images."""
        ...


SUFFIXES = (".parquet", ".json", ".jsonl", ".csv", ".tar", ".zip", ".png", ".jpg")
OpenDataset = Callable[[str | None], Rows]
"""Opens the dataset of a testbed by name; None means the default testbed."""
FORMATS = {
    "parquet": "parquet",
    "jsonl": "json",
    "csv": "csv",
    "imagefolder": "imagefolder",
    "webdataset": "webdataset",
}
FILE = "file"
"""Among the columns that a source keeps, the one with the path of the image in the source."""


@dataclass(frozen=True)
class Source:
    """One dataset: its location and the columns to read."""

    name: str
    path: str
    """A hub id owner/name, or a local file or folder."""
    format: str = "hub"
    """hub, parquet, jsonl, csv, imagefolder, webdataset, testbed (the path is NAME:SPLIT) or world (the default
    testbed; the path is the split)."""
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
    keep: Sequence[str] = ()
    """Further columns to store, for labels by column."""
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.format not in ("hub", "testbed", "world", *FORMATS):
            raise BadConfig(f"source {self.name}: format={self.format!r}; choose hub, testbed, {', '.join(FORMATS)}")
        if self.format == "testbed" and not all(self.path.rpartition(":")):
            raise BadConfig(f"source {self.name}: path={self.path!r}; write the path of a testbed as NAME:SPLIT")
        if not self.name.replace("-", "").replace("_", "").isalnum():
            raise BadConfig(f"source name {self.name!r}: use letters, digits, - and _ only")
        if isinstance(self.keep, str) or FILE in self.keep or not all(isinstance(c, str) for c in self.keep):
            raise BadConfig(f"source {self.name}: keep={self.keep!r}; write a list of columns, none of them {FILE!r}")

    @property
    def repository(self) -> str:
        """The hub id of a source on the hub."""
        return self.path.removeprefix(HUB)

    def check_place(self) -> None:
        """Raise BadInput if the files are not there, or if the path of a hub source cannot be a hub id."""
        if self.format in FORMATS:
            local_files(self)
        elif self.format == "hub" and not self.path.startswith(HUB):
            local = f"a local source needs `format:` {', '.join(FORMATS)}"
            owner = Path(self.path.split("/")[0])
            if Path(self.path).exists():
                raise BadInput(f"source {self.name}: {self.path} is a local file or folder, but format is hub; {local}")
            if not HUB_ID.fullmatch(self.path) or Path(self.path).suffix in SUFFIXES:
                raise BadInput(
                    f"source {self.name}: {self.path!r} is no local path, and no hub id, which is written OWNER/NAME; "
                    f"{local}"
                )
            if owner.is_dir():
                raise BadInput(
                    f"source {self.name}: {self.path} does not exist, but the folder {owner} does; {local}, and a hub "
                    f"id that begins like a folder is written {HUB}{self.path}"
                )
        elif self.format == "hub" and not HUB_ID.fullmatch(self.repository):
            raise BadInput(f"source {self.name}: {self.path!r} is no hub id; write {HUB}OWNER/NAME")


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


def stream(
    source: Source, skip: int = 0, open_dataset: OpenDataset | None = None, token: str | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a source after the first `skip`, with encoded images and with names for classes."""
    if source.format in ("testbed", "world"):
        if open_dataset is None:
            raise BadInput(f"source {source.name}: testbeds cannot be opened here; use `guardpaint data ingest`")
        name, _, split = source.path.rpartition(":")
        yield from open_dataset(name or None).rows(split, skip)
        return
    try:
        from datasets import ClassLabel, load_dataset
        from datasets import Image as ImageColumn
    except ImportError as error:
        raise BadInput("reading datasets needs the `datasets` library: pip install 'guardpaint[data]'") from error
    source.check_place()
    try:
        if source.format == "hub":
            data = load_dataset(source.repository, source.config, split=source.split, streaming=True, token=token)
        else:
            builder = FORMATS[source.format]
            where: dict[str, Any] = {"data_files": local_files(source)}
            data = load_dataset(builder, **where, split="train", streaming=True)
        if isinstance((data.features or {}).get(source.image), ImageColumn):
            data = data.cast_column(source.image, ImageColumn(decode=False))
        kept = {c: (data.features or {}).get(c) for c in source.keep}
        classes = {c: feature.names for c, feature in kept.items() if isinstance(feature, ClassLabel)}
        for row in data.skip(skip):
            yield {**row, **{c: names[row[c]] for c, names in classes.items() if row[c] is not None and row[c] >= 0}}
    except BadInput:
        raise
    except Exception as error:
        why = f"cannot be read ({error})"
        if source.format == "hub":
            why = refusal(error, source.repository, None, token, "datasets/")
        raise BadInput(f"source {source.name} ({source.path}): {why}") from error


def local_files(source: Source) -> str | list[str]:
    """The files of a local source: those of its format in a folder, or its path or pattern as it is."""
    path = Path(source.path)
    if not path.exists() and not any(c in source.path for c in "*{"):
        raise BadInput(f"source {source.name}: {source.path} does not exist")
    if path.is_dir():
        ends = {
            "parquet": "*.parquet",
            "jsonl": "*.jsonl",
            "csv": "*.csv",
            "webdataset": "*.tar",
            "imagefolder": "**/*",
        }
        files = sorted(str(p) for p in path.glob(ends[source.format]) if p.is_file())
        if not files:
            raise BadInput(f"source {source.name}: no file {ends[source.format]} in {source.path}")
        return files
    return source.path


def image_file(row: dict[str, Any], source: Source) -> str | None:
    """The path of a row's image, relative to its source; None if the source does not say."""
    value = row[source.image]
    if isinstance(value, list):
        value = value[0] if value else None
    if isinstance(value, dict):
        value = value.get("path")
    if not isinstance(value, str):
        value = row.get("__key__")
    if not isinstance(value, str):
        return None
    path, root = Path(value), Path(source.root or source.path)
    for start in (root, root.resolve()):
        if path.is_relative_to(start):
            path = path.relative_to(start)
    return path.as_posix()


def image_bytes(value: Any, source: Source) -> bytes:
    """The encoded bytes of a dataset's image value; raises BadInput if there is no image."""
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
        return read_bytes(path)
    raise BadInput("the row has no image")


def ingest(
    sources: list[Source],
    corpus: Corpus,
    limit: int | None = None,
    quiet: bool = False,
    open_dataset: OpenDataset | None = None,
    token: str | None = None,
) -> dict[str, Any]:
    """Read every source into the corpus, resuming where an earlier run stopped; returns counts per source.

    Images that cannot be read are counted and listed in broken.jsonl of the corpus. `token` is the hub's.
    """
    for source in sources:
        source.check_place()
    known = corpus.keys() if corpus.files() else set()
    for source in sources:
        most = min((n for n in (source.limit, limit) if n is not None), default=None)
        seen = {"read": 0, "kept": 0, "repeated": 0, "broken": 0, **corpus.state().get(source.name, {})}
        if most is not None and seen["read"] >= most:
            continue
        batch = Batch()
        with bar(source.name, most, quiet, seen["read"]) as advance:
            left = None if most is None else most - seen["read"]
            for row in islice(stream(source, seen["read"], open_dataset, token), left):
                take(row, source, batch, known, seen)
                advance(1)
                if len(batch.examples) + len(batch.broken) >= SHARD:
                    corpus.add(source.name, batch.examples, seen, batch.broken)
                    batch = Batch()
        corpus.add(source.name, batch.examples, seen, batch.broken)
    return corpus.state()


@dataclass
class Batch:
    """What has been read and not been stored yet."""

    examples: list[Example] = field(default_factory=list)
    broken: list[dict[str, Any]] = field(default_factory=list)


def take(row: dict[str, Any], source: Source, batch: Batch, known: set[str], seen: dict[str, int]) -> None:
    """Add a row to the batch and to the counts; repeated images are only counted, broken ones are listed."""
    seen["read"] += 1
    for column in (source.image, *source.keep):
        if column not in row:
            raise BadInput(f"source {source.name}: no column {column!r}; it has {', '.join(row)}")
    file = image_file(row, source)
    try:
        example = example_of(row, source, file)
        if example.key in known:
            seen["repeated"] += 1
            return
        example.picture()
    except BadInput as error:
        seen["broken"] += 1
        batch.broken.append({"source": source.name, "row": seen["read"], "file": file, "problem": str(error)})
        return
    known.add(example.key)
    batch.examples.append(example)
    seen["kept"] += 1


def example_of(row: dict[str, Any], source: Source, file: str | None) -> Example:
    """The example in a row; raises BadInput if it has no image."""
    data = image_bytes(row[source.image], source)
    prompt = row.get(source.prompt) if source.prompt else None
    nominal = row.get(source.category_column) if source.category_column else source.category
    text = str(prompt).strip() if prompt else None
    own = {c: row[c] for c in source.keep} | ({FILE: file} if file else {})
    try:
        columns = json.dumps(own, ensure_ascii=False) if own else None
    except TypeError as error:
        raise BadConfig(
            f"source {source.name}: keep={list(source.keep)}; only texts and numbers are kept ({error})"
        ) from error
    return Example(key_of(data), data, text or None, source.name, None if nominal is None else str(nominal), columns)
