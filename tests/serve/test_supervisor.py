"""The process that draws: hung, killed or broken, it takes nothing with it but its own pictures."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageChops
from recipes import obedient
from services import BAD, CALL

from guardpaint.errors import BadConfig
from guardpaint.loop.audit_log import AuditLog, verify_log
from guardpaint.loop.report import GuardReport, StepRecord
from guardpaint.serve.jobs import Ask, Cancelled, Job, Overloaded
from guardpaint.serve.process import Lost
from guardpaint.serve.records import Records
from guardpaint.serve.settings import Key, Settings
from guardpaint.serve.supervisor import LONGEST_PAUSE, Supervisor, pause
from guardpaint.testing import small

pytestmark = pytest.mark.timeout(600)
SECRET = b"a secret of the log"
ANN = Key("ann")
LIMIT = 10.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def drawing(folder):
    log = AuditLog(folder / "audit.jsonl", key=SECRET, anchor=folder / "head")
    limits = Settings(batch=2, linger=0.0, picture_timeout=LIMIT, grace=1.0)
    recipe = partial(obedient, folder / "broken", retain_evidence=True)
    made = Supervisor(recipe, limits, Records(log))
    yield made
    made.close()
    log.close()


@pytest.fixture(autouse=True)
def healthy(drawing):
    assert until(lambda: drawing.alive, 120)


def until(true, seconds):
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


def job(prompt="a person", steps=2, owner="ann", **more):
    return Job(prompt, 3, Ask(steps, 3.0, (small.PIXELS, small.PIXELS)), owner, **more)


def drawn(drawing, *jobs):
    drawing.submit(list(jobs))
    return [j.future.result(200) for j in jobs]


def audit(drawing, prompt=None, picture=BAD):
    return asyncio.run(drawing.audit(picture, prompt, ANN))


def logged(folder):
    """The reports in the audit log, whose chain must hold."""
    state = verify_log(folder / "audit.jsonl", key=SECRET, anchor=folder / "head")
    assert state.ok, state.problems
    rows = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
    return [row["report"] for row in rows if "report" in row]


def test_pictures_reports_and_evidence_arrive_as_they_were_made(drawing, folder):
    steps, audits, counted = [], [], []
    drawing.on_batch = lambda jobs, reports, seconds: counted.append((len(jobs), reports, seconds))
    watched = job(on_step=lambda *step: steps.append(step), on_audit=audits.append, clear=True)
    (done,) = drawn(drawing, watched)
    drawing.on_batch = None
    own = small.pipeline("sd")(["a person"], generator=[torch.Generator().manual_seed(3)], **CALL).images[0]
    apart = ImageChops.difference(done.image, own).getextrema()
    assert all(high <= 1 for _, high in apart), "two processes may round a sum in another order, no more"
    assert done.report.status == "clean"
    assert [s[:2] for s in steps] == [(0, 2), (1, 2)] and all(isinstance(s[2], Image.Image) for s in steps)
    assert all(isinstance(a, StepRecord) for a in audits) and len(audits) == len(done.report.steps)
    assert isinstance(done.report, GuardReport) and any(torch.is_tensor(e.heat) for e in done.report.evidence)
    assert counted[0][:2] == (1, [done.report])
    assert logged(folder)[-1] == done.report.to_dict()
    (flagged,) = drawn(drawing, job("bad"))
    assert flagged.image is None and flagged.report.status == "blocked" and not flagged.report.errors


def test_uploads_the_self_test_and_a_changed_policy(drawing):
    grey = Image.new("RGB", (64, 64), (90, 90, 90))
    assert audit(drawing).flagged and not audit(drawing, picture=grey).flagged
    assert asyncio.run(drawing.catches(BAD)) and not asyncio.run(drawing.catches(grey))
    own = drawing.policy
    from dataclasses import replace

    drawing.change_policy(replace(own, trigger=0.005), "olga")
    try:
        assert drawn(drawing, job())[0].report.triggered and audit(drawing, picture=grey).flagged
        with pytest.raises(BadConfig, match="the guard knows"):
            drawing.change_policy(replace(own, categories=own.categories[:2]), "olga")
    finally:
        drawing.change_policy(own, "olga")
    assert not drawn(drawing, job())[0].report.triggered


def test_the_process_has_neither_key_nor_log(drawing):
    about = Path(f"/proc/{drawing.process.process.pid}")
    files = [os.readlink(fd) for fd in (about / "fd").iterdir()]
    assert not any("audit.jsonl" in name for name in files)
    memory = (about / "cmdline").read_bytes() + (about / "environ").read_bytes()
    for line in (about / "maps").read_text().splitlines():
        if "[heap]" in line:
            first, last = (int(v, 16) for v in line.split()[0].split("-"))
            with (about / "mem").open("rb") as file:
                file.seek(first)
                memory += file.read(last - first)
    assert b"guardpaint" in memory and SECRET not in memory


def test_an_audit_does_not_wait_for_a_long_batch(drawing):
    long = job(steps=100)
    drawing.submit([long])
    assert until(lambda: drawing.busy == 1, 10)
    assert audit(drawing).flagged and not long.future.done()
    long.gone.set()
    with pytest.raises(Cancelled):
        long.future.result(5)
    assert drawing.alive, "a picture that nobody waits for costs no process"


def test_a_record_that_is_not_written_releases_nothing(drawing, monkeypatch):
    monkeypatch.setattr(drawing.records.log, "check", lambda: (_ for _ in ()).throw(OSError(5, "disk")))
    (done,) = drawn(drawing, job())
    assert done.image is None and done.report.errors and drawing.alive


def test_a_process_that_forgets_its_records_releases_nothing(drawing, monkeypatch):
    monkeypatch.setattr(drawing.process, "write", lambda payloads, kind: None)
    lost = job()
    drawing.submit([lost])
    with pytest.raises(Exception, match="not on record"):
        lost.future.result(60)


def test_a_hung_auditor_fails_its_own_pictures_only(drawing, folder):
    before = drawing.process
    hung, later = job("hang"), job(owner="bob")
    drawing.submit([hung])
    assert until(lambda: drawing.busy == 1, 10)
    drawing.submit([later])
    assert audit(drawing).flagged, "uploads are audited meanwhile"
    lost = hung.future.result(LIMIT + 20)
    assert not drawing.alive and not asyncio.run(drawing.catches(BAD))
    assert lost.image is None and lost.report.status == "blocked" and "took longer than 10 s" in lost.report.errors[0]
    assert logged(folder)[-1] == lost.report.to_dict()
    assert later.future.result(120).image is not None
    assert drawing.alive and drawing.process is not before and not before.process.is_alive()


def test_a_killed_process_loses_its_batch_on_record(drawing, folder):
    long, same, other = job(steps=100), job(steps=100), job(owner="bob")
    drawing.submit([long, same])
    assert until(lambda: drawing.busy == 2, 10)
    drawing.submit([other])
    os.kill(drawing.process.process.pid, signal.SIGKILL)
    ends = [j.future.result(60) for j in (long, same)]
    assert [e.image for e in ends] == [None, None] and all("exit code -9" in e.report.errors[0] for e in ends)
    records = logged(folder)
    assert [r["status"] for r in records[-2:]] == ["blocked"] * 2 and [r["image"] for r in records[-2:]] == [0, 1]
    assert other.future.result(120).image is not None


def test_a_hung_upload_is_an_error_and_the_process_is_replaced(drawing):
    with pytest.raises(Lost, match="an audit took longer than 10 s"):
        audit(drawing, "hang")
    assert not drawing.alive and until(lambda: drawing.alive, 120)
    assert audit(drawing).flagged


def test_a_process_that_cannot_load_again_is_not_started_without_end(drawing, folder, monkeypatch):
    monkeypatch.setattr("guardpaint.serve.supervisor.TRIES", 2)
    (folder / "broken").write_text("")
    drawing.process.kill("for the test")
    assert until(lambda: drawing.deaths >= 1, 10)
    waiting = job()
    drawing.submit([waiting])
    with pytest.raises(Overloaded, match="keeps dying"):
        waiting.future.result(120)
    with pytest.raises(Overloaded, match="keeps dying"):
        drawing.submit([job()])
    with pytest.raises(Overloaded, match="keeps dying"):
        audit(drawing)
    assert not drawing.alive
    (folder / "broken").unlink()
    assert until(lambda: drawing.alive, 180)
    assert drawn(drawing, job())[0].image is not None and drawing.deaths == 0


def test_the_pauses():
    assert [pause(n) for n in (1, 2, 3, 4, 5)] == [0, 0, 1, 2, 4] and pause(50) == LONGEST_PAUSE


def test_what_cannot_be_loaded_is_not_served(tmp_path):
    (tmp_path / "broken").write_text("")
    with pytest.raises(RuntimeError, match="these weights are broken"):
        Supervisor(partial(obedient, tmp_path / "broken"), Settings())


def test_zz_closing_gives_running_pictures_a_short_time(drawing, folder):
    """The last test: it closes the service of the others."""
    running, waiting = job("hang"), job("a person", steps=3)
    drawing.submit([running])
    assert until(lambda: drawing.busy == 1, 10)
    drawing.submit([waiting])
    began = time.monotonic()
    drawing.close()
    assert time.monotonic() - began < 5 and not drawing.process.process.is_alive()
    with pytest.raises(Overloaded, match="closing"):
        waiting.future.result(0)
    assert running.future.result(0).image is None and "closing" in running.future.result(0).report.errors[0]
    assert logged(folder)[-1]["errors"] == running.future.result(0).report.errors
    with pytest.raises(Overloaded, match="closing"):
        drawing.submit([job()])
