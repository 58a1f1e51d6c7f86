"""Repair of an audit log whose last line was left half-written by a crash.

Everything is checked before anything is changed: the chain up to the half-written line, and that the anchor knows no
record beyond it. The repair itself becomes a record of the chain.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from guardpaint.errors import AuditLogError
from guardpaint.loop.audit_log import AuditLog, open_locked
from guardpaint.loop.log_chain import LogState, chain_of, disagreement, problem_of, verify_files
from guardpaint.store.checkpoint import sha256_hex, write_atomic
from guardpaint.types import JsonDict


@dataclass(frozen=True)
class Repaired:
    """What a repair did."""

    kept: Path | None
    """The file that keeps what was cut off; None if the line was a whole record without its newline."""


def repair_log(path: Path, *, key: bytes | None, anchor: Path | None) -> Repaired:
    """Cut off a half-written last line, or end it if it is a whole record, and record that in the log.

    Raises AuditLogError without changing anything if the rest of the log does not verify, or if the anchor knows more.
    """
    if not path.is_file():
        raise AuditLogError(f"{path}: cannot be read (no such file)")
    file = open_locked(path)
    try:
        state, heads = verify_files(chain_of(path), key)
        line = state.half_line
        if not line:
            why = f" ({state.problems[0]})" if state.problems else ""
            raise AuditLogError(f"{path}: has no half-written line at its end{why}")
        whole = follows(line, state, key)
        if whole is not None:
            heads[state.records + 1] = whole
        require_witness(path, anchor, key, state, heads)
        if whole is not None:
            event: JsonDict = {"completed": state.records}
            kept = None
            os.write(file, b"\n")
        else:
            kept = spare(path)
            event = {"cut_off": len(line), "sha256": sha256_hex(line), "file": kept.name}
            write_atomic(kept, line)
            os.ftruncate(file, os.fstat(file).st_size - len(line))
        os.fsync(file)
    except OSError as error:
        raise AuditLogError(f"{path}: cannot be repaired ({error.strerror})") from error
    finally:
        os.close(file)
    with AuditLog(path, key=key, anchor=anchor) as log:
        log.append([{"repaired": {**event, "anchored": anchor is not None}}], kind="event")
    return Repaired(kept)


def follows(line: bytes, state: LogState, key: bytes | None) -> str | None:
    """The hash of the half-written line if it is a whole record that follows the records before it."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return str(entry["hash"]) if isinstance(entry, dict) and not problem_of(entry, line, state, key, 0) else None


def require_witness(path: Path, anchor: Path | None, key: bytes | None, state: LogState, heads: dict[int, str]) -> None:
    """Refuse if the anchor knows more than is left, or if nothing is left and no anchor vouches for that."""
    if len(heads) == 1 and (anchor is None or not anchor.exists()):
        raise AuditLogError(
            f"{path}: holds no whole record, so nothing is left to repair. Move it away, keep it, and start a new "
            "chain with `guardpaint log begin`"
        )
    if anchor is None:
        return
    if not anchor.exists():
        raise AuditLogError(f"anchor {anchor}: unreadable (it is not there), but the log has records")
    for problem in disagreement(anchor, key, state, heads):
        raise AuditLogError(
            f"{path}: not repaired, because a crash cannot have left it like this: {problem}. Find out what happened"
        )


def spare(path: Path) -> Path:
    """A name beside the log that no earlier repair has used."""
    number = 1
    while (kept := path.with_name(f"{path.name}.half-line-{number}")).exists():
        number += 1
    return kept
