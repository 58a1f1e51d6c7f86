"""Pictures to draw and their outcomes, and what a service needs of the object that draws them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from PIL import Image

from guardpaint.config import Scope
from guardpaint.errors import GuardPaintError
from guardpaint.loop.report import GuardReport, StepRecord
from guardpaint.policy import Policy
from guardpaint.serve.schemas import AuditResponse
from guardpaint.serve.settings import Key
from guardpaint.types import JsonDict

SHOWN = ("clean", "repaired", "blurred")
"""Statuses whose picture may leave the service."""
KEEP_REFUSED = (
    "last_resort ends in keep, but the service was started with a policy that blocks; "
    "restart it with the new policy to release flagged pictures"
)
CLOSING = "the service is closing"


class Overloaded(GuardPaintError):
    """The queue is full, the service is closing, or nothing can draw now."""


class Crowded(Overloaded):
    """The caller's own share of the queue is full."""


class Cancelled(Exception):
    """The batch was stopped, because nobody waits for any of its pictures."""


@dataclass(frozen=True)
class Ask:
    """The settings of a picture; jobs with equal ones can share a batch."""

    steps: int
    guidance: float
    size: tuple[int, int]


@dataclass(frozen=True)
class Done:
    """The outcome of one job; `image` is None unless the picture was released."""

    image: Image.Image | None
    report: GuardReport


@dataclass
class Job:
    """One picture to draw."""

    prompt: str
    seed: int
    ask: Ask
    owner: str
    on_step: Callable[[int, int, Image.Image, bool], None] | None = None
    """Called with (step, steps, preview, blurred) after every step."""
    clear: bool = False
    """Whether previews are sent unblurred: only to operators, and only if evidence is retained."""
    on_audit: Callable[[StepRecord], None] | None = None
    """Called with the record of every audited step, as soon as the step is over."""
    audits_sent: int = 0
    request: str = ""
    """Id of the HTTP request, which the audit log records with the owner."""
    future: Future[Done] = field(default_factory=Future)
    gone: threading.Event = field(default_factory=threading.Event)
    """Set when nobody waits for the picture any more."""
    queued: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Order:
    """A picture to draw, as it is sent to another process: plain values."""

    prompt: str
    seed: int
    ask: Ask
    owner: str
    previews: bool
    clear: bool
    request: str = ""

    @classmethod
    def of(cls, job: Job) -> Order:
        wanted = job.on_step is not None or job.on_audit is not None
        return cls(job.prompt, job.seed, job.ask, job.owner, wanted, job.clear, job.request)

    def job(self) -> Job:
        """A job of the receiving process, without callbacks."""
        return Job(self.prompt, self.seed, self.ask, self.owner, clear=self.clear, request=self.request)


@dataclass(frozen=True)
class Facts:
    """What a service knows about guard and pipeline when another process has loaded them."""

    ask: Ask
    """The settings of a request that names none."""
    scale: int
    """Side of one latent cell in pixels."""
    retains: bool
    """Whether evidence is kept unblurred for operators."""
    policy: Policy
    keeps: bool
    """Whether the first policy may release flagged pictures. If not, no later policy of this service may."""
    names: tuple[str, str] = ("", "")
    """The pipeline's class and its family."""
    settings: JsonDict = field(default_factory=dict)
    """The effective settings that reports begin with."""
    timeout_s: float = 0.0
    log_prompts: bool = False
    scope: Scope | None = None
    """The settings that the guard was calibrated for; requests outside of them are refused."""


def settle(job: Job, done: Done | None = None, error: BaseException | None = None) -> None:
    """Give a job its result or its error; nothing happens if its caller has cancelled it."""
    with contextlib.suppress(InvalidStateError):
        if error is not None:
            job.future.set_exception(error)
        elif done is not None:
            job.future.set_result(done)


def send_audits(job: Job, report: GuardReport) -> None:
    """Pass on the audited steps that the caller has not received yet."""
    if job.on_audit is not None:
        with contextlib.suppress(RuntimeError):  # the caller's event loop is closed already
            for record in report.steps[job.audits_sent :]:
                job.on_audit(record)
        job.audits_sent = len(report.steps)


@runtime_checkable
class Drawing(Protocol):
    """What a service needs of the object that draws: a `Worker` in this process, the `Supervisor` of another process,
    or a `Cluster` of replicas."""

    ask: Ask
    """The settings of a request that names none."""
    scale: int
    """Side of one latent cell in pixels."""
    retains: bool
    """Whether evidence is kept unblurred for operators."""
    scope: Scope | None
    """The settings that the guard was calibrated for."""
    uncovered: list[str]
    """Categories of the policy that no part of the guard can tell."""
    calibrated: str | None
    """On what the guard's thresholds were measured; None if on nothing."""
    closing: bool
    on_batch: Callable[[list[Job], list[GuardReport], float], None] | None

    @property
    def policy(self) -> Policy: ...
    @property
    def policy_note(self) -> str: ...
    @property
    def alive(self) -> bool: ...
    @property
    def depth(self) -> int: ...
    def submit(self, jobs: list[Job]) -> None: ...
    def change_policy(self, policy: Policy, by: str) -> None: ...
    def close(self) -> None: ...
    async def audit(self, picture: Image.Image, prompt: str | None, key: Key) -> AuditResponse: ...
    async def catches(self, bad: Image.Image) -> bool: ...
    def log_problem(self) -> str: ...
    def rotate_log(self) -> str: ...
