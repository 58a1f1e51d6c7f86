"""The audit log in the hands of somebody with the disk: while the service is down, and while it runs."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import yaml

from attempts import Outcome
from attempts.stand import OPERATOR, SIGNING, Refused, command, released, scratch, served

ROOT = Path(__file__).parents[2]
RECORDS = 4


ONCE = threading.Lock()


def sample() -> dict[str, bytes]:
    """Log and anchor of a service that drew a few pictures and was stopped; made once."""
    with ONCE:
        return drawn_log()


@cache
def drawn_log() -> dict[str, bytes]:
    with served(logged=True) as stand:
        for seed in range(RECORDS):
            stand.draw(seed=seed)
        stand.process.terminate()
        stand.process.wait(60)
        return {p.name: p.read_bytes() for p in (stand.log, stand.anchor)}


@contextmanager
def copied() -> Iterator[Path]:
    """A folder with a copy of that log, its anchor and its key."""
    with scratch() as folder:
        for name, data in sample().items():
            (folder / name).write_bytes(data)
        (folder / "hmac.key").write_bytes(SIGNING)
        yield folder


def verified(folder: Path, *more: str) -> tuple[int, str]:
    """Exit code and text of `guardpaint log verify` on a copied log."""
    words = ["--key-file", str(folder / "hmac.key"), "--anchor", str(folder / "anchor.json"), *more]
    found = command("log", "verify", str(folder / "audit.jsonl"), *words, folder=folder)
    return found.returncode, (found.stdout + found.stderr).replace(str(folder), "")


def refuses_to_start(damage: Callable[[Path], None], word: str) -> Outcome:
    """Damage a copy of the log, then start a service on it."""
    expected = f"does not start, says {word!r}, the anchor stays"
    with copied() as folder:
        damage(folder)
        before = (folder / "anchor.json").read_bytes()
        try:
            with served(logged=True, folder=folder):
                return Outcome(expected, "started", False)
        except Refused as error:
            kept = (folder / "anchor.json").read_bytes() == before
            fits = error.code == 1 and "Traceback" not in error.output and word in error.output and kept
            got = f"exit {error.code}: {error.output.replace(str(folder), '').strip()[-160:]}"
            return Outcome(expected, got, fits)


def an_emptied_log_does_not_start() -> Outcome:
    return refuses_to_start(lambda f: (f / "audit.jsonl").write_bytes(b"") and None, "empty")


def a_deleted_log_does_not_start() -> Outcome:
    return refuses_to_start(lambda f: (f / "audit.jsonl").unlink(), "missing")


def a_log_without_its_tail_does_not_start() -> Outcome:
    def cut(folder: Path) -> None:
        path = folder / "audit.jsonl"
        path.write_bytes(path.read_bytes().split(b"\n")[0] + b"\n")

    return refuses_to_start(cut, "cut or replaced")


def a_half_written_line_is_mended_on_purpose() -> Outcome:
    """A crash leaves half a line: no start, `log repair` mends it, and then the service starts."""

    def tear(folder: Path) -> None:
        with (folder / "audit.jsonl").open("ab") as file:
            file.write(b'{"prev":"00')

    first = refuses_to_start(tear, "log repair")
    with copied() as folder:
        tear(folder)
        words = ["--key-file", str(folder / "hmac.key"), "--anchor", str(folder / "anchor.json")]
        mended = command("log", "repair", str(folder / "audit.jsonl"), *words, folder=folder).returncode
        code, _ = verified(folder)
    got = f"{first.got}; repair exits {mended}, verify {code}"
    return Outcome("does not start, names the command that mends it", got, first.as_expected and mended == code == 0)


def a_new_chain_remembers_the_old_head() -> Outcome:
    with copied() as folder:
        known = json.loads((folder / "anchor.json").read_text())
        (folder / "audit.jsonl").unlink()
        words = ["--key-file", str(folder / "hmac.key"), "--anchor", str(folder / "anchor.json")]
        begun = command("log", "begin", str(folder / "audit.jsonl"), *words, "--reason", "lost", folder=folder)
        if begun.returncode:
            return Outcome("a first record with the old head", f"exit {begun.returncode}: {begun.stderr[-120:]}", False)
        first = (folder / "audit.jsonl").read_text().splitlines()[0]
        fits = known["head"] in first and verified(folder)[0] == 0
        return Outcome("a first record with the old head", "there" if fits else first[:120], fits)


# While the service runs --------------------------------------------------------------------------------------


def under_a_running_service(damage: Callable[[Path], None]) -> Outcome:
    """Change the log under a service, ask for a picture and for /ready, put the log back and ask again."""
    with served(logged=True) as stand:
        stand.draw()
        kept = stand.folder / "same-inode"
        os.link(stand.log, kept)
        content = stand.log.read_bytes()
        damage(stand.log)
        answer, ready = stand.draw(seed=2), stand.get("/ready", None)
        if not stand.log.exists() or stand.log.stat().st_ino != kept.stat().st_ino:
            stand.log.unlink(missing_ok=True)
            os.link(kept, stand.log)
        if stand.log.read_bytes() != content:
            stand.log.write_bytes(content)
        after = stand.draw(seed=3).status_code
        got = (
            f"{answer.status_code}{', released' if released(answer) else ''}, ready {ready.status_code}, after {after}"
        )
        fits = answer.status_code == 503 and not released(answer) and ready.status_code == 503 and after == 200
        return Outcome("503 and nothing released, not ready; 200 once it is back", got, fits)


def a_log_removed_under_the_service() -> Outcome:
    return under_a_running_service(lambda log: log.unlink())


def a_log_moved_under_the_service() -> Outcome:
    return under_a_running_service(lambda log: log.rename(log.with_name("moved")) and None)


def a_log_truncated_under_the_service() -> Outcome:
    return under_a_running_service(lambda log: os.truncate(log, 10))


def a_log_replaced_by_a_copy_under_the_service() -> Outcome:
    def replace(log: Path) -> None:
        shutil.copy(log, log.with_name("copy"))
        os.replace(log.with_name("copy"), log)

    return under_a_running_service(replace)


def rotation_keeps_the_chain() -> Outcome:
    """`POST /v1/log/rotate` between pictures; the chain is verified over both files."""
    with served(logged=True) as stand:
        stand.draw(seed=1)
        code = stand.send("POST", "/v1/log/rotate", OPERATOR).status_code
        stand.draw(seed=2)
        verdict, text = verified(stand.folder)
        files = len(list(stand.folder.glob("audit*.jsonl")))
        got = f"rotate {code}, {files} files, verify exits {verdict}: {text.strip()[:80]}"
        return Outcome("200, two files, one intact chain", got, code == 200 and files == 2 and verdict == 0)


def records_name_key_and_request() -> Outcome:
    """A record leads back to the caller's key and to the HTTP request."""
    with served(logged=True) as stand:
        answer = stand.draw()
        line = stand.log.read_text().splitlines()[-1]
        request, key = answer.headers["x-request-id"] in line, '"ann"' in line
        got, fits = f"request: {request}, key: {key}", request and key
        return Outcome("the record holds the key's id and the request's id", got, fits)


