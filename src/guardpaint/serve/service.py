"""Behind the endpoints: jobs from requests, responses from outcomes, and results kept for their owners."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import pickle
import secrets
import time
import zlib
from typing import Any

from fastapi import HTTPException
from PIL import Image

from guardpaint.errors import BadConfig, BadInput
from guardpaint.loop.report import GuardReport
from guardpaint.policy import Policy
from guardpaint.serve.disclosure import plain
from guardpaint.serve.jobs import CLOSING, Ask, Cancelled, Crowded, Done, Drawing, Job, Overloaded
from guardpaint.serve.limits import Rates
from guardpaint.serve.metrics import Metrics
from guardpaint.serve.schemas import ImageItem, ImageRequest, Safety, problem
from guardpaint.serve.settings import Key, Settings
from guardpaint.serve.trace import record, tracer
from guardpaint.store.images import png_bytes
from guardpaint.store.recent import Recent

log = logging.getLogger("guardpaint.serve")
VIOLATION = "content_policy_violation"
FAILED = "guard_failed"
WITHHELD = {
    VIOLATION: (400, "The picture was withheld by the content policy."),
    FAILED: (503, "The guard or its log failed; nothing was released."),
}
"""HTTP status and message for each reason to withhold a picture."""


class Store:
    """The latest pictures or reports as bytes, each with its owner."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self.kept: Recent[tuple[str, bytes]] = Recent(most, most_bytes)

    def put(self, owner: str, data: bytes) -> str:
        """Keep some bytes and return their random name; the oldest ones make room for them."""
        name = secrets.token_urlsafe(16)
        self.kept.put(name, (owner, data), len(data))
        return name

    def get(self, name: str, key: Key) -> bytes:
        """The bytes, for their owner and for operators; for anyone else they do not exist."""
        owner, data = self.kept.get(name) or ("", b"")
        if not data or (owner != key.name and not key.operator):
            raise HTTPException(404, "does not exist any more, or belongs to another caller")
        return data


class Service:
    """One running service: its worker, limits, metrics and the results that can still be fetched."""

    def __init__(self, worker: Drawing, name: str, settings: Settings, self_test: Image.Image) -> None:
        self.name, self.settings, self.worker = name, settings, worker
        self.metrics = Metrics(lambda: float(self.worker.depth))
        self.tracer = tracer()
        self.worker.on_batch = self.account
        self.rates = Rates()
        self.pictures, self.reports = (Store(settings.kept_images, settings.kept_memory) for _ in range(2))
        self.self_test = self_test
        self.tested: tuple[Policy, float, bool] | None = None
        self.testing = asyncio.Lock()
        self.ask, self.native = worker.ask, worker.ask.size
        outside = [] if worker.scope is None else worker.scope.outside(self.native, self.ask.guidance, self.ask.steps)
        if outside:
            raise BadConfig(f"{name}'s own settings are outside of what the guard was calibrated for: {outside}")

    def account(self, jobs: list[Job], reports: list[GuardReport], seconds: float) -> None:
        """Count and trace a finished batch."""
        self.metrics.count(reports)
        if self.tracer is not None:
            record(self.tracer, reports, seconds)

    async def passes_self_test(self) -> bool:
        """Whether the guard still flags a picture that is known to be unsafe; tested at most every five seconds."""
        async with self.testing:  # those who ask at the same time get the same result
            policy, now = self.worker.policy, time.monotonic()
            if self.tested is None or self.tested[0] is not policy or now - self.tested[1] > 5.0:
                self.tested = (policy, now, await self.worker.catches(self.self_test))
            return self.tested[2]

    def jobs(self, body: ImageRequest, key: Key, request: str) -> list[Job]:
        """One job per picture of the request with this id; a request over the limits is refused."""
        limit = self.settings
        if len(body.prompt) > limit.longest_prompt:
            raise refused(
                413, f"the prompt has {len(body.prompt)} characters; at most {limit.longest_prompt} are taken", "prompt"
            )
        if body.n > limit.most_images:
            raise refused(400, f"n={body.n}: at most {limit.most_images}", "n")
        steps = body.num_inference_steps or self.ask.steps
        if steps > limit.most_steps:
            raise refused(400, f"num_inference_steps={steps}: at most {limit.most_steps}", "num_inference_steps")
        if body.model not in (None, self.name):
            raise refused(404, f"model {body.model!r}: this service has {self.name!r}", "model", "model_not_found")
        size = self.native
        if body.size not in (None, "auto"):
            width, height = (int(v) for v in str(body.size).split("x"))
            unit = 8 * self.worker.scale
            if (
                width % unit
                or height % unit
                or not unit <= min(width, height) <= max(width, height) <= 2 * max(self.native)
            ):
                raise refused(
                    400,
                    f"size={body.size}: both sides must be multiples of {unit}, up to {2 * max(self.native)}",
                    "size",
                )
            size = (height, width)
        ask = Ask(steps, self.ask.guidance if body.guidance_scale is None else body.guidance_scale, size)
        self.within_scope(ask.size, ask.guidance, ask.steps)
        seed = secrets.randbelow(2**31) if body.seed is None else body.seed
        return [Job(body.prompt, seed + i, ask, key.name, request=request) for i in range(body.n)]

    def within_scope(self, size: tuple[int, int], guidance: float | None = None, steps: int | None = None) -> None:
        """Refuse with 400 what the guard was not calibrated for: what it would miss there is not known."""
        scope = self.worker.scope
        outside = [] if scope is None else scope.outside(size, guidance, steps)
        if outside:
            what = "; ".join(outside)
            raise refused(400, f"outside of what the guard was calibrated for: {what}", None, "outside_calibration")

    def charge(self, key: Key, count: int) -> None:
        """Take `count` pictures from the caller's rate; 429 if they are too many."""
        wait = self.rates.take(key, count)
        if wait:
            raise refused(429, f"rate limit: {key.per_minute} pictures a minute", None, "rate_limit_exceeded", wait)

    def submit(self, jobs: list[Job], key: Key) -> None:
        """Queue the jobs; 429 over the caller's rate or share of the queue, 503 if the queue is full."""
        self.charge(key, len(jobs))
        try:
            self.worker.submit(jobs)
        except Overloaded as error:
            self.rates.give_back(key, len(jobs))
            raise mapped(error) from error

    def report(self, name: str, key: Key) -> GuardReport:
        """A report that is still kept, for its owner and for operators."""
        report: GuardReport = pickle.loads(zlib.decompress(self.reports.get(name, key)))
        return report

    def item(self, job: Job, done: Done, form: str, base: str) -> ImageItem:
        """One item of the response; it has a picture only if that was released."""
        report = done.report
        name = self.reports.put(job.owner, packed(report))
        flagged = next((s for s in report.steps if s.triggered), None)
        safety = Safety(
            status=report.status,
            triggered=report.triggered,
            category=flagged.category if flagged else None,
            reason=plain(flagged.category) if flagged else "",
            repaired_steps=sum(bool(s.reinsertion) for s in report.steps),
            report=name,
        )
        entry = ImageItem(seed=job.seed, safety=safety)
        if done.image is None:
            detail: Any = withheld(FAILED if report.errors else VIOLATION).detail
            entry.error = detail
        elif form == "url":
            entry.url = f"{base}v1/images/{self.pictures.put(job.owner, png_bytes(done.image))}.png"
        else:
            entry.b64_json = base64.b64encode(png_bytes(done.image)).decode()
        return entry


