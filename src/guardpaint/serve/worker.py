"""One model, one thread: requests wait in a bounded queue, compatible ones are drawn together, each is judged alone."""

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
"""Outcomes whose picture may leave the service."""


class Overloaded(GuardPaintError):
    """The queue is full, or the service is closing."""


class Cancelled(Exception):
    """Nobody waits for any picture of the batch any more."""


@dataclass(frozen=True)
class Ask:
    """What makes pictures compatible."""

    steps: int
    guidance: float
    size: tuple[int, int]


@dataclass(frozen=True)
class Done:
    """One picture's outcome; no image unless it was released."""

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
    """(step, steps, preview, blurred): blurred unless the caller is an operator and evidence is retained."""
    clear: bool = False
    on_audit: Callable[[StepRecord], None] | None = None
    """Every audited step, as soon as it is over."""
    audits_told: int = 0
    future: Future[Done] = field(default_factory=Future)
    gone: threading.Event = field(default_factory=threading.Event)
    queued: float = field(default_factory=time.monotonic)


def settle(job: Job, done: Done | None = None, error: BaseException | None = None) -> None:
    """End a job; one whose caller gave up in the meantime is ended already."""
    with contextlib.suppress(InvalidStateError):
        if error is not None:
            job.future.set_exception(error)
        elif done is not None:
            job.future.set_result(done)


def tell(job: Job, report: GuardReport) -> None:
    """Audits the caller has not heard of yet."""
    if job.on_audit is not None:
        with contextlib.suppress(RuntimeError):  # nobody listens any more: the caller's event loop is closed
            for record in report.steps[job.audits_told :]:
                job.on_audit(record)
        job.audits_told = len(report.steps)


@runtime_checkable
class Drawing(Protocol):
    """What a service asks of whoever draws: a thread of its own process, or replicas elsewhere."""

    ask: Ask
    """What a request that says nothing gets."""
    scale: int
    """Pixels to a latent's side."""
    retains: bool
    """Whether evidence is kept in the clear for operators."""
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


class Worker:
    """Owns the pipeline. `submit` never blocks; a full queue says so."""

    def __init__(self, guard: GuardPaint, pipe: Any, call: dict[str, Any], settings: Settings) -> None:
        self.guard, self.pipe, self.call, self.settings = guard, pipe, dict(call), settings
        if guard.config.mode != "enforce":
            raise BadConfig(f"the guard's mode is {guard.config.mode}; a service needs one that enforces")
        size = int(call.get("height") or pipe.vae_scale_factor * default_latents(pipe))
        native = (size, int(call.get("width") or size))
        self.ask = Ask(int(call.get("num_inference_steps", 25)), float(call.get("guidance_scale", 4.0)), native)
        self.scale, self.retains = int(pipe.vae_scale_factor), guard.config.retain_evidence
        self.shown = SHOWN + (("released_flagged",) if guard.policy.last_resort[-1] == "keep" else ())
        self.waiting: deque[Job] = deque()
        self.ready, self.changing = threading.Condition(), threading.Lock()
        self.closing = False
        self.busy = 0
        self.batches = 0
        self.on_batch: Callable[[list[Job], list[GuardReport], float], None] | None = None
        self.thread = threading.Thread(target=self.work, name="guardpaint-worker", daemon=True)
        self.thread.start()

    # From outside ------------------------------------------------------------------------------------------

    def submit(self, jobs: list[Job]) -> None:
        with self.ready:
            if self.closing or not self.thread.is_alive():
                raise Overloaded("the service is closing")
            if len(self.waiting) + len(jobs) > self.settings.queue:
                raise Overloaded(f"{len(self.waiting)} pictures wait already")
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

    def change_policy(self, policy: Policy, by: str) -> None:
        """From the next batch on; a change that cannot be put on record is not made."""
        if policy.last_resort[-1] == "keep" and "released_flagged" not in self.shown:
            raise BadConfig("last_resort ends in keep: a running service does not begin to release flagged pictures")
        with self.changing:
            fresh = self.guard.configured(policy=policy)
            if fresh.audit_log is not None:
                fresh.audit_log.append([{"policy": policy.to_dict(), "by": by}], kind="event")
            with self.ready:
                self.guard = fresh

    def close(self, patience: float = 60.0) -> None:
        """No new work; what runs may finish, what waits fails."""
        with self.ready:
            self.closing = True
            left = list(self.waiting)
            self.waiting.clear()
            self.ready.notify()
        for job in left:
            settle(job, error=Overloaded("the service is closing"))
        self.thread.join(patience)

    # In the thread -----------------------------------------------------------------------------------------

    def work(self) -> None:
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
        """The longest waiting job and those like it."""
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
        guard, began = self.guard, time.monotonic()
        try:
            images, reports = self.draw(guard, batch)
        except Cancelled:
            for job in batch:
                settle(job, error=Cancelled())
            return
        except Exception as error:  # fail closed: every picture of the batch gets the error, none a picture
            for job in batch:
                settle(job, error=error)
            return
        finally:
            self.busy = 0
            self.batches += 1
        if self.on_batch is not None:  # before the answers: who reads /metrics after an answer finds it counted
            try:
                self.on_batch(batch, reports, time.monotonic() - began)
            except Exception:  # counting and tracing must never stop the worker
                log.exception("accounting of a batch failed")
        for job, image, report in zip(batch, images, reports, strict=True):
            tell(job, report)
            settle(job, Done(image if report.status in self.shown else None, report))

    def draw(self, guard: GuardPaint, batch: list[Job]) -> tuple[list[Image.Image], list[GuardReport]]:
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
        """Ends the batch when nobody waits; sends audits and blurred previews to those who asked."""
        family = family_of(self.pipe)
        factor = self.pipe.vae_scale_factor
        shape = (ask.size[0] // factor, ask.size[1] // factor)

        def step(pipe: Any, index: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
            if all(job.gone.is_set() for job in batch):
                raise Cancelled
            if any(job.on_audit is not None for job in batch):
                for job, report in zip(batch, guard.so_far(), strict=False):
                    tell(job, report)
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
    net = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
    return int(getattr(net.config, "sample_size", None) or 16)


def catches(guard: GuardPaint, bad: Image.Image) -> bool:
    """Whether a picture known to be bad is flagged."""
    try:
        audit = guard.audit_image(from_pil(bad), None)
    except Exception:
        log.exception("the self-test failed")
        return False
    return guard.parts.finding(audit, 1.0) is not None