# What verification finds -------------------------------------------------------------------------------------


def is_found(damage: Callable[[Path], None], *more: str) -> Outcome:
    """Damage a copy and verify it: exit 1 with a message, no traceback."""
    with copied() as folder:
        damage(folder)
        code, text = verified(folder, *more)
        fits = code == 1 and "Traceback" not in text and bool(text.strip())
        return Outcome("verify exits 1 with a message", f"exit {code}: {text.strip()[-140:]}", fits)


def a_duplicate_key_in_a_line() -> Outcome:
    """Two equal JSON keys: parsers take the last one, so the first could say anything."""

    def double(folder: Path) -> None:
        path = folder / "audit.jsonl"
        path.write_bytes(path.read_bytes().replace(b"{", b'{"seq":7,', 1))

    return is_found(double)


def spaces_in_a_line() -> Outcome:
    def pad(folder: Path) -> None:
        path = folder / "audit.jsonl"
        path.write_bytes(path.read_bytes().replace(b":", b": ", 1))

    return is_found(pad)


def an_anchor_without_a_signature() -> Outcome:
    def strip(folder: Path) -> None:
        path = folder / "anchor.json"
        known = json.loads(path.read_text())
        path.write_text(json.dumps({"seq": known["seq"], "head": known["head"]}))

    return is_found(strip)


def an_anchor_set_back_with_the_log() -> Outcome:
    """The tail is cut, and an anchor for what is left is written with the signature of the old one."""

    def set_back(folder: Path) -> None:
        log, anchor = folder / "audit.jsonl", folder / "anchor.json"
        first = log.read_bytes().split(b"\n")[0]
        log.write_bytes(first + b"\n")
        anchor.write_text(json.dumps({**json.loads(anchor.read_text()), "seq": 1, "head": json.loads(first)["hash"]}))

    return is_found(set_back)


def strange_anchors() -> Outcome:
    """Files that are no anchor are an error with a message, never a crash."""
    strange = [b"[]", b"7", b"{}", b"null", b"", b"\x00\xff", b'{"seq": -1, "head": "0"}', b'{"seq": 1e400}']
    strange += [b"[" * 100_000, b'{"seq": "1", "head": ' + b'"' + b"0" * 64 + b'"}']
    wrong = []
    for text in strange:
        found = is_found(lambda folder, t=text: (folder / "anchor.json").write_bytes(t) and None)  # type: ignore[misc]
        wrong += [] if found.as_expected else [f"{text[:20]!r}: {found.got[:60]}"]
    return Outcome("verify exits 1 with a message", "; ".join(wrong) or f"all {len(strange)} of them", not wrong)


def the_container_runs_with_key_and_anchor() -> Outcome:
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]["guardpaint"]
    line = (ROOT / "deploy/Dockerfile").read_text() + json.dumps(compose)
    missing = [w for w in ("--audit-log", "--key-file", "--anchor") if w not in line]
    return Outcome("started with log, key and anchor", f"missing: {missing}" if missing else "all three", not missing)


ATTEMPTS = (
    an_emptied_log_does_not_start,
    a_deleted_log_does_not_start,
    a_log_without_its_tail_does_not_start,
    a_half_written_line_is_mended_on_purpose,
    a_new_chain_remembers_the_old_head,
    a_log_removed_under_the_service,
    a_log_moved_under_the_service,
    a_log_truncated_under_the_service,
    a_log_replaced_by_a_copy_under_the_service,
    rotation_keeps_the_chain,
    records_name_key_and_request,
    a_duplicate_key_in_a_line,
    spaces_in_a_line,
    an_anchor_without_a_signature,
    an_anchor_set_back_with_the_log,
    strange_anchors,
    the_container_runs_with_key_and_anchor,
)
