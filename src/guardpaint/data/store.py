"""A corpus on disk: images in parquet shards, with captions, labels and splits in JSONL files beside them.

OUT/
  images/<source>-00000.parquet   key, image bytes, prompt, source, nominal category, the source's own columns
  state.json                      counts per source, from which `ingest` resumes
  broken.jsonl                    the images that could not be read, and why
  captions.jsonl  labels-<labeler>-<question>.jsonl  splits.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from guardpaint.errors import BadInput
from guardpaint.store.checkpoint import read_json, sha256_hex, write_json
from guardpaint.store.images import as_rgb, load_bytes
from guardpaint.store.rows import append_rows, read_rows

SHARD = 500
"""Images per parquet file."""
BROKEN = "broken.jsonl"


@dataclass(frozen=True)
class Example:
    """One image with the prompt and category that its source gives."""

    key: str
    """First 16 hex digits of the image bytes' SHA-256."""
    image: bytes
    prompt: str | None
    source: str
    nominal: str | None
    """The category that the source states; it never serves as a label."""
    own: str | None = None
    """JSON of what else the source says: `file`, the path of the image in the source, and the columns that its manifest
    keeps. Only labels that are asked for by folder or column are read from here."""

    def columns(self) -> dict[str, Any]:
        """What else the source says about the image."""
        return json.loads(self.own) if self.own else {}

    def picture(self) -> Image.Image:
        """The decoded image in RGB: the first frame, upright, over white. Raises BadInput if that is not possible."""
        return as_rgb(load_bytes(self.image, f"image {self.key} of {self.source}"))


def key_of(image: bytes) -> str:
    """The key of an image in a corpus; equal bytes have equal keys."""
    return sha256_hex(image)[:16]


class Corpus:
    """Reads and extends a corpus folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.shards = root / "images"

    def state(self) -> dict[str, dict[str, int]]:
        """Counts per source: rows read, kept, repeated and broken."""
        path = self.root / "state.json"
        return read_json(path) if path.exists() else {}

    def add(
        self,
        source: str,
        examples: Sequence[Example],
        seen: Mapping[str, int],
        broken: Sequence[Mapping[str, Any]] = (),
    ) -> Path | None:
        """Write a shard and the list of broken images, then the source's counts.

        After a crash in between, some rows are stored twice; readers skip repeated keys.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = None
        if examples:
            self.shards.mkdir(parents=True, exist_ok=True)
            path = self.shards / f"{source}-{seen['read']:08d}.parquet"
            part = path.with_suffix(".part")
            pq.write_table(pa.Table.from_pylist([asdict(e) for e in examples], schema()), part)
            part.rename(path)
        if broken:
            self.append(BROKEN, broken)
        write_json(self.root / "state.json", {**self.state(), source: dict(seen)})
        return path

    def keys(self) -> set[str]:
        import pyarrow.parquet as pq

        return {k for p in self.files() for k in pq.read_table(p, columns=["key"])["key"].to_pylist()}

    def files(self) -> list[Path]:
        return sorted(self.shards.glob("*.parquet"))

    def __iter__(self) -> Iterator[Example]:
        """Every example once, in a stable order, with a few in memory at a time."""
        import pyarrow.parquet as pq

        seen: set[str] = set()
        if not self.files():
            raise BadInput(f"{self.root}: no images; fill it with `guardpaint data ingest`")
        for path in self.files():
            for batch in pq.ParquetFile(path).iter_batches(batch_size=64):
                for row in batch.to_pylist():
                    if row["key"] not in seen:
                        seen.add(row["key"])
                        yield Example(**row)

    def one(self, pattern: str) -> str:
        """The name of the only file of this corpus that fits a pattern; a plain name is returned as it is."""
        if not any(c in pattern for c in "*?["):
            return pattern
        names = sorted(p.name for p in self.root.glob(pattern))
        if len(names) != 1:
            raise BadInput(f"{self.root / pattern}: {', '.join(names) or 'no file'}; the pattern must fit exactly one")
        return names[0]

    def broken(self) -> list[dict[str, Any]]:
        """The images that could not be read, once each: source, row, file, problem."""
        return list({(r["source"], r["row"]): r for r in self.lines(BROKEN)}.values())

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Rows of a JSONL file of this corpus."""
        return read_rows(self.root / name)

    def append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows to a JSONL file of this corpus."""
        append_rows(self.root / name, rows)


def schema() -> Any:
    import pyarrow as pa

    text = pa.string()
    return pa.schema(
        [("key", text), ("image", pa.binary()), ("prompt", text), ("source", text), ("nominal", text), ("own", text)]
    )
