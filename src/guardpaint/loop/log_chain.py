"""The chain of an audit log: what is hashed, how it is verified over rotated files, and the anchor of its head.

Every record holds the hash of the one before it. With a key the hashes are HMACs, so that records cannot be forged, and
the anchor is signed, so that it cannot be replaced.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from guardpaint.errors import AuditLogError, BadInput
from guardpaint.store.checkpoint import write_atomic
from guardpaint.types import JsonDict

GENESIS = "0" * 64
HALF = "half-written, it has no end"
LONGEST_NAME = 255
MOST_FILES = 10_000
"""Rotated files that a verification follows."""


def digest(body: bytes, key: bytes | None) -> str:
    """SHA-256, or HMAC-SHA-256 when there is a key."""
    return hmac.new(key, body, "sha256").hexdigest() if key else hashlib.sha256(body).hexdigest()


def canonical(entry: JsonDict) -> bytes:
    """The bytes that are hashed: JSON with sorted keys and without spaces."""
    return json.dumps(entry, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def line_of(entry: JsonDict, key: bytes | None) -> tuple[bytes, str]:
    """The line of a record, without its newline, and the record's hash."""
    body = canonical(entry)
    value = digest(body, key)
    return body[:-1] + b',"hash":"' + value.encode() + b'"}', value


def read_key(path: Path | None) -> bytes | None:
    """The key in a file, without the white space around it; None if no file is given."""
    if path is None:
        return None
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise BadInput(f"{path}: the key cannot be read ({error.strerror})") from error
    if not key:
        raise BadInput(f"{path}: the key file is empty; write a secret into it")
    return key


def same(found: Any, expected: str) -> bool:
    """Whether a value of a file is the expected hash, compared in constant time."""
    return isinstance(found, str) and hmac.compare_digest(found.encode("utf-8", "surrogatepass"), expected.encode())


# The anchor --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Anchor:
    """How many records a log has had at least, and the hash of the last of them."""

    seq: int
    head: str

    def signature(self, key: bytes) -> str:
        return digest(canonical({"anchor": {"seq": self.seq, "head": self.head}}), key)

    def write(self, path: Path, key: bytes | None) -> None:
        mac = {} if key is None else {"mac": self.signature(key)}
        write_atomic(path, json.dumps({"seq": self.seq, "head": self.head, **mac}).encode())


