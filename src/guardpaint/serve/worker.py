"""One model and one thread. Jobs wait in a bounded queue; those with equal settings are drawn in one batch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from PIL import Image

from guardpaint.draft.codec import vae_decode
from guardpaint.draft.families import family_of
from guardpaint.errors import BadConfig, GuardPaintError
from guardpaint.guard import GuardPaint
from guardpaint.loop.pictures import blurred_thumbnail
from guardpaint.loop.report import GuardReport, StepRecord
from guardpaint.policy import Policy
from guardpaint.serve.disclosure import audited
from guardpaint.serve.schemas import AuditResponse
from guardpaint.serve.settings import Key, Settings
from guardpaint.store.images import from_pil, to_pil

log = logging.getLogger("guardpaint.serve")
SHOWN = ("clean", "repaired", "blurred")
"""Statuses whose picture may leave the service."""
KEEP_REFUSED = (
    "last_resort ends in keep, but the service was started with a policy that blocks; "
    "restart it with the new policy to release flagged pictures"
)


class Overloaded(GuardPaintError):
    """The queue is full, or the service is closing."""


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
    future: Future[Done] = field(default_factory=Future)
    gone: threading.Event = field(default_factory=threading.Event)
    queued: float = field(default_factory=time.monotonic)


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
    """What a service needs of the object that draws: a `Worker` in this process, or a `Cluster` of replicas."""

    ask: Ask
    """The settings of a request that names none."""
    scale: int
    """Side of one latent cell in pixels."""
    retains: bool
    """Whether evidence is kept unblurred for operators."""
    closing: bool
    on_batch: Callable[[list[Job], list[GuardReport], float], None] | None

    @property
    def policy(self) -> Policy: ...
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


class NoPrompts(logging.Filter):
    """Keeps prompts out of the log: diffusers writes what a text encoder cuts off into a warning."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "truncated" not in str(record.msg)


def keep_prompts_out(pipe: Any) -> None:
    """Filter the loggers of a pipeline's own modules."""
    for cls in type(pipe).__mro__:
        if cls.__module__.startswith("diffusers."):
            logger = logging.getLogger(cls.__module__)
            if not any(isinstance(f, NoPrompts) for f in logger.filters):
                logger.addFilter(NoPrompts())


