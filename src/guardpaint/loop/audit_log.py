"""Tamper-evident audit log: one JSONL file per process, in which every record holds the hash of the one before it.

The chain alone does not show that its tail was cut off or forged. An anchor file elsewhere shows a cut tail, and a key
(HMAC) a forged one.
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


def canonical(entry: JsonDict) -> bytes:
    """The bytes that are hashed: JSON with sorted keys and without spaces."""
    return json.dumps(entry, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


class AuditLog:
    """Appends one record per image, and events such as a changed policy.

    If a record cannot be made durable, AuditLogError is raised and the file is left as it was.
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
            raise AuditLogError(
                f"{self.path}: in use by another process; give each process a log file of its own"
            ) from error
        try:
            anchored = self.anchor if self.anchor is not None and self.path.stat().st_size else None
            state = verify_log(self.path, key=key, anchor=anchored)
            if state.problems:
                raise AuditLogError(
                    f"{self.path}: does not verify, so nothing is appended ({state.problems[0]}); start a new file"
                )
        except BaseException:
            self.close()
            raise
        self._sequence, self._head = state.records, state.head

    def append(self, payloads: Sequence[JsonDict], kind: str = "report") -> None:
        """Write and sync the records, then update the anchor. Raises AuditLogError if any of it fails."""
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
                raise AuditLogError(f"{self.path}: the record could not be written ({error.strerror})") from error
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
    """Result of a verification; `problems` is empty if the log is intact."""

    records: int = 0
    head: str = GENESIS
    problems: list[str] = field(default_factory=list)
    anchored: bool = False
    keyed: bool = False

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_log(path: str | Path, *, key: bytes | None = None, anchor: str | Path | None = None) -> LogState:
    """Check the whole chain for edited, missing and reordered records.

    With the anchor a cut tail is found too, and with the key forged records.
    """
    state = LogState(keyed=key is not None, anchored=anchor is not None)
    heads = [GENESIS]
    for number, entry, problem in read_entries(path):
        if problem:
            state.problems.append(problem)
            return state
        claimed = entry.pop("hash", None)
        if entry.get("seq") != state.records:
            state.problems.append(f"line {number}: record {entry.get('seq')}, expected record {state.records}")
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
            head = json.loads(Path(anchor).read_text())
        except (OSError, json.JSONDecodeError) as error:
            state.problems.append(f"anchor {anchor}: unreadable ({error})")
            return state
        known = head.get("seq")
        if not isinstance(known, int) or known > state.records or heads[known] != head.get("head"):
            state.problems.append(
                f"the anchor names {known} records, the file has {state.records} or other ones: it was cut or replaced"
            )
    return state


def read_entries(path: str | Path) -> list[tuple[int, Any, str]]:
    """(line number, entry, problem) of every line; the first line that is not a record is the last one returned."""
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
    """Recompute gates, utilities and winners of a report from its scores; returns a message for each difference."""
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
                        problems.append(f"{where}: candidate {i} has no scores, but a utility or gates")
                    continue
                passed = [g.passed for g in gates(s["S"], t["control"]["S"], s["F"], s["P"], rules)]
                if passed != [g["passed"] for g in c["gates"]]:
                    problems.append(f"{where}: the gates of candidate {i} do not follow from its scores")
                u = utility(s["S"], t["control"]["S"], s["F"], s["P"], s["B"], s["Q"], rules)
                utilities.append(u)
                if abs(u - c["utility"]) > TOLERANCE:
                    problems.append(f"{where}: candidate {i} has utility {c['utility']}, scores give {u}")
            if winner(utilities, t["selection"]) != t["winner"]:
                problems.append(f"{where}: winner {t['winner']}, scores give {winner(utilities, t['selection'])}")
    return problems
