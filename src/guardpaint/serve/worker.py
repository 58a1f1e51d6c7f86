"""Draws in a thread of this process: what a replica of a cluster does, and a service in tests."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from PIL import Image

from guardpaint.guard import GuardPaint
from guardpaint.loop.audit_log import AuditLog
from guardpaint.loop.report import GuardReport
from guardpaint.policy import Policy
from guardpaint.serve.disclosure import audited
from guardpaint.serve.dispatcher import Dispatcher, first_policy
from guardpaint.serve.engine import Engine, catches
from guardpaint.serve.jobs import CLOSING, Job, Overloaded
from guardpaint.serve.records import PolicyFile, Records
from guardpaint.serve.schemas import AuditResponse
from guardpaint.serve.settings import Key, Settings


class Worker(Dispatcher):
    """Draws with one pipeline in one thread. The guard's audit log is the service's."""

    def __init__(
        self, guard: GuardPaint, pipe: Any, call: dict[str, Any], settings: Settings, state: PolicyFile | None = None
    ) -> None:
        self.engine = Engine(pipe, call)
        log = guard.audit_log if isinstance(guard.audit_log, AuditLog) else None
        super().__init__(self.engine.facts(guard), settings, Records(log, state))
        self.guard = guard
        guard.remember_requests(1)  # the service keeps the reports
        policy = first_policy(self.records, self.facts)
        if policy != guard.policy:
            self.use_policy(policy)
        self.thread.start()

    @property
    def policy(self) -> Policy:
        return self.guard.policy

    def use_policy(self, policy: Policy) -> None:
        with self.ready:
            self.guard = self.guard.configured(policy=policy)

    @property
    def alive(self) -> bool:
        """Whether the thread runs, and has not been busy with one batch for longer than it may be."""
        late = self.running and time.monotonic() - self.began > self.limit(len(self.running))
        return self.thread.is_alive() and not late

    async def audit(self, picture: Image.Image, prompt: str | None, key: Key) -> AuditResponse:
        if self.closing:
            raise Overloaded(CLOSING)
        return await asyncio.to_thread(audited, self.guard, picture, prompt, key)

    async def catches(self, bad: Image.Image) -> bool:
        return await asyncio.to_thread(catches, self.guard, bad)

    def draw_batch(self, batch: list[Job]) -> tuple[list[Image.Image], list[GuardReport]]:
        return self.engine.draw(self.guard, batch)

    def give_up(self) -> None:
        for job in list(self.running):
            job.gone.set()
