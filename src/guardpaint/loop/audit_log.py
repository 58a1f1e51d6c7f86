"""Tamper-evident audit log: one JSONL file per process, in which every record holds the hash of the one before it.

The chain alone does not show that its tail was cut off or forged. An anchor file elsewhere shows a cut tail, and a key
(HMAC) a forged one; the anchor is signed with the key.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from guardpaint.errors import AuditLogError
from guardpaint.loop.log_chain import (
    GENESIS,
    Anchor,
    LogState,
    continued_from,
    digest,
    line_of,
    read_anchor,
    read_entries,
    read_key,
    verify_log,
)
from guardpaint.loop.log_replay import replay
from guardpaint.store.checkpoint import write_atomic
from guardpaint.types import JsonDict

__all__ = [
    "GENESIS",
    "AuditLog",
    "LogState",
    "begin_chain",
    "continued_from",
    "digest",
    "read_entries",
    "read_key",
    "replay",
    "sign_anchor",
    "verify_log",
]
LEAST_ROOM = 1 << 20
"""Bytes that must be free on the disk for the log to count as able to take a record."""


@runtime_checkable
class RecordWriter(Protocol):
    """What a guard needs of an audit log. Records that it cannot take raise AuditLogError."""

    def append(self, payloads: Sequence[JsonDict], kind: str = "report") -> None: ...


class AuditLog:
    """Appends one record per image, and events such as a changed policy.

    If a record cannot be made durable, AuditLogError is raised and the file is left as it was.
    """

    def __init__(self, path: str | Path, *, key: bytes | None = None, anchor: str | Path | None = None) -> None:
        self.path, self.key = Path(path), key
        self.anchor = Path(anchor) if anchor is not None else None
        self._lock = threading.Lock()
        require_witnessed(self.path, self.key, self.anchor)
        self._file = open_locked(self.path)
        try:
            anchored = self.anchor if self.anchor is not None and self.anchor.exists() else None
            state = verify_log(self.path, key=key, anchor=anchored)
            if state.problems:
                raise AuditLogError(
                    f"{self.path}: does not verify, so nothing is appended ({state.problems[0]}). {HELP}"
                )
            if self.anchor is not None and anchored is None and state.records:
                raise AuditLogError(
                    f"anchor {self.anchor}: unreadable (it is not there), but the log has records. {HELP}"
                )
        except BaseException:
            self.close()
            raise
        self._sequence, self._head = state.records, state.head
        self._size = os.fstat(self._file).st_size
        self._failure = ""

    def append(self, payloads: Sequence[JsonDict], kind: str = "report") -> None:
        """Write and sync the records, then update the anchor. Raises AuditLogError if any of it fails."""
        with self._lock:
            self._append(payloads, kind)

    def _append(self, payloads: Sequence[JsonDict], kind: str) -> None:
        self.check()
        lines, sequence, head = b"", self._sequence, self._head
        for payload in payloads:
            line, head = line_of({"seq": sequence, "prev": head, kind: payload}, self.key)
            lines += line + b"\n"
            sequence += 1
        try:
            written = os.write(self._file, lines)
            if written != len(lines):
                raise OSError(28, "short write, the disk may be full")
            os.fsync(self._file)
            if self.anchor is not None:
                Anchor(sequence, head).write(self.anchor, self.key)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            self._failure = f"{self.path}: the record could not be written ({error.strerror})"
            raise AuditLogError(self._failure) from error
        self._failure = ""
        self._sequence, self._head, self._size = sequence, head, self._size + len(lines)

    def check(self) -> None:
        """Raise AuditLogError if the file at the path is not the one that is open, or not as long as it was left."""
        try:
            own, there = os.fstat(self._file), os.stat(self.path)
        except OSError as error:
            raise AuditLogError(f"{self.path}: changed by somebody else ({error.strerror}). {HELP}") from error
        same = (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)
        if not same or there.st_size != self._size:
            raise AuditLogError(
                f"{self.path}: changed by somebody else: it was moved, replaced, cut or added to. {HELP}"
            )

    def problem(self) -> str:
        """Why the log could not take a record now; empty if it could.

        After an append that failed, an event that says so is tried here: nobody sends requests to a service that is
        not ready, so no other record would show that the log works again.
        """
        try:
            self.check()
            written = [self.path.parent, *([] if self.anchor is None else [self.anchor.parent])]
            for folder in dict.fromkeys(written):
                disk = os.statvfs(folder)
                if disk.f_flag & os.ST_RDONLY:
                    return f"{folder}: the disk is read-only"
                if disk.f_bavail * disk.f_frsize < LEAST_ROOM:
                    return f"{folder}: no room for another record"
            for place in (self.path, *written[1:]):  # the log itself stays open, an anchor is a new file every time
                if not os.access(place, os.W_OK):
                    return f"{place}: may not be written"
            if failure := self._failure:
                self.append([{"append_failed": failure}], "event")
        except (AuditLogError, OSError) as error:
            return str(error)
        return ""

    def rotate(self) -> Path:
        """Put the file aside and go on in a new one, whose first record names the old one. Returns the old path."""
        with self._lock:
            self.check()
            archived = self.path.with_name(f"{self.path.stem}-{self._sequence:010d}{self.path.suffix}")
            if archived.exists():
                raise AuditLogError(f"{archived}: exists already; move it away before the log is rotated")
            old, kept = self._file, self._size
            self.path.rename(archived)
            try:
                self._file = open_locked(self.path)
                self._size = 0
                earlier = {"file": archived.name, "seq": self._sequence, "head": self._head}
                self._append([{"rotated_from": earlier}], "event")
            except BaseException:
                if self._file != old:
                    self.close()
                archived.replace(self.path)
                self._file, self._size = old, kept
                raise
            os.close(old)
            return archived

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._file)

    def __enter__(self) -> AuditLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


HELP = (
    "Find out what happened first. `guardpaint log repair` mends a half-written last line, and "
    "`guardpaint log begin` starts a new chain that remembers the head of the old one."
)


def require_witnessed(path: Path, key: bytes | None, anchor: Path | None) -> None:
    """Refuse a log that is missing or empty although its anchor knows records."""
    if anchor is None or not anchor.exists() or (path.exists() and path.stat().st_size):
        return
    known = read_anchor(anchor, key)
    if known.seq:
        raise AuditLogError(f"{path}: missing or empty, but its anchor knows {known.seq} records. {HELP}")


def open_locked(path: Path) -> int:
    """A descriptor of the log for appending, locked against other processes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise AuditLogError(f"{path}: cannot be opened for writing ({error.strerror})") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise AuditLogError(f"{path}: in use by another process; give each process a log file of its own") from error
    return file


def begin_chain(path: Path, *, key: bytes | None, anchor: Path | None, reason: str) -> None:
    """Start a new chain on purpose. Its first record holds the reason and the head that the anchor knew, if any."""
    if path.exists() and path.stat().st_size:
        raise AuditLogError(f"{path}: has records; move it away before a new chain is begun, and keep it")
    previous = None
    if anchor is not None and anchor.exists():
        known = read_anchor(anchor, key, signed=False)
        previous = {"seq": known.seq, "head": known.head}
        anchor.unlink()
    with AuditLog(path, key=key, anchor=anchor) as log:
        log.append([{"begun": {"reason": reason, "previous": previous}}], kind="event")


def sign_anchor(path: Path, *, key: bytes, anchor: Path) -> None:
    """Sign the anchor of a log that verifies and that agrees with it."""
    known = read_anchor(anchor, key, signed=False)
    known.write(anchor, key)
    state = verify_log(path, key=key, anchor=anchor)
    if state.problems:
        write_atomic(anchor, b'{"seq": %d, "head": "%s"}' % (known.seq, known.head.encode()))
        raise AuditLogError(f"{path}: the anchor is not signed, because the log does not verify ({state.problems[0]})")
