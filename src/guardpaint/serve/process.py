"""The service's end of the process that draws: requests with time limits, and its death."""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import multiprocessing
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from guardpaint.errors import GuardPaintError
from guardpaint.serve import child
from guardpaint.serve.jobs import Facts
from guardpaint.types import JsonDict

log = logging.getLogger("guardpaint.serve")
LOADING = 900.0
"""Seconds that loading guard and pipeline may take."""
TICK = 0.1
"""Seconds between two looks at deadlines, and at clients that hung up."""


class Lost(GuardPaintError):
    """The process that draws died or was killed before it answered."""


@dataclass
class Exchange:
    """A request that the process has not answered yet."""

    deadline: float
    subject: str
    """What takes too long when the deadline has passed."""
    on_event: Callable[[str, Any], None] | None = None
    future: Future[Any] = field(default_factory=Future)


class DrawingProcess:
    """One process, from its start to its death. Its records are written here, by `write`."""

    def __init__(self, recipe: child.Recipe, write: Callable[[Sequence[JsonDict], str], None] | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.write = write
        self.pipe, there = context.Pipe()
        self.process = context.Process(
            target=child.main, args=(there, recipe, write is not None), name="guardpaint-draws", daemon=True
        )
        self.process.start()
        there.close()
        self.lock, self.sending = threading.Lock(), threading.Lock()
        self.numbers = itertools.count(1)
        self.pending: dict[int, Exchange] = {}
        self.ready: Future[Facts] = Future()
        self.reason = ""
        """Why the process was killed; empty if it was not."""
        self.died = threading.Event()
        threading.Thread(target=self.listen, name="guardpaint-listen", daemon=True).start()

    @property
    def healthy(self) -> bool:
        """Whether it has loaded and lives."""
        loaded = self.ready.done() and self.ready.exception() is None
        return loaded and not self.reason and not self.died.is_set() and self.process.is_alive()

    def loaded(self) -> Facts:
        """Wait until guard and pipeline are loaded. What goes wrong is raised, and the process ended."""
        try:
            return self.ready.result(LOADING)
        except BaseException as error:
            self.kill("it did not load")
            if isinstance(error, TimeoutError):
                raise Lost(f"guard and pipeline were not loaded within {LOADING:g} s") from error
            raise

    def request(
        self,
        kind: str,
        value: Any,
        limit: float,
        *,
        on_event: Callable[[str, Any], None] | None = None,
        given_up: Callable[[], bool] = bool,
    ) -> Any:
        """Send a request and wait for its result. Raises Lost if the process dies or exceeds the limit in seconds."""
        subject = "a batch of pictures" if kind == "draw" else "an audit"
        exchange = Exchange(time.monotonic() + limit, f"{subject} took longer than {limit:g} s", on_event)
        with self.lock:
            if self.died.is_set() or self.reason:
                raise Lost(self.reason or "the process that draws has died")
            number = next(self.numbers)
            self.pending[number] = exchange
        try:
            self.send(kind, number, value)
            stopped = False
            while not concurrent.futures.wait([exchange.future], TICK).done:
                if not stopped and given_up():
                    self.send("stop", number, None)
                    stopped = True
            return exchange.future.result()
        finally:
            with self.lock:
                self.pending.pop(number, None)

    def watch(self) -> None:
        """Wait until the process has died; kill it when a request has exceeded its limit."""
        while not self.died.wait(TICK):
            now = time.monotonic()
            with self.lock:
                late = [e.subject for e in self.pending.values() if now > e.deadline]
            if late:
                self.kill(late[0])

    def kill(self, reason: str) -> None:
        """End the process at once; whoever waits for it gets Lost with the reason."""
        with self.lock:
            self.reason = self.reason or reason
        self.process.kill()

    # Its messages ----------------------------------------------------------------------------------------

    def send(self, kind: str, number: int, value: Any) -> None:
        data = pickle.dumps((kind, number, value))
        try:
            with self.sending:
                self.pipe.send_bytes(data)
        except OSError:
            self.process.kill()  # it has closed its end: the listener sees that too and fails what is pending

    def listen(self) -> None:
        """Take in its messages until it dies; then fail whatever is pending."""
        try:
            while True:
                self.take(*pickle.loads(self.pipe.recv_bytes()))
        except (EOFError, OSError):
            pass
        except Exception:
            log.exception("a message of the process that draws cannot be read")
        self.process.kill()
        self.process.join()
        self.pipe.close()
        with self.lock:
            self.reason = self.reason or f"the process that draws died (exit code {self.process.exitcode})"
            self.died.set()
            futures = [self.ready, *(e.future for e in self.pending.values())]
        for future in futures:
            if not future.done():
                future.set_exception(Lost(self.reason))

    def take(self, kind: str, number: int, value: Any) -> None:
        """Act on one message."""
        if kind == "ready":
            self.ready.set_result(value)
        elif kind == "broken":
            self.ready.set_exception(value)
        elif kind == "log":
            self.send("logged", number, self.written(*value))
        else:
            exchange = self.pending.get(number)
            if exchange is None:
                return
            if kind == "done":
                exchange.future.set_result(value)
            elif kind == "failed":
                exchange.future.set_exception(value)
            elif exchange.on_event is not None:
                try:
                    exchange.on_event(kind, value)
                except Exception:  # a caller's broken connection is no fault of the process
                    log.exception("a preview or an audit could not be passed on")

    def written(self, payloads: Sequence[JsonDict], kind: str) -> str:
        """Write records for the process; returns why that failed, or an empty string."""
        if self.reason or self.write is None:
            return "the process that draws is being replaced"
        try:
            self.write(payloads, kind)
        except Exception as error:  # whatever it is: without its record nothing may be released
            return str(error) or type(error).__name__
        return ""
