"""The same service on a Ray cluster: an ingress that answers, and replicas that draw."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from PIL import Image

from guardpaint.audit_log import AuditLog
from guardpaint.errors import BadConfig, GuardPaintError
from guardpaint.policy import Policy
from guardpaint.report import GuardReport
from guardpaint.serve.app import create_app
from guardpaint.serve.disclosure import audited
from guardpaint.serve.schemas import AuditResponse
from guardpaint.serve.service import Service
from guardpaint.serve.settings import Key, Settings
from guardpaint.serve.worker import Ask, Cancelled, Done, Job, Overloaded, Worker, catches, settle

log = logging.getLogger("guardpaint.serve")
APP, GENERATOR = "guardpaint", "Generator"
ATTEMPTS = 3
"""Replicas a picture may outlive."""


@dataclass(frozen=True)
class Order:
    """A picture to draw, as it travels: plain values, and the policy it is to be drawn under."""

    prompt: str
    seed: int
    ask: Ask
    owner: str
    policy: Policy
    version: int
    by: str
    """Who set this version of the policy."""
    previews: bool
    clear: bool


@dataclass(frozen=True)
class Facts:
    """What the ingress knows of a replica without loading any weights."""

    ask: Ask
    scale: int
    retains: bool
    policy: Policy
    keeps: bool
    """Whether the policy at the start may release flagged pictures; a running service does not begin to."""


class Generator:
    """One replica: a worker of its own, with a log of its own beside the others'."""

    def __init__(self, load: Callable[[str], Worker], name: str | None = None) -> None:
        if name is None:
            from ray import serve

            name = serve.get_replica_context().replica_id.unique_id
        self.worker, self.version = load(name), 0

    async def draw(self, order: Order) -> AsyncIterator[tuple[str, Any]]:
        """Steps and audits as they come, then ("done", Done) or ("failed", error). Leaving early frees the place."""
        try:
            if order.version > self.version:
                self.worker.change_policy(order.policy, order.by)
                self.version = order.version
        except GuardPaintError as error:
            yield "failed", error
            return
        loop, told = asyncio.get_running_loop(), asyncio.Queue[tuple[str, Any]]()
        job = Job(order.prompt, order.seed, order.ask, order.owner, clear=order.clear)
        if order.previews:
            job.on_step = lambda *step: tell("step", step)
            job.on_audit = lambda record: tell("audit", record)

        def tell(kind: str, value: Any) -> None:
            loop.call_soon_threadsafe(told.put_nowait, (kind, value))

        def ended(future: Any) -> None:
            error = Cancelled() if future.cancelled() else future.exception()
            tell("done", future.result()) if error is None else tell("failed", error)

        job.future.add_done_callback(ended)
        try:
            self.worker.submit([job])
            while True:
                kind, value = await told.get()
                yield kind, value
                if kind in ("done", "failed"):
                    return
        except Overloaded as error:
            yield "failed", error
        finally:
            job.gone.set()

    async def audit(self, picture: Image.Image, prompt: str | None, key: Key) -> AuditResponse:
        return await asyncio.to_thread(audited, self.worker.guard, picture, prompt, key)

    async def catches(self, bad: Image.Image) -> bool:
        return await asyncio.to_thread(catches, self.worker.guard, bad)

    def check_health(self) -> None:
        """Ray replaces a replica whose worker has died."""
        if not self.worker.alive:
            raise RuntimeError("the worker has died")