class Worker:
    """Draws with one pipeline in one thread. `submit` never blocks; a full queue raises Overloaded."""

    def __init__(self, guard: GuardPaint, pipe: Any, call: dict[str, Any], settings: Settings) -> None:
        self.guard, self.pipe, self.call, self.settings = guard, pipe, dict(call), settings
        if guard.config.mode != "enforce":
            raise BadConfig(f"the guard's mode is {guard.config.mode}; a service needs mode=enforce")
        size = int(call.get("height") or pipe.vae_scale_factor * default_latents(pipe))
        native = (size, int(call.get("width") or size))
        self.ask = Ask(int(call.get("num_inference_steps", 25)), float(call.get("guidance_scale", 4.0)), native)
        self.scale, self.retains = int(pipe.vae_scale_factor), guard.config.retain_evidence
        self.shown = SHOWN + (("released_flagged",) if guard.policy.last_resort[-1] == "keep" else ())
        keep_prompts_out(pipe)
        self.waiting: deque[Job] = deque()
        self.ready, self.changing = threading.Condition(), threading.Lock()
        self.closing = False
        self.busy = 0
        self.batches = 0
        self.on_batch: Callable[[list[Job], list[GuardReport], float], None] | None = None
        self.thread = threading.Thread(target=self.work, name="guardpaint-worker", daemon=True)
        self.thread.start()

    # Called from other threads ---------------------------------------------------------------------------

    def submit(self, jobs: list[Job]) -> None:
        with self.ready:
            if self.closing or not self.thread.is_alive():
                raise Overloaded("the service is closing")
            if len(self.waiting) + len(jobs) > self.settings.queue:
                raise Overloaded(f"{len(self.waiting)} pictures are waiting already; try again later")
            self.waiting.extend(jobs)
            self.ready.notify()

    @property
    def depth(self) -> int:
        return len(self.waiting) + self.busy

    @property
    def policy(self) -> Policy:
        return self.guard.policy

    @property
    def alive(self) -> bool:
        return self.thread.is_alive()

    async def audit(self, picture: Image.Image, prompt: str | None, key: Key) -> AuditResponse:
        return await asyncio.to_thread(audited, self.guard, picture, prompt, key)

    async def catches(self, bad: Image.Image) -> bool:
        return await asyncio.to_thread(catches, self.guard, bad)

    def log_problem(self) -> str:
        """Why the audit log cannot take a record now; empty if it can, or if there is none."""
        return "" if self.guard.audit_log is None else self.guard.audit_log.problem()

    def rotate_log(self) -> str:
        """Put the audit log aside and go on in a new file; returns the name of the old one."""
        if self.guard.audit_log is None:
            raise BadConfig("this service keeps no audit log: start it with --audit-log")
        return self.guard.audit_log.rotate().name

    def change_policy(self, policy: Policy, by: str) -> None:
        """Use another policy from the next batch on. A change that cannot be logged is not made."""
        if policy.last_resort[-1] == "keep" and "released_flagged" not in self.shown:
            raise BadConfig(KEEP_REFUSED)
        with self.changing:
            guard = self.guard.configured(policy=policy)
            if guard.audit_log is not None:
                guard.audit_log.append([{"policy": policy.to_dict(), "by": by}], kind="event")
            with self.ready:
                self.guard = guard

    def close(self, patience: float = 60.0) -> None:
        """Take no more jobs, fail the waiting ones, and wait for the running batch."""
        with self.ready:
            self.closing = True
            left = list(self.waiting)
            self.waiting.clear()
            self.ready.notify()
        for job in left:
            settle(job, error=Overloaded("the service is closing"))
        self.thread.join(patience)

    # Run in the worker's thread --------------------------------------------------------------------------

    def work(self) -> None:
        """Draw batch after batch until the worker is closed."""
        while True:
            with self.ready:
                while not self.waiting and not self.closing:
                    self.ready.wait()
                if self.closing and not self.waiting:
                    return
            batch = self.gather()
            if batch:
                self.run(batch)

    def gather(self) -> list[Job]:
        """The next batch: the job that has waited longest and others with equal settings."""
        deadline = time.monotonic() + self.settings.linger
        with self.ready:
            while len(self.waiting) < self.settings.batch and not self.closing:
                left = deadline - time.monotonic()
                if left <= 0 or not self.ready.wait(left):
                    break
            while self.waiting and self.waiting[0].gone.is_set():
                self.waiting.popleft().future.cancel()
            if not self.waiting:
                return []
            first = self.waiting[0].ask
            batch: list[Job] = []
            rest: deque[Job] = deque()
            for job in self.waiting:
                if job.gone.is_set():
                    job.future.cancel()
                elif job.ask == first and len(batch) < self.settings.batch:
                    if job.future.set_running_or_notify_cancel():
                        batch.append(job)
                else:
                    rest.append(job)
            self.waiting = rest
            self.busy = len(batch)
            return batch

    def run(self, batch: list[Job]) -> None:
        """Draw a batch and settle its jobs."""
        guard, began = self.guard, time.monotonic()
        try:
            images, reports = self.draw(guard, batch)
        except Cancelled:
            for job in batch:
                settle(job, error=Cancelled())
            return
        except Exception as error:  # fail closed: every job of the batch gets the error
            for job in batch:
                settle(job, error=error)
            return
        finally:
            self.busy = 0
            self.batches += 1
        if self.on_batch is not None:  # before the jobs are settled, so that /metrics counts an answered request
            try:
                self.on_batch(batch, reports, time.monotonic() - began)
            except Exception:  # counting and tracing must never stop the worker
                log.exception("a batch could not be counted or traced")
        for job, image, report in zip(batch, images, reports, strict=True):
            send_audits(job, report)
            settle(job, Done(image if report.status in self.shown else None, report))

    def draw(self, guard: GuardPaint, batch: list[Job]) -> tuple[list[Image.Image], list[GuardReport]]:
        """The pictures and reports of a batch."""
        ask = batch[0].ask
        twin = guard.attach(self.pipe)
        call = {**self.call, "num_inference_steps": ask.steps, "guidance_scale": ask.guidance}
        call |= {"height": ask.size[0], "width": ask.size[1]}
        out = twin(
            [j.prompt for j in batch],
            generator=[torch.Generator().manual_seed(j.seed) for j in batch],
            callback_on_step_end=self.watch(guard, batch, ask),
            callback_on_step_end_tensor_inputs=["latents"],
            **call,
        )
        return list(out.images), list(out.safety)

    def watch(self, guard: GuardPaint, batch: list[Job], ask: Ask) -> Callable[..., dict[str, Any]]:
        """A step callback that sends audits and previews, and stops the batch when nobody waits for it."""
        family = family_of(self.pipe)
        factor = self.pipe.vae_scale_factor
        shape = (ask.size[0] // factor, ask.size[1] // factor)

        def step(pipe: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
            if all(job.gone.is_set() for job in batch):
                raise Cancelled
            if any(job.on_audit is not None for job in batch):
                for job, report in zip(batch, guard.so_far(), strict=False):
                    send_audits(job, report)
            wanted = [i for i, job in enumerate(batch) if job.on_step is not None and not job.gone.is_set()]
            if wanted:
                z = family.unpack(kwargs["latents"].detach(), shape)[wanted].float()
                views = vae_decode(self.pipe.vae, z, z.device).cpu()
                for i, view in zip(wanted, views, strict=True):
                    job = batch[i]
                    picture = to_pil(view) if job.clear else blurred_thumbnail(view)
                    assert job.on_step is not None
                    job.on_step(index, ask.steps, picture, not job.clear)
            return {}

        return step


def default_latents(pipe: Any) -> int:
    """Latent side that the denoiser was made for."""
    net = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
    return int(getattr(net.config, "sample_size", None) or 16)


def catches(guard: GuardPaint, bad: Image.Image) -> bool:
    """Whether the guard flags a picture that is known to be unsafe; an error counts as no."""
    try:
        audit = guard.audit_image(from_pil(bad), None)
    except Exception:
        log.exception("the self-test failed")
        return False
    return guard.parts.finding(audit, 1.0) is not None
