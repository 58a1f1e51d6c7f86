"""Draws in a process of its own, which is watched and replaced: a hung or dying auditor takes no service with it.

This process holds the queue, the audit log and the keys. The other one (`child`) has guard and pipeline only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from guardpaint.errors import AuditLogError
from guardpaint.loop.report import FinalRecord, GuardReport, Status
from guardpaint.policy import Policy
from guardpaint.serve.child import Batch, Recipe, Upload
from guardpaint.serve.dispatcher import Dispatcher, first_policy
from guardpaint.serve.fairness import FairQueue
from guardpaint.serve.jobs import CLOSING, Facts, Job, Order, Overloaded
from guardpaint.serve.process import TICK, DrawingProcess, Lost
from guardpaint.serve.records import Records
from guardpaint.serve.schemas import AuditResponse
from guardpaint.serve.settings import Key, Settings
from guardpaint.store.checkpoint import sha256_hex
from guardpaint.types import JsonDict

log = logging.getLogger("guardpaint.serve")
TRIES = 3
"""After this many deaths without a result in between, the next process is started only after a pause."""
LONGEST_PAUSE = 60.0
DOWN = "nothing can draw now: the process that draws keeps dying"


@dataclass
class UploadJob:
    """An audit that waits for its turn."""

    kind: str
    upload: Upload
    owner: str
    ask: None = None
    future: Future[Any] = field(default_factory=Future)
    gone: threading.Event = field(default_factory=threading.Event)


class Supervisor(Dispatcher):
    """Sends batches to a process and replaces it when it dies or exceeds a time limit. What was lost is blocked."""

    def __init__(
        self, recipe: Recipe, settings: Settings, records: Records | None = None, changed_policy: str | None = None
    ) -> None:
        self.recipe = recipe
        records = records or Records()
        self.logged: dict[str, int] = {}
        """Request id of the running batch → number of its pictures that are in the audit log."""
        self.write = self.append if records.log is not None else None
        self.process = DrawingProcess(recipe, self.write)
        facts = self.process.loaded()
        super().__init__(facts, settings, records)
        try:
            self.rule = first_policy(records, facts, changed_policy)
        except BaseException:
            self.process.kill(CLOSING)
            raise
        self.deaths = 0
        """Deaths since the last result."""
        self.ended = threading.Event()
        self.uploads: FairQueue[UploadJob] = FairQueue(settings.queue, settings.share)
        self.keeper = threading.Thread(target=self.keep, name="guardpaint-keeper", daemon=True)
        self.auditor = threading.Thread(target=self.work_uploads, name="guardpaint-audits", daemon=True)
        for thread in (self.thread, self.keeper, self.auditor):
            thread.start()

    @property
    def policy(self) -> Policy:
        return self.rule

    def use_policy(self, policy: Policy) -> None:
        self.rule = policy

    @property
    def alive(self) -> bool:
        return self.process.healthy and self.thread.is_alive()

    @property
    def able(self) -> bool:
        return self.process.healthy

    def submit(self, jobs: list[Job]) -> None:
        if self.down:
            raise Overloaded(DOWN)
        super().submit(jobs)

    def begin_closing(self) -> None:
        self.ended.set()
        super().begin_closing()

    def fail_waiting(self, message: str) -> None:
        super().fail_waiting(message)
        with self.ready:
            left = self.uploads.clear()
        for job in left:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(Overloaded(message))

    def give_up(self) -> None:
        self.process.kill(CLOSING)

    def close(self, patience: float | None = None) -> None:
        """Close as every dispatcher does, then end the process."""
        super().close(patience)
        self.process.kill(CLOSING)
        self.auditor.join(10.0)
        while self.keeper.is_alive():
            self.process.kill(CLOSING)  # also one that the keeper has only just started
            self.keeper.join(TICK)

    # Batches -------------------------------------------------------------------------------------------------

    def draw_batch(self, batch: list[Job]) -> tuple[list[Image.Image], list[GuardReport]]:
        """Have a batch drawn. If that fails with the process, every picture is blocked, on record."""
        name, policy, began = uuid.uuid4().hex, self.rule, time.monotonic()
        self.logged = {name: 0}

        def forward(kind: str, value: Any) -> None:
            pass_on(batch, kind, value)

        try:
            images, reports = self.process.request(
                "draw",
                Batch(name, policy, tuple(Order.of(j) for j in batch)),
                self.limit(len(batch)),
                on_event=forward,
                given_up=lambda: all(j.gone.is_set() for j in batch),
            )
        except Lost as lost:
            seconds = time.monotonic() - began
            reports = [lost_report(self.facts, policy, name, (i, j), str(lost), seconds) for i, j in enumerate(batch)]
            self.records.append([r.to_dict() for r in reports])
            return [Image.new("RGB", (1, 1)) for _ in batch], reports
        self.deaths = 0
        if self.write is not None and self.logged[name] < len(batch) and any(r.released for r in reports):
            raise AuditLogError("the process that draws wants to release pictures that are not on record")
        return images, reports

    def append(self, payloads: Sequence[JsonDict], kind: str) -> None:
        """Write records of the process that draws."""
        self.records.append(payloads, kind)
        for payload in payloads:
            if payload.get("request_id") in self.logged:
                self.logged[payload["request_id"]] += 1

    # Uploads and the self-test -------------------------------------------------------------------------------

    async def audit(self, picture: Image.Image, prompt: str | None, key: Key) -> AuditResponse:
        return await self.look("audit", Upload(self.rule, picture, prompt, key), key.name)

    async def catches(self, bad: Image.Image) -> bool:
        if not self.alive:
            return False
        try:
            return bool(await self.look("catches", Upload(self.rule, bad), ""))
        except Exception as error:
            log.warning("self-test failed: %s", error)
            return False

    async def look(self, kind: str, upload: Upload, owner: str) -> Any:
        """Wait for an upload's turn and for its result."""
        job = UploadJob(kind, upload, owner)
        with self.ready:
            if self.closing or self.down:
                raise Overloaded(CLOSING if self.closing else DOWN)
            self.uploads.add([job])
            self.ready.notify_all()
        return await asyncio.wrap_future(job.future)

    def work_uploads(self) -> None:
        """Have one upload after the other audited, beside the batch that is being drawn."""
        while True:
            with self.ready:
                while not (self.uploads and self.able) and not self.closing:
                    self.ready.wait()
                if self.closing:
                    return
                jobs = self.uploads.take(1)
            for job in jobs:
                try:
                    result = self.process.request(job.kind, job.upload, self.limit(1))
                except Exception as error:
                    job.future.set_exception(error)
                else:
                    self.deaths = 0
                    job.future.set_result(result)

    # The life of the process -----------------------------------------------------------------------------------

    @property
    def down(self) -> bool:
        """Whether so many processes have died in a row that nobody should wait for the next one."""
        return self.deaths >= TRIES and not self.process.healthy

    def keep(self) -> None:
        """Watch the process; replace it when it has died, after a pause if that happens again and again."""
        while True:
            self.process.watch()
            if self.ended.is_set():
                return
            self.deaths += 1
            wait = pause(self.deaths)
            log.error("the process that draws is replaced in %g s: %s", wait, self.process.reason)
            if self.down:
                self.fail_waiting(DOWN)
            if self.ended.wait(wait):
                return
            try:
                self.process = DrawingProcess(self.recipe, self.write)
                self.process.loaded()
            except Exception as error:  # the next round sees that there is no living process, and counts it
                log.error("the process that draws does not start: %s: %s", type(error).__name__, error)
            with self.ready:
                self.ready.notify_all()


