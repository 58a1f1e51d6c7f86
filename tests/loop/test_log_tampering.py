"""What somebody with the disk can do to an audit log, and what the log does about it."""

from __future__ import annotations

import json
import os

import pytest
from typer.testing import CliRunner

from guardpaint.cli.log import app
from guardpaint.errors import AuditLogError
from guardpaint.loop.audit_log import AuditLog, begin_chain, sign_anchor
from guardpaint.loop.log_chain import line_of, read_entries, verify_log
from guardpaint.loop.log_repair import repair_log

KEY = b"secret"


@pytest.fixture
def files(tmp_path):
    """A keyed and anchored log of three records, closed."""
    path, anchor = tmp_path / "audit.jsonl", tmp_path / "outside" / "head"
    with AuditLog(path, key=KEY, anchor=anchor) as log:
        for n in range(3):
            log.append([{"n": n}])
    return path, anchor


def reopen(path, anchor):
    return AuditLog(path, key=KEY, anchor=anchor)


@pytest.mark.parametrize("damage", ["deleted", "emptied", "cut"])
def test_a_log_shorter_than_its_anchor_does_not_start(files, damage):
    path, anchor = files
    kept = anchor.read_bytes()
    if damage == "deleted":
        path.unlink()
    elif damage == "emptied":
        path.write_bytes(b"")
    else:
        path.write_bytes(path.read_bytes().split(b"\n")[0] + b"\n")
    with pytest.raises(AuditLogError, match="3 records"):
        reopen(path, anchor)
    assert anchor.read_bytes() == kept, "the anchor is the only witness left"


def test_a_new_chain_is_begun_only_on_purpose_and_remembers_the_old_head(files):
    path, anchor = files
    old = json.loads(anchor.read_text())
    with pytest.raises(AuditLogError, match="has records"):
        begin_chain(path, key=KEY, anchor=anchor, reason="because")
    path.unlink()
    begin_chain(path, key=KEY, anchor=anchor, reason="the disk was lost")
    entry = json.loads(path.read_text().splitlines()[0])
    assert entry["event"]["begun"]["previous"] == {"seq": 3, "head": old["head"]}
    with reopen(path, anchor) as log:
        log.append([{"n": 9}])
    assert verify_log(path, key=KEY, anchor=anchor).records == 2


@pytest.mark.parametrize("damage", ["removed", "moved", "truncated", "replaced", "appended"])
def test_a_log_changed_under_a_running_service_takes_no_record(files, damage, tmp_path):
    path, anchor = files
    with reopen(path, anchor) as log:
        assert log.problem() == ""
        if damage == "removed":
            path.unlink()
        elif damage == "moved":
            path.rename(tmp_path / "elsewhere")
        elif damage == "truncated":
            os.truncate(path, 10)
        elif damage == "replaced":
            copy = path.read_bytes()
            path.unlink()
            path.write_bytes(copy)
        else:
            with path.open("ab") as file:
                file.write(b"{}\n")
        with pytest.raises(AuditLogError, match="changed by somebody else"):
            log.append([{"n": 4}])
        assert "changed by somebody else" in log.problem()


def test_a_full_disk_is_a_problem_before_it_costs_a_picture(files, monkeypatch):
    path, anchor = files
    with reopen(path, anchor) as log:
        full = os.statvfs_result((4096, 4096, 100, 0, 0, 0, 0, 0, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda p: full)
        assert "no room" in log.problem()


def test_a_disk_that_became_read_only_is_a_problem(files, monkeypatch):
    path, anchor = files
    with reopen(path, anchor) as log:
        mounted = os.statvfs_result((4096, 4096, 10**6, 10**6, 10**6, 0, 0, 0, os.ST_RDONLY, 255))
        monkeypatch.setattr(os, "statvfs", lambda p: mounted)
        assert "read-only" in log.problem()


@pytest.mark.parametrize("which", ["log", "folder of the anchor"])
def test_what_may_not_be_written_is_a_problem(files, monkeypatch, which):
    """Asked of os.access, which is patched: these tests may run as root, to whom nothing is denied."""
    path, anchor = files
    denied = path if which == "log" else anchor.parent
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda p, mode: p != denied and allowed(p, mode))
    with reopen(path, anchor) as log:
        assert f"{denied}: " in log.problem() and "may not be written" in log.problem()


def test_a_record_that_failed_is_a_problem_until_one_succeeds(files):
    """The anchor's place is taken by a folder. A service that is not ready gets no requests that could try again, so
    the question itself tries; what it writes says that a record failed."""
    path, anchor = files
    with reopen(path, anchor) as log:
        kept = anchor.read_bytes()
        anchor.unlink()
        anchor.mkdir()
        with pytest.raises(AuditLogError, match="could not be written"):
            log.append([{"n": 4}])
        assert "could not be written" in log.problem() and "could not be written" in log.problem()
        anchor.rmdir()
        anchor.write_bytes(kept)
        assert log.problem() == "" and log.problem() == ""
        log.append([{"n": 5}])
    (failure,) = events(path)
    assert "could not be written" in failure["append_failed"]
    assert verify_log(path, key=KEY, anchor=anchor).records == 5


