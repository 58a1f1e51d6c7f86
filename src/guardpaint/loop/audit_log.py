"""Tamper-evident audit trail: one hash-chained JSONL file per process, keyed by HMAC, its head anchored outside.

A plain chain cannot notice that its tail was cut off; the anchor file (or the key, for forged tails) can.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from guardpaint.errors import AuditLogError, BadInput
from guardpaint.store.checkpoint import write_atomic
from guardpaint.types import JsonDict
from guardpaint.verify.utility import GateRules, gates, utility, winner

GENESIS = "0" * 64
TOLERANCE = 1e-9


def digest(body: bytes, key: bytes | None) -> str:
    """SHA-256, or HMAC-SHA-256 when there is a key."""
    return hmac.new(key, body, "sha256").hexdigest() if key else hashlib.sha256(body).hexdigest()


def read_key(path: Path | None) -> bytes | None:
    """The key in a file, without the white space around it; None for no file."""
    if path is None:
        return None
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise BadInput(f"{path}: key cannot be read ({error.strerror})") from error
    if not key:
        raise BadInput(f"{path}: the key file is empty")
    return key


def canonical(entry: JsonDict) -> bytes:
    return json.dumps(entry, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


class AuditLog:
    """Appends one record per image, and events such as a changed policy.

    A record that cannot be made durable raises and leaves no half line.
    """

    def __init__(self, path: str | Path, *, key: bytes | None = None, anchor: str | Path | None = None) -> None:
        self.path, self.key = Path(path), key
        self.anchor = Path(anchor) if anchor is not None else None
        self._lock = threading.Lock()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise AuditLogError(f"{self.path}: cannot be opened for writing ({error.strerror})") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            raise AuditLogError(f"{self.path}: in use; one chain per process, give each its own file") from error
        try:
            anchored = self.anchor if self.anchor is not None and self.path.stat().st_size else None
            state = verify_log(self.path, key=key, anchor=anchored)
            if state.problems:
                raise AuditLogError(f"{self.path}: does not verify, not appending to it: {state.problems[0]}")
        except BaseException:
            self.close()
            raise
        self._sequence, self._head = state.records, state.head

    def append(self, payloads: Sequence[JsonDict], kind: str = "report") -> None:
        """Write, sync, then move the anchor. Raises AuditLogError if any of it fails."""
        with self._lock:
            lines, sequence, head = b"", self._sequence, self._head
            for payload in payloads:
                body = canonical({"seq": sequence, "prev": head, kind: payload})
                head = digest(body, self.key)
                lines += body[:-1] + b',"hash":"' + head.encode() + b'"}\n'
                sequence += 1
            size: int | None = None
            try:
                size = os.fstat(self._file).st_size
                written = os.write(self._file, lines)
                if written != len(lines):
                    raise OSError(28, "short write, the disk may be full")
                os.fsync(self._file)
                if self.anchor is not None:
                    write_atomic(self.anchor, json.dumps({"seq": sequence, "head": head}).encode())
            except OSError as error:
                if size is not None:
                    with contextlib.suppress(OSError):
                        os.ftruncate(self._file, size)
                raise AuditLogError(f"{self.path}: record not written ({error.strerror})") from error
            self._sequence, self._head = sequence, head

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._file)

    def __enter__(self) -> AuditLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class LogState:
    """Result of a verification."""

    records: int = 0
    head: str = GENESIS
    problems: list[str] = field(default_factory=list)
    anchored: bool = False
    keyed: bool = False

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_log(path: str | Path, *, key: bytes | None = None, anchor: str | Path | None = None) -> LogState:
    """Walk the chain: edits, gaps, reordering, a cut tail (with anchor) and forgery (with key) are found."""
    state = LogState(keyed=key is not None, anchored=anchor is not None)
    heads = [GENESIS]
    for number, entry, problem in read_entries(path):
        if problem:
            state.problems.append(problem)
            return state
        claimed = entry.pop("hash", None)
        if entry.get("seq") != state.records:
            state.problems.append(f"line {number}: record {entry.get('seq')} where {state.records} should be")
        elif entry.get("prev") != state.head:
            state.problems.append(f"line {number}: does not follow the record before it")
        elif not hmac.compare_digest(str(claimed), digest(canonical(entry), key)):
            why = "changed since it was written" + (" or signed with another key" if key else " (or keyed)")
            state.problems.append(f"line {number}: {why}")
        if state.problems:
            return state
        state.records, state.head = state.records + 1, str(claimed)
        heads.append(state.head)
    if anchor is not None:
        try:
            kept = json.loads(Path(anchor).read_text())
        except (OSError, json.JSONDecodeError) as error:
            state.problems.append(f"anchor {anchor}: unreadable ({error})")
            return state
        known = kept.get("seq")
        if not isinstance(known, int) or known > state.records or heads[known] != kept.get("head"):
            state.problems.append(
                f"the anchor knows {known} records, the file ends after {state.records} or differs: cut or replaced"
            )
    return state


def read_entries(path: str | Path) -> list[tuple[int, Any, str]]:
    """(line number, entry, problem) per line; stops at the first line that is not a record."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise AuditLogError(f"{path}: cannot be read ({error.strerror})") from error
    rows: list[tuple[int, Any, str]] = []
    for number, line in enumerate(raw.split(b"\n")[: None if raw and not raw.endswith(b"\n") else -1], 1):
        try:
            entry = json.loads(line)
            if not isinstance(entry, dict):
                raise ValueError("not an object")
        except ValueError as error:
            return [*rows, (number, None, f"line {number}: not a complete record ({error})")]
        rows.append((number, entry, ""))
    return rows


def replay(report: JsonDict) -> list[str]:
    """Recompute gates, utilities and winners of a report from its recorded scores; differences, in words."""
    problems: list[str] = []
    for step in report["steps"]:
        for t in step["tournaments"]:
            where = f"step {step['step']}, region {t['region']}"
            level = {k: float("-inf") if v is None else v for k, v in t["rules"].items()}
            rules = GateRules(level["delta"], level["tau_p"], level["tau_f"])
            utilities = []
            for i, c in enumerate(t["candidates"]):
                s = c["scores"]
                if not s:
                    utilities.append(0.0)
                    if c["utility"] or c["gates"]:
                        problems.append(f"{where}: candidate {i} was not painted out, yet has a utility or gates")
                    continue
                again = [g.passed for g in gates(s["S"], t["control"]["S"], s["F"], s["P"], rules)]
                if again != [g["passed"] for g in c["gates"]]:
                    problems.append(f"{where}: candidate {i} has gates its scores do not give")
                u = utility(s["S"], t["control"]["S"], s["F"], s["P"], s["B"], s["Q"], rules)
                utilities.append(u)
                if abs(u - c["utility"]) > TOLERANCE:
                    problems.append(f"{where}: candidate {i} has utility {c['utility']}, scores give {u}")
            if winner(utilities, t["selection"]) != t["winner"]:
                problems.append(f"{where}: winner {t['winner']}, scores give {winner(utilities, t['selection'])}")
    return problems