def pause(deaths: int) -> float:
    """Seconds to wait before the next process is started, after so many deaths in a row."""
    return 0.0 if deaths < TRIES else min(LONGEST_PAUSE, 2.0 ** (deaths - TRIES))


def pass_on(batch: list[Job], kind: str, value: Any) -> None:
    """Give a step's preview or audit to the job that it belongs to."""
    image, content = value
    job = batch[image]
    with contextlib.suppress(RuntimeError):  # the caller's event loop is closed already
        if kind == "step" and job.on_step is not None:
            job.on_step(*content)
        elif kind == "audit_record" and job.on_audit is not None:
            job.on_audit(content)
            job.audits_sent += 1


def lost_report(
    facts: Facts, policy: Policy, name: str, place: tuple[int, Job], reason: str, seconds: float
) -> GuardReport:
    """The report of a picture that was lost with the process that drew it: blocked."""
    image, job = place
    settings = {**facts.settings, "policy": policy.name, "policy_sha256": policy.digest(), "trigger": policy.trigger}
    return GuardReport(
        request_id=name,
        image=image,
        status=Status.BLOCKED,
        mode="enforce",
        pipeline=facts.names[0],
        family=facts.names[1],
        seed=job.seed,
        prompt_sha256=sha256_hex(job.prompt),
        prompt=job.prompt if facts.log_prompts else None,
        steps=[],
        final=FinalRecord(),
        effective_settings={**settings, "skipped": [{"what": "final verdict", "why": reason}]},
        errors=[f"Lost: {reason}"],
        seconds=seconds,
        caller={"key": job.owner, "request": job.request},
    )