class Cluster:
    """The ingress's side: the same questions a worker answers, sent to replicas."""

    def __init__(self, handle: Any, facts: Facts, most: int, record: AuditLog | None = None) -> None:
        self.handle, self.facts, self.most, self.record = handle, facts, most, record
        self.ask, self.scale, self.retains = facts.ask, facts.scale, facts.retains
        self.current, self.version, self.by = facts.policy, 0, ""
        self.closing = False
        self.on_batch: Callable[[list[Job], list[GuardReport], float], None] | None = None
        self.running: set[asyncio.Task[None]] = set()

    @property
    def policy(self) -> Policy:
        return self.current

    @property
    def alive(self) -> bool:
        return True

    @property
    def depth(self) -> int:
        return len(self.running)

    def submit(self, jobs: list[Job]) -> None:
        if self.closing:
            raise Overloaded("the service is closing")
        if self.depth + len(jobs) > self.most:
            raise Overloaded(f"{self.depth} pictures wait already")
        for job in jobs:
            task = asyncio.get_running_loop().create_task(self.follow(job))
            self.running.add(task)
            task.add_done_callback(self.running.discard)

    async def follow(self, job: Job) -> None:
        """One picture from order to outcome; drawn anew if its replica dies, and never left without an answer."""
        from ray.exceptions import RayActorError, RayError
        from ray.serve.exceptions import RayServeException

        began = time.monotonic()
        error: Exception = Overloaded("no replica lived long enough to draw it")
        for _ in range(ATTEMPTS):
            if job.gone.is_set():
                error = Cancelled()
                break
            try:
                done = await self.drawn(job)
            except RayActorError as died:
                log.warning("a replica died: %s", type(died).__name__)
                continue
            except (RayError, RayServeException) as refusal:
                error = Overloaded(f"the cluster did not take it ({type(refusal).__name__})")
                break
            except Exception as failure:
                error = failure
                break
            except asyncio.CancelledError:
                error = Cancelled()
                break
            settle(job, done)
            if self.on_batch is not None:
                self.on_batch([job], [done.report], time.monotonic() - began)
            return
        settle(job, error=error)

    async def drawn(self, job: Job) -> Done:
        wants = job.on_step is not None or job.on_audit is not None
        order = Order(job.prompt, job.seed, job.ask, job.owner, self.current, self.version, self.by, wants, job.clear)
        replies = self.handle.options(stream=True).draw.remote(order)
        watch = asyncio.get_running_loop().create_task(let_go(job, replies))
        try:
            async for kind, value in replies:
                if kind == "step" and job.on_step is not None:
                    job.on_step(*value)
                elif kind == "audit" and job.on_audit is not None:
                    job.on_audit(value)
                elif kind == "failed":
                    raise value
                elif kind == "done":
                    return value
        finally:
            watch.cancel()
        raise Overloaded("the replica said nothing")

    async def audit(self, picture: Image.Image, prompt: str | None, key: Key) -> AuditResponse:
        return await self.handle.audit.remote(picture, prompt, key)

    async def catches(self, bad: Image.Image) -> bool:
        try:
            return await asyncio.wait_for(self.handle.catches.remote(bad), 30)
        except Exception as error:
            log.warning("self-test not answered: %s", type(error).__name__)
            return False

    def change_policy(self, policy: Policy, by: str) -> None:
        """Every later order carries it. A change that cannot be put on record is not made."""
        if policy.last_resort[-1] == "keep" and not self.facts.keeps:
            raise BadConfig("last_resort ends in keep: a running service does not begin to release flagged pictures")
        known = self.facts.policy.names
        if policy.names != known:
            raise BadConfig(f"categories {', '.join(policy.names)}: the guard knows {', '.join(known)}")
        if self.record is not None:
            self.record.append([{"policy": policy.to_dict(), "by": by}], kind="event")
        self.current, self.version, self.by = policy, self.version + 1, by

    def close(self) -> None:
        self.closing = True


async def let_go(job: Job, replies: Any) -> None:
    """Cancel a picture nobody waits for."""
    while not job.gone.is_set():
        await asyncio.sleep(0.25)
    with contextlib.suppress(Exception):
        replies.cancel()


@dataclass
class Ingress:
    """The process that answers: the application, with replicas for a worker."""

    generators: Any
    facts: Facts
    settings: Settings
    name: str
    bad: Image.Image
    open_log: Callable[[], AuditLog | None]

    def __serve_build_asgi_app__(self) -> Any:
        worker = Cluster(self.generators, self.facts, self.settings.queue, self.open_log())
        return create_app(Service(worker, self.name, self.settings, self.bad))


def deploy(
    trial: Worker,
    load: Callable[[str], Worker],
    open_log: Callable[[], AuditLog | None],
    name: str,
    bad: Image.Image,
    *,
    replicas: tuple[int, int],
    address: tuple[str, int],
) -> None:
    """Start the ingress and the replicas; returns when they answer. `trial` has shown that everything loads."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise BadConfig("a cluster needs more packages: pip install 'guardpaint[serve,ray]'") from error

    settings = trial.settings
    facts = Facts(trial.ask, trial.scale, trial.retains, trial.policy, trial.policy.last_resort[-1] == "keep")
    trial.close()
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    serve.start(http_options={"host": address[0], "port": address[1]})
    fewest, most = replicas
    target = {"min_replicas": fewest, "max_replicas": most, "target_ongoing_requests": settings.batch}
    count: dict[str, Any] = {"autoscaling_config": target} if most > fewest else {"num_replicas": fewest}
    generator: Any = serve.deployment(
        Generator,
        name=GENERATOR,
        max_ongoing_requests=2 * settings.batch,
        ray_actor_options={"num_cpus": 1, "num_gpus": 1 if ray.cluster_resources().get("GPU") else 0},
        health_check_period_s=2,
        **count,
    )

    ingress: Any = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=4 * settings.queue,
    )
    serve.run(ingress.bind(generator.bind(load), facts, settings, name, bad, open_log), name=APP)


def stop() -> None:
    """Requests under way may finish, then everything ends."""
    from ray import serve

    serve.shutdown()