def test_an_append_that_succeeds_ends_the_problem(files):
    path, anchor = files
    with reopen(path, anchor) as log:
        anchor.unlink()
        anchor.mkdir()
        with pytest.raises(AuditLogError):
            log.append([{"n": 4}])
        anchor.rmdir()
        log.append([{"n": 5}])
        assert log.problem() == ""
    assert not events(path)


def test_rotation_keeps_the_chain_over_files(files):
    path, anchor = files
    with reopen(path, anchor) as log:
        archived = log.rotate()
        log.append([{"n": 3}])
        log.rotate()
        log.append([{"n": 4}])
    assert archived.exists() and path.exists() and archived != path
    state = verify_log(path, key=KEY, anchor=anchor)
    assert state.ok and state.records == 7, "three, two and the two records that rotations write"
    with reopen(path, anchor) as log:
        log.append([{"n": 5}])
    lines = archived.read_bytes().replace(b'"n":1', b'"n":7')
    archived.write_bytes(lines)
    state = verify_log(path, key=KEY, anchor=anchor)
    assert not state.ok and archived.name in state.problems[0]


def test_an_archived_file_may_be_kept_elsewhere(files, tmp_path):
    path, anchor = files
    with reopen(path, anchor) as log:
        archived = log.rotate()
    archived.rename(tmp_path / "outside" / archived.name)
    state = verify_log(path, key=KEY, anchor=anchor)
    assert state.ok and state.first == 3 and archived.name in state.notes[0]


def test_the_anchor_is_signed(files):
    path, anchor = files
    forged = json.loads(anchor.read_text())
    path.write_bytes(path.read_bytes().split(b"\n")[0] + b"\n")
    shorter = verify_log(path, key=KEY)
    for mac in ({}, {"mac": forged["mac"]}):
        anchor.write_text(json.dumps({"seq": 1, "head": shorter.head, **mac}))
        with pytest.raises(AuditLogError, match="not signed"):
            reopen(path, anchor)


def test_an_old_anchor_is_signed_on_purpose(files):
    path, anchor = files
    old = json.loads(anchor.read_text())
    anchor.write_text(json.dumps({"seq": old["seq"], "head": old["head"]}))
    with pytest.raises(AuditLogError, match="log sign"):
        reopen(path, anchor)
    sign_anchor(path, key=KEY, anchor=anchor)
    reopen(path, anchor).close()


@pytest.mark.parametrize(
    "text", ["[]", "7", "{}", '{"seq": -1, "head": "0"}', '{"seq": true, "head": "x"}', '{"seq": 1e9}', "", "\x00"]
)
def test_a_strange_anchor_is_an_error_and_no_crash(files, text):
    path, anchor = files
    anchor.write_text(text)
    assert not verify_log(path, key=KEY, anchor=anchor).ok
    with pytest.raises(AuditLogError, match="anchor"):
        reopen(path, anchor)


def test_the_bytes_of_a_line_are_authenticated(files):
    """A second key of the same name wins for most readers, and would pass if only the parsed record were hashed."""
    path, _ = files
    lines = path.read_bytes().split(b"\n")
    lines[1] = lines[1].replace(b'{"n":1}', b'{"n":8,"n":1}')
    assert json.loads(lines[1])["report"] == {"n": 1}
    path.write_bytes(b"\n".join(lines))
    state = verify_log(path, key=KEY)
    assert not state.ok and "line 2" in state.problems[0]


def events(path):
    return [entry["event"] for _, entry, bad in read_entries(path) if not bad and "event" in entry]