def read_anchor(path: Path, key: bytes | None, signed: bool = True) -> Anchor:
    """The anchor in a file. With a key it must be signed, unless `signed` is False."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise AuditLogError(f"anchor {path}: unreadable ({error})") from error
    seq, head = (value.get("seq"), value.get("head")) if isinstance(value, dict) else (None, None)
    if not isinstance(seq, int) or isinstance(seq, bool) or seq < 0 or not isinstance(head, str) or len(head) != 64:
        raise AuditLogError(f"anchor {path}: does not hold a number of records and the hash of the last one")
    anchor = Anchor(seq, head)
    if key is not None and signed and not same(value.get("mac"), anchor.signature(key)):
        raise AuditLogError(
            f"anchor {path}: not signed with this key. If it was written by an older version and you trust it, sign it "
            "with `guardpaint log sign`"
        )
    return anchor


# Verification ------------------------------------------------------------------------------------------------


@dataclass
class LogState:
    """Result of a verification; `problems` is empty if the log is intact."""

    records: int = 0
    """Records of the chain up to the end of the file, those of earlier files included."""
    head: str = GENESIS
    problems: list[str] = field(default_factory=list)
    anchored: bool = False
    keyed: bool = False
    first: int = 0
    """Number of the first record that was checked."""
    half_line: bytes = b""
    """The last line, if it has no end and everything before it is intact."""
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_dict(self) -> JsonDict:
        """For JSON. Bytes of the half-written line that are no UTF-8 are shown as `\\x..`."""
        return {**vars(self), "half_line": self.half_line.decode("utf-8", "backslashreplace")}


def read_entries(path: str | Path) -> list[tuple[int, Any, str]]:
    """(line number, entry, problem) of every line; the first line that is not a record is the last one returned."""
    return [(number, entry, problem) for number, entry, problem, _ in read_lines(path)]


def read_lines(path: str | Path) -> Iterator[tuple[int, Any, str, bytes]]:
    """The same one after the other, with the bytes of each line; a log may be larger than the memory."""
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    yield number, None, f"line {number}: {HALF}", line
                    return
                line = line[:-1]
                try:
                    entry = json.loads(line)
                    if not isinstance(entry, dict):
                        raise ValueError("not an object")
                except (ValueError, RecursionError) as error:
                    yield number, None, f"line {number}: not a complete record ({error})", line
                    return
                yield number, entry, "", line
    except OSError as error:
        raise AuditLogError(f"{path}: cannot be read ({error.strerror})") from error


def verify_log(path: str | Path, *, key: bytes | None = None, anchor: str | Path | None = None) -> LogState:
    """Check the whole chain for edited, missing and reordered records, over rotated files in the same folder.

    With the anchor a cut tail is found too, and with the key forged records.
    """
    state, heads = verify_files(chain_of(Path(path)), key)
    state.keyed, state.anchored = key is not None, anchor is not None
    if not state.problems and anchor is not None:
        state.problems += disagreement(Path(anchor), key, state, heads)
    return state


def disagreement(anchor: Path, key: bytes | None, state: LogState, heads: dict[int, str]) -> list[str]:
    """Why the anchor does not fit the records; empty if it does."""
    try:
        known = read_anchor(anchor, key)
    except AuditLogError as error:
        return [str(error)]
    if heads.get(known.seq) == known.head or (known.seq == 0 and state.records == 0):
        return []
    return [f"the anchor names {known.seq} records, the file has {state.records} or other ones: it was cut or replaced"]


def chain_of(path: Path) -> list[Path]:
    """The files of a chain, oldest first, as far back as they are in the same folder."""
    files = [path]
    while len(files) < MOST_FILES:
        earlier = continued_from(files[0])
        if earlier is None or not (files[0].parent / earlier["file"]).is_file():
            break
        older = files[0].parent / earlier["file"]
        if older in files:
            break
        files.insert(0, older)
    return files


def continued_from(path: Path) -> dict[str, Any] | None:
    """What the first record of a file says of the file before it; None if it begins a chain."""
    try:
        with path.open("rb") as file:
            entry = json.loads(file.readline())
        earlier = entry["event"]["rotated_from"]
        name, seq, head = earlier["file"], earlier["seq"], earlier["head"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(head, str) or not isinstance(seq, int) or seq < 0:
        return None
    base = Path(name).name
    return {"file": base, "seq": seq, "head": head} if len(base.encode("utf-8", "replace")) <= LONGEST_NAME else None


def verify_files(files: list[Path], key: bytes | None) -> tuple[LogState, dict[int, str]]:
    """The state after the last file, and the head after every record."""
    state = LogState()
    earlier = continued_from(files[0])
    if earlier is not None:
        state.records, state.first, state.head = earlier["seq"], earlier["seq"], earlier["head"]
        state.notes.append(f"begins at record {state.first}: {earlier['file']} is not in this folder")
    heads = {state.records: state.head}
    for file in files:
        where = "" if file == files[-1] else f"{file.name}, "
        for number, entry, problem, raw in read_lines(file):
            problem = problem or problem_of(entry, raw, state, key, number)
            if problem:
                state.problems.append(where + problem)
                if problem.endswith(HALF) and file == files[-1]:
                    state.half_line = raw
                return state, heads
            state.records, state.head = state.records + 1, str(entry["hash"])
            heads[state.records] = state.head
    return state, heads


def problem_of(entry: JsonDict, raw: bytes, state: LogState, key: bytes | None, number: int) -> str:
    """What is wrong with one record where the chain stands, or nothing."""
    body = {k: v for k, v in entry.items() if k != "hash"}
    if entry.get("seq") != state.records:
        return f"line {number}: record {entry.get('seq')}, expected record {state.records}"
    if entry.get("prev") != state.head:
        return f"line {number}: does not follow the record before it"
    try:
        line, value = line_of(body, key)
    except (ValueError, RecursionError):  # NaN, infinity or a lone surrogate, which a record never holds
        return f"line {number}: changed since it was written"
    if not same(entry.get("hash"), value) or line != raw:
        why = "changed since it was written" + (" or signed with another key" if key else " (or keyed)")
        return f"line {number}: {why}"
    return ""
