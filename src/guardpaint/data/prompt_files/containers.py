"""Opens a prompt file of any container: CSV, TSV, JSON, JSON lines, Parquet or plain text, gzipped or not.

The suffix decides, in any case and before a `.gz`; a file without one is told by its content.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

from guardpaint.data.prompt_files.records import Records, Row
from guardpaint.data.prompt_files.trees import records_of
from guardpaint.errors import BadInput

csv.field_size_limit(10_000_000)
KINDS = {
    ".csv": "csv", ".tsv": "tsv", ".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "lines",
    ".parquet": "parquet",
}  # fmt: skip
NUMBER = re.compile(r"\d+[.)]\s+")


def open_records(path: Path, lines: bool = False) -> Records:
    """The records of a file; with `lines` every line is one, whatever the suffix says."""
    data = content(path)
    kind = "lines" if lines else KINDS.get(suffix_of(path), "")
    if data[:4] == b"PAR1":
        return parquet(path, data)
    if kind == "parquet":
        raise BadInput(f"{path}: not a Parquet file")
    text = decoded(path, data)
    kind = kind or kind_of(text)
    if kind == "lines":
        return plain(text)
    if kind == "json":
        return records_of(path, json_of(path, text))
    if kind == "jsonl":
        return records_of(path, json_lines(path, text))
    return table(path, text, "\t" if kind == "tsv" else ",")


def stem_of(path: Path) -> str:
    """The name of a file without `.gz` and without a suffix that names a container."""
    name = re.sub(r"\.gz$", "", path.name, flags=re.IGNORECASE)
    return name[: -len(Path(name).suffix)] if Path(name).suffix.lower() in KINDS else name


def suffix_of(path: Path) -> str:
    """The last suffix in lower case, leaving `.gz` out."""
    return Path(re.sub(r"\.gz$", "", path.name, flags=re.IGNORECASE)).suffix.lower()


def content(path: Path) -> bytes:
    """The bytes of a file, unpacked if they are gzipped."""
    if path.is_dir():
        raise BadInput(f"{path}: a folder, where one file is wanted")
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except FileNotFoundError as error:
        raise BadInput(f"{path}: no such file") from error
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{path}: cannot be read ({error})") from error
    if data[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        raise BadInput(f"{path}: a zip archive (or a spreadsheet); unpack it and name a file in it")
    return data


def decoded(path: Path, data: bytes) -> str:
    """The text of a file."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\x00" in data[:200]:
        raise BadInput(f"{path}: UTF-16 text or binary data; save it as UTF-8, as with `iconv -f UTF-16 -t UTF-8`")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not UTF-8 text (byte {error.start})") from error
    if not text.strip():
        raise BadInput(f"{path}: empty")
    return text


def kind_of(text: str) -> str:
    """The container of a text whose suffix says nothing. A first line that names a prompt column begins a table."""
    first = next(line for line in text.splitlines() if line.strip())
    if first.lstrip()[0] in "[{":
        try:
            json.loads(text)
        except json.JSONDecodeError:
            return "jsonl"
        return "json"
    for mark, kind in (("\t", "tsv"), (",", "csv")):
        names = {cell.strip().strip('"').lower() for cell in first.split(mark)}
        if mark in first and names & {"prompt", "text", "caption", "adv_prompt", "image_prompt", "sensitive prompt"}:
            return kind
    return "csv" if first.strip().lower() == "prompt" else "lines"


def plain(text: str) -> Records:
    """One record for each line that is not blank; numbers are dropped if every line begins with one."""
    lines = [(i, line.strip()) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    numbered = all(NUMBER.match(line) for _, line in lines)
    if numbered:
        lines = [(i, NUMBER.sub("", line, count=1)) for i, line in lines]
    rows = [(f"line {i}", {"id": str(i), "prompt": line}) for i, line in lines]
    return Records("numbered-lines" if numbered else "lines", ("prompt",), rows)


def table(path: Path, text: str, mark: str) -> Records:
    """The rows of a CSV or TSV file. Blank lines, CRLF and quoted line breaks are accepted; a row of another length
    raises BadInput."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=mark)
    header: list[str] | None = None
    rows: list[tuple[str, Row]] = []
    before = 0
    try:
        for cells in reader:
            line, before = before + 1, reader.line_num
            if not any(c.strip() for c in cells):
                continue
            if header is None:
                header = [c.strip() or "unnamed" for c in cells]
                repeated = [name for name, count in Counter(header).items() if count > 1]
                if repeated:
                    raise BadInput(f"{path}:{line}: column {repeated[0]!r} appears more than once")
                continue
            if len(cells) != len(header):
                raise BadInput(f"{path}:{line}: {len(cells)} values in a row, but {len(header)} columns")
            rows.append((f"line {line}", dict(zip(header, cells, strict=True))))
    except csv.Error as error:
        raise BadInput(f"{path}:{reader.line_num}: {error}") from error
    if header is None or not rows:
        raise BadInput(f"{path}: no rows")
    return Records("table", header, rows)


def parquet(path: Path, data: bytes) -> Records:
    """The rows of a Parquet file."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise BadInput(f"{path}: reading Parquet needs pyarrow: pip install 'guardpaint[eval]'") from error
    try:
        read = pq.read_table(io.BytesIO(data))
    except (pa.ArrowException, OSError) as error:
        raise BadInput(f"{path}: not a Parquet file ({error})") from error
    if not read.num_rows:
        raise BadInput(f"{path}: no rows")
    return Records("table", read.column_names, [(f"row {i}", row) for i, row in enumerate(read.to_pylist())])


def json_of(path: Path, text: str) -> Any:
    """The value of a JSON file, or of all its lines if it holds one value in each."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return json_lines(path, text)
        raise BadInput(f"{path}:{error.lineno}: not JSON ({error.msg})") from error


def json_lines(path: Path, text: str) -> list[Any]:
    """The values of a file with one in each line."""
    values = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                values.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise BadInput(f"{path}:{number}: not JSON ({error.msg})") from error
    return values