def test_a_half_written_line_is_cut_off_on_purpose(files):
    path, anchor = files
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"event":{"half')
    with pytest.raises(AuditLogError, match="log repair"):
        reopen(path, anchor)
    mended = repair_log(path, key=KEY, anchor=anchor)
    assert path.read_bytes().startswith(whole) and mended.kept.read_bytes() == b'{"event":{"half'
    told = events(path)[-1]["repaired"]
    assert told["cut_off"] == 15 and told["file"] == mended.kept.name and len(told["sha256"]) == 64
    assert verify_log(path, key=KEY, anchor=anchor).ok
    with pytest.raises(AuditLogError, match="no half-written line"):
        repair_log(path, key=KEY, anchor=anchor)


def refused(path, anchor, match, key=KEY):
    """The repair is refused, and neither the log nor its anchor is touched."""
    log, head = path.read_bytes(), anchor.read_bytes() if anchor and anchor.exists() else None
    names = sorted(p.name for p in path.parent.iterdir())
    with pytest.raises(AuditLogError, match=match):
        repair_log(path, key=key, anchor=anchor)
    assert path.read_bytes() == log and (head is None or anchor.read_bytes() == head)
    assert sorted(p.name for p in path.parent.iterdir()) == names


def test_repair_does_not_launder_a_record_that_the_anchor_knows(files):
    """Somebody who wants the last record gone cuts it in half and asks for a repair."""
    path, anchor = files
    path.write_bytes(path.read_bytes()[:-20])
    refused(path, anchor, "anchor names 3 records, the file has 2")


def test_repair_without_the_anchor_is_still_found_out(files):
    path, anchor = files
    path.write_bytes(path.read_bytes()[:-20])
    repair_log(path, key=KEY, anchor=None)
    assert events(path)[-1]["repaired"]["anchored"] is False
    assert not verify_log(path, key=KEY, anchor=anchor).ok
    with pytest.raises(AuditLogError, match="anchor names 3 records"):
        reopen(path, anchor)


def test_repair_completes_a_record_that_only_lost_its_newline(files):
    """The record is whole and follows from the chain: cutting it off would remove a record."""
    path, anchor = files
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(AuditLogError, match="log repair"):
        reopen(path, anchor)
    mended = repair_log(path, key=KEY, anchor=anchor)
    assert mended.kept is None and path.read_bytes().startswith(whole)
    assert events(path)[-1]["repaired"]["completed"] == 2
    assert verify_log(path, key=KEY, anchor=anchor).records == 4


def test_a_forged_last_line_without_a_newline_is_cut_off(files):
    path, anchor = files
    state = verify_log(path, key=KEY)
    forged, _ = line_of({"seq": 3, "prev": state.head, "report": {"n": 9}}, b"not the key")
    path.write_bytes(path.read_bytes() + forged)
    assert repair_log(path, key=KEY, anchor=anchor).kept.read_bytes() == forged
    assert not any("report" in e and e["report"] == {"n": 9} for _, e, bad in read_entries(path) if not bad)


def test_repair_touches_nothing_that_it_cannot_vouch_for(files):
    path, anchor = files
    whole, head = path.read_bytes(), anchor.read_bytes()
    path.write_bytes(whole + b"{")
    refused(path, anchor, "changed since", key=b"another key")
    refused(path, anchor.with_name("lost"), "not there")
    anchor.write_text(json.dumps({"seq": 3, "head": json.loads(head)["head"]}))
    refused(path, anchor, "not signed")
    anchor.write_bytes(head)
    path.write_bytes(whole.replace(b'{"n":1}', b'{"n":7}') + b"{")
    refused(path, anchor, "line 2: changed")
    path.write_bytes(b"{")
    refused(path, anchor, "anchor names 3 records")
    refused(path, None, "log begin")
    path.unlink()
    with pytest.raises(AuditLogError, match="cannot be read"):
        repair_log(path, key=KEY, anchor=anchor)
    assert not path.exists()


def test_repair_does_not_touch_a_log_that_is_in_use(files):
    path, anchor = files
    with AuditLog(path, key=KEY, anchor=anchor):
        path.write_bytes(path.read_bytes() + b"{")
        refused(path, anchor, "in use")


def test_verify_as_json_shows_a_half_written_line(files):
    """A crash may cut a line inside of a character."""
    path, anchor = files
    path.write_bytes(path.read_bytes() + '{"event":{"é'.encode()[:-1])
    result = CliRunner().invoke(app, ["verify", str(path), "--anchor", str(anchor), "--json"])
    keyed = CliRunner().invoke(app, ["verify", str(path), "--key-file", str(key_file(path)), "--json"])
    for shown in (result, keyed):
        assert shown.exit_code == 1 and isinstance(shown.exception, SystemExit), shown.exception
    found = json.loads(keyed.output)
    assert found["half_line"] == '{"event":{"\\xc3' and "half-written" in found["problems"][0]
    assert found["records"] == 3


def key_file(path):
    key = path.with_name("key")
    key.write_bytes(KEY)
    return key


def test_what_was_cut_off_is_never_overwritten(files):
    path, anchor = files
    kept = []
    for half in (b"{one", b"{two"):
        path.write_bytes(path.read_bytes() + half)
        kept.append(repair_log(path, key=KEY, anchor=anchor).kept)
    assert [k.read_bytes() for k in kept] == [b"{one", b"{two"]


def test_repair_of_a_rotated_log_looks_at_the_whole_chain(files):
    path, anchor = files
    with AuditLog(path, key=KEY, anchor=anchor) as log:
        old = log.rotate()
    path.write_bytes(path.read_bytes() + b"{")
    older = old.read_bytes()
    old.write_bytes(older.replace(b'{"n":1}', b'{"n":7}'))
    refused(path, anchor, "line 2: changed")
    old.write_bytes(older)
    repair_log(path, key=KEY, anchor=anchor)
    assert verify_log(path, key=KEY, anchor=anchor).records == 5


def test_the_commands(files, tmp_path):
    path, anchor = files
    key = tmp_path / "key"
    key.write_bytes(KEY)
    given = [str(path), "--key-file", str(key), "--anchor", str(anchor)]

    def run(verb, *more):
        return CliRunner().invoke(app, [verb, *given, *more])

    rotated = run("rotate")
    assert rotated.exit_code == 0 and "audit-" in rotated.output
    assert "chain intact" in run("verify").output
    path.write_bytes(path.read_bytes() + b"{")
    assert run("repair").exit_code == 0 and "chain intact" in run("verify").output
    path.unlink()
    assert run("begin", "--reason", "lost").exit_code == 0
    assert run("sign").exit_code == 0 and "chain intact" in run("verify").output
