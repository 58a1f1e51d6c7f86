"""The queue of a service and the thread that gathers batches from it. What draws them is up to the subclass."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from PIL import Image

from guardpaint.errors import BadConfig
from guardpaint.loop.report import GuardReport
from guardpaint.policy import Policy
from guardpaint.serve.fairness import FairQueue
from guardpaint.serve.jobs import (
    CLOSING,
    KEEP_REFUSED,
    SHOWN,
    Cancelled,
    Done,
    Facts,
    Job,
    Overloaded,
    send_audits,
    settle,
)
from guardpaint.serve.records import Records, event_of
from guardpaint.serve.settings import Settings
from guardpaint.verify.weak import refuse_weaker

log = logging.getLogger("guardpaint.serve")


class Dispatcher(ABC):
    """Jobs wait in a bounded queue; those with equal settings are drawn in one batch. `submit` never blocks."""

    def __init__(self, facts: Facts, settings: Settings, records: Records) -> None:
        self.facts, self.settings, self.records = facts, settings, records
        self.ask, self.scale, self.retains, self.scope = facts.ask, facts.scale, facts.retains, facts.scope
        self.uncovered: list[str] = facts.settings.get("uncovered", [])
        self.calibrated: str | None = facts.settings.get("calibrated")
        self.shown = SHOWN + (("released_flagged",) if facts.keeps else ())
        self.waiting: FairQueue[Job] = FairQueue(settings.queue, settings.share)
        self.ready, self.changing = threading.Condition(), threading.Lock()
        self.closing = False
        self.running: list[Job] = []
        self.began = 0.0
        self.batches = 0
        self.on_batch: Callable[[list[Job], list[GuardReport], float], None] | None = None
        self.thread = threading.Thread(target=self.work, name="guardpaint-worker", daemon=True)

    @abstractmethod
    def draw_batch(self, batch: list[Job]) -> tuple[list[Image.Image], list[GuardReport]]:
        """The pictures and reports of a batch."""

    @abstractmethod
    def give_up(self) -> None:
        """Stop the batch that is being drawn."""

    @property
    @abstractmethod
    def policy(self) -> Policy: ...

    @abstractmethod
    def use_policy(self, policy: Policy) -> None:
        """Draw under this policy from the next batch on."""

    @property
    def able(self) -> bool:
        """Whether a batch can be drawn now; `ready` is notified when that changes."""
        return True

    # Called from other threads ---------------------------------------------------------------------------

    def submit(self, jobs: list[Job]) -> None:
        with self.ready:
            if self.closing or not self.thread.is_alive():
                raise Overloaded(CLOSING)
            self.waiting.add(jobs)
            self.ready.notify_all()  # other threads may wait here too

    @property
    def busy(self) -> int:
        return len(self.running)

    @property
    def depth(self) -> int:
        with self.ready:
            self.waiting.purge()
            return len(self.waiting) + self.busy

    def limit(self, pictures: int) -> float:
        """Seconds that drawing (or auditing) this many pictures may take."""
        return pictures * (self.settings.picture_timeout + self.facts.timeout_s)

    def log_problem(self) -> str:
        """Why the audit log cannot take a record now; empty if it can, or if there is none."""
        return self.records.problem()

    def rotate_log(self) -> str:
        """Put the audit log aside and go on in a new file; returns the name of the old one."""
        return self.records.rotate()

    @property
    def policy_note(self) -> str:
        """Where the policy comes from, and whether it outlasts a restart."""
        return self.records.note(self.policy, self.facts.policy)

    def change_policy(self, policy: Policy, by: str) -> None:
        """Use another policy from the next batch on. A change that cannot be logged and kept is not made."""
        check_change(policy, self.facts)
        with self.changing:
            self.records.change_policy(policy, by)
            self.use_policy(policy)

    def close(self, patience: float | None = None) -> None:
        """Take no more jobs and fail the waiting ones. The running batch gets some seconds, then it is given up."""
        self.begin_closing()
        if self.thread.is_alive():
            self.thread.join(self.settings.grace if patience is None else patience)
        if self.thread.is_alive():
            self.give_up()
            self.thread.join(10.0)

    def begin_closing(self) -> None:
        """Take no more jobs and fail the waiting ones."""
        with self.ready:
            self.closing = True
        self.fail_waiting(CLOSING)

    def fail_waiting(self, message: str) -> None:
        """Fail every job that waits for its turn."""
        with self.ready:
            left = self.waiting.clear()
            self.ready.notify_all()
        for job in left:
            settle(job, error=Overloaded(message))

    # Run in the dispatcher's thread ----------------------------------------------------------------------

    def work(self) -> None:
        """Draw batch after batch until the dispatcher is closed."""
        while True:
            with self.ready:
                while not (self.waiting and self.able) and not self.closing:
                    self.ready.wait()
                if self.closing:
                    return
            batch = self.gather()
            if batch:
                self.run(batch)

    def gather(self) -> list[Job]:
        """The next batch: the job whose turn it is and others with equal settings."""
        deadline = time.monotonic() + self.settings.linger
        with self.ready:
            while len(self.waiting) < self.settings.batch and not self.closing:
                left = deadline - time.monotonic()
                if left <= 0 or not self.ready.wait(left):
                    break
            if not self.able:
                return []
            self.running, self.began = self.waiting.take(self.settings.batch), time.monotonic()
            return self.running

    def run(self, batch: list[Job]) -> None:
        """Draw a batch and settle its jobs."""
        try:
            images, reports = self.draw_batch(batch)
        except Cancelled:
            for job in batch:
                settle(job, error=Cancelled())
            return
        except Exception as error:  # fail closed: every job of the batch gets the error
            for job in batch:
                settle(job, error=error)
            return
        finally:
            self.running = []
            self.batches += 1
        if self.on_batch is not None:  # before the jobs are settled, so that /metrics counts an answered request
            try:
                self.on_batch(batch, reports, time.monotonic() - self.began)
            except Exception:  # counting and tracing must never stop the dispatcher
                log.exception("a batch could not be counted or traced")
        for job, image, report in zip(batch, images, reports, strict=True):
            send_audits(job, report)
            settle(job, Done(image if report.status in self.shown else None, report))


def first_policy(records: Records, facts: Facts, choice: str | None = None) -> Policy:
    """The policy that a service starts with: the one that was changed over the API, or else the configured one."""
    policy = records.restore(facts.policy, choice)
    check_change(policy, facts)
    if records.restored is not None:
        event = event_of(policy, records.restored.by)
        records.append([{**event, "restored": records.restored.at}], kind="event")
    return policy


def check_change(policy: Policy, facts: Facts) -> None:
    """Refuse a policy that the running service cannot change to."""
    if policy.last_resort[-1] == "keep" and not facts.keeps:
        raise BadConfig(KEEP_REFUSED)
    refuse_weaker(policy, facts.policy)
    known = facts.policy.names
    if policy.names != known:
        raise BadConfig(f"categories {', '.join(policy.names)}: the guard knows {', '.join(known)}; use these names")
