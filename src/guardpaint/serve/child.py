"""Runs in the process that draws: it loads guard and pipeline, draws batches and audits uploads, and holds no key.

Both ends of the pipe send pickled tuples of a kind, a number and a value.

- The service sends ("draw", n, Batch), ("audit" or "catches", n, Upload), ("stop", n, None),
  ("logged", ticket, problem).
- The child sends ("ready", 0, Facts) or ("broken", 0, error), then for every request ("done", n, result) or
  ("failed", n, error), and in between ("step" or "audit_record", n, …) and ("log", ticket, (payloads, kind)).
"""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from PIL import Image

from guardpaint.errors import AuditLogError, GuardPaintError
from guardpaint.guard import GuardPaint
from guardpaint.loop.report import GuardReport, StepRecord
from guardpaint.policy import Policy
from guardpaint.serve.disclosure import audited
from guardpaint.serve.engine import Engine, catches
from guardpaint.serve.jobs import Job, Order
from guardpaint.serve.settings import Key
from guardpaint.store.heap import few_heaps, give_back
from guardpaint.types import JsonDict

Recipe = Callable[[], tuple[GuardPaint, Any, Mapping[str, Any]]]
"""Loads guard, pipeline and call arguments. It is pickled, so it must be importable, or a partial of what is."""
TIDYING = 5.0
"""Seconds between two times at which unused memory is given back."""
ACKNOWLEDGED = 60.0
"""Seconds to wait until the service has written a record."""


@dataclass(frozen=True)
class Batch:
    """Pictures to draw under a policy; `name` is the request id of their reports."""

    name: str
    policy: Policy
    orders: tuple[Order, ...]


@dataclass(frozen=True)
class Upload:
    """A picture to audit; without a key, the self-test's."""

    policy: Policy
    picture: Image.Image
    prompt: str | None = None
    key: Key | None = None


def main(pipe: Connection, recipe: Recipe, logged: bool) -> None:
    """Load, then answer until the service closes its end of the pipe or kills this process."""
    few_heaps()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the service, which says when to stop
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    link = Link(pipe)
    threading.Thread(target=link.listen, name="listen", daemon=True).start()
    try:
        guard, pipeline, call = recipe()
        guard.remember_requests(1)  # the service keeps the reports
        if logged:
            guard.audit_log = RemoteLog(link)
        studio = Studio(link, guard, Engine(pipeline, call))
        facts = studio.engine.facts(guard)
    except Exception as error:
        link.send("broken", 0, portable(error))
        return
    link.send("ready", 0, facts)
    threading.Thread(target=studio.work, args=(link.uploads,), name="audits", daemon=True).start()
    studio.work(link.batches)


class Link:
    """The child's end of the pipe."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.sending = pipe, threading.Lock()
        self.batches: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
        self.uploads: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
        self.tickets = itertools.count(1)
        self.written: dict[int, Future[str]] = {}
        self.jobs: dict[int, list[Job]] = {}

    def send(self, kind: str, number: int, value: Any) -> None:
        data = pickle.dumps((kind, number, value))
        with self.sending:
            self.pipe.send_bytes(data)

    def listen(self) -> None:
        """Pass on what the service sends; end the process when the service is gone."""
        try:
            while True:
                kind, number, value = pickle.loads(self.pipe.recv_bytes())
                if kind == "draw":
                    self.jobs[number] = [order.job() for order in value.orders]
                    self.batches.put((kind, number, value))
                elif kind == "stop":
                    for job in self.jobs.get(number, ()):
                        job.gone.set()
                elif kind == "logged":
                    self.written.pop(number).set_result(value)
                else:
                    self.uploads.put((kind, number, value))
        except (EOFError, OSError):
            os._exit(0)


class RemoteLog:
    """The service's audit log as the guard in this process sees it. A record counts when the service has written it."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def append(self, payloads: Sequence[JsonDict], kind: str = "report") -> None:
        ticket, answer = next(self.link.tickets), Future[str]()
        self.link.written[ticket] = answer
        self.link.send("log", ticket, (list(payloads), kind))
        try:
            problem = answer.result(ACKNOWLEDGED)
        except TimeoutError as error:
            raise AuditLogError(f"the record was not written within {ACKNOWLEDGED:g} s") from error
        if problem:
            raise AuditLogError(problem)


class Studio:
    """Does what the service asks for: batches in one thread, uploads in another."""

    def __init__(self, link: Link, guard: GuardPaint, engine: Engine) -> None:
        self.link, self.guard, self.engine = link, guard, engine
        self.tidied = time.monotonic()

    def work(self, tasks: queue.SimpleQueue[tuple[str, int, Any]]) -> None:
        """Do one task after the other, for ever."""
        while True:
            kind, number, task = tasks.get()
            try:
                result = self.draw(number, task) if kind == "draw" else self.look(kind, task)
            except Exception as error:
                self.link.send("failed", number, portable(error))
            else:
                self.link.send("done", number, result)
            task = result = None  # not until the next task comes
            self.tidy()

    def tidy(self) -> None:
        """Give unused memory back now and then."""
        if time.monotonic() - self.tidied > TIDYING:
            self.tidied = time.monotonic()
            give_back()

    def under(self, policy: Policy) -> GuardPaint:
        """The guard under this policy."""
        guard = self.guard
        if guard.policy != policy:
            guard = self.guard = guard.configured(policy=policy)
        return guard

    def look(self, kind: str, upload: Upload) -> Any:
        guard = self.under(upload.policy)
        if kind == "catches" or upload.key is None:
            return catches(guard, upload.picture)
        return audited(guard, upload.picture, upload.prompt, upload.key)

    def draw(self, number: int, batch: Batch) -> tuple[list[Image.Image], list[GuardReport]]:
        jobs = self.link.jobs[number]
        for i, (job, order) in enumerate(zip(jobs, batch.orders, strict=True)):
            if order.previews:
                job.on_step, job.on_audit = partial(self.step, number, i), partial(self.audit, number, i)
        try:
            return self.engine.draw(self.under(batch.policy), jobs, batch.name)
        finally:
            del self.link.jobs[number]

    def step(self, number: int, image: int, *step: Any) -> None:
        self.link.send("step", number, (image, step))

    def audit(self, number: int, image: int, record: StepRecord) -> None:
        self.link.send("audit_record", number, (image, record))


def portable(error: BaseException) -> BaseException:
    """The error, or one with the same message if it does not survive the way to another process."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return GuardPaintError(f"{type(error).__name__}: {error}")