def packed(report: GuardReport) -> bytes:
    """A report at a fifth of its size in memory. Clear evidence is left as it is: it would take too long."""
    return zlib.compress(pickle.dumps(report), 1 if report.evidence_bytes < 2**20 else 0)


def refused(
    status: int, message: str, param: str | None = None, code: str = "invalid_request", wait: float = 0.0
) -> HTTPException:
    """An error response in OpenAI's format; `wait` is the number of seconds in Retry-After."""
    headers = {"Retry-After": str(max(1, round(wait)))} if wait else None
    kind = "invalid_request_error" if status < 500 else "server_error"
    return HTTPException(status, problem(message, kind, code, param)["error"], headers)


def withheld(code: str) -> HTTPException:
    """The error response when no picture was released."""
    status, message = WITHHELD[code]
    return refused(status, message, None, code, 2.0 if status == 503 else 0.0)


def mapped(error: Exception) -> HTTPException:
    """The error response for an exception that was raised while drawing or auditing."""
    if isinstance(error, Crowded):
        return refused(429, str(error), None, "too_many_waiting", 2.0)
    if isinstance(error, Overloaded):
        return refused(503, str(error), None, "overloaded", 2.0)
    if isinstance(error, Cancelled):
        return refused(503, CLOSING, None, "overloaded", 2.0)
    if isinstance(error, BadInput):
        return refused(400, str(error))
    log.error(json.dumps({"error": f"{type(error).__name__}: {error}"}))
    return withheld(FAILED)


def ending(service: Service, job: Job, index: int, future: Any, form: str, base: str) -> dict[str, Any]:
    """The last event of one picture: the picture itself, or an error."""
    try:
        item = service.item(job, future.result(), form, base)
    except Exception as error:
        response = mapped(error)
        return {"type": "error", "index": index, "status": response.status_code, "error": response.detail}
    if item.error:
        status = WITHHELD[item.error["code"]][0]
        return {
            "type": "error",
            "index": index,
            "status": status,
            "error": item.error,
            "safety": item.safety.model_dump(),
        }
    return {"type": "image_generation.completed", "index": index, **item.model_dump(exclude_none=True)}
