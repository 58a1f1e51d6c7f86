"""The same service on a Ray cluster: one ingress answers requests, and replicas draw the pictures."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from PIL import Image

from guardpaint.errors import BadConfig, GuardPaintError
from guardpaint.loop.audit_log import AuditLog, read_entries
from guardpaint.loop.report import GuardReport
from guardpaint.policy import Policy
from guardpaint.serve.app import create_app
from guardpaint.serve.disclosure import audited
from guardpaint.serve.schemas import AuditResponse
from guardpaint.serve.service import Service
from guardpaint.serve.settings import Key, Settings
from guardpaint.serve.worker import KEEP_REFUSED, Ask, Cancelled, Done, Job, Overloaded, Worker, catches, settle

log = logging.getLogger("guardpaint.serve")
APP, GENERATOR = "guardpaint", "Generator"
ATTEMPTS = 3
"""How often a picture is drawn again when its replica dies."""
PATIENCE = 30.0
"""Seconds that a self-test may wait for a busy replica."""


@dataclass(frozen=True)
class Rule:
    """A policy and its version. Of two rules the one with the higher version counts."""

    policy: Policy
    version: tuple[int, int]
    """Start time of the ingress and the number of policy changes since then; a replica starts with (0, 0)."""
    by: str = ""


@dataclass(frozen=True)
class Order:
    """A picture to draw, as it is sent to a replica: plain values, and the policy to draw it under."""

    prompt: str
    seed: int
    ask: Ask
    owner: str
    rule: Rule
    previews: bool
    clear: bool


@dataclass(frozen=True)
class Facts:
    """What the ingress knows about its replicas without loading any weights."""

    ask: Ask
    scale: int
    retains: bool
    policy: Policy
    keeps: bool
    """Whether the first policy may release flagged pictures. If not, no later policy of this service may."""
    replicas: int = 1
    """The largest number of replicas."""
    deployment: str = ""
    """Random name of this deployment. An ingress that Ray restarts has the same one."""


class Generator:
    """One replica. It has its own worker and its own audit log."""

    def __init__(self, load: Callable[[str], Worker], name: str | None = None) -> None:
        if name is None:
            from ray import serve

            name = serve.get_replica_context().replica_id.unique_id
        self.worker, self.version = load(name), (0, 0)
        self.taking = threading.Lock()

    def take(self, rule: Rule) -> None:
        """Adopt the policy of the ingress if it is newer than the one this replica has."""
        with self.taking:
            if rule.version > self.version:
                self.worker.change_policy(rule.policy, rule.by)
                self.version = rule.version

    async def draw(self, order: Order) -> AsyncIterator[tuple[str, Any]]:
        """Yield steps and audits as they happen, then ("done", Done) or ("failed", error).

        A consumer that stops early frees the place in the queue.
        """
        try:
            self.take(order.rule)
        except GuardPaintError as error:
            yield "failed", error
            return
        loop, events = asyncio.get_running_loop(), asyncio.Queue[tuple[str, Any]]()
        job = Job(order.prompt, order.seed, order.ask, order.owner, clear=order.clear)
        if order.previews:
            job.on_step = lambda *step: put("step", step)
            job.on_audit = lambda record: put("audit", record)

        def put(kind: str, value: Any) -> None:
            loop.call_soon_threadsafe(events.put_nowait, (kind, value))

        def ended(future: Any) -> None:
            error = Cancelled() if future.cancelled() else future.exception()
            put("done", future.result()) if error is None else put("failed", error)

        job.future.add_done_callback(ended)
        try:
            self.worker.submit([job])
            while True:
                kind, value = await events.get()
                yield kind, value
                if kind in ("done", "failed"):
                    return
        except Overloaded as error:
            yield "failed", error
        finally:
            job.gone.set()

    async def audit(self, picture: Image.Image, prompt: str | None, key: Key, rule: Rule) -> AuditResponse:
        self.take(rule)
        return await asyncio.to_thread(audited, self.worker.guard, picture, prompt, key)

    async def catches(self, bad: Image.Image, rule: Rule) -> bool:
        self.take(rule)
        return await asyncio.to_thread(catches, self.worker.guard, bad)

    def check_health(self) -> None:
        """Ray replaces a replica whose worker has died."""
        if not self.worker.alive:
            raise RuntimeError("the worker has died")


class Cluster:
    """The ingress's stand-in for a `Worker`: it has the same methods and sends each request to a replica."""

    def __init__(self, handle: Any, facts: Facts, settings: Settings, record: AuditLog | None = None) -> None:
        self.handle, self.facts, self.settings, self.record = handle, facts, settings, record
        self.most = settings.queue + facts.replicas * settings.batch
        self.ask, self.scale, self.retains = facts.ask, facts.scale, facts.retains
        self.rule = Rule(restored(record, facts) or facts.policy, (time.time_ns(), 0), "at the start")
        self.changing = threading.Lock()
        self.caught: tuple[Rule, bool] | None = None
        self.closing = False
        self.on_batch: Callable[[list[Job], list[GuardReport], float], None] | None = None
        self.running: set[asyncio.Task[None]] = set()

    @property
    def policy(self) -> Policy:
        return self.rule.policy

    @property
    def alive(self) -> bool:
        """Always true, because the ingress itself is running; `catches` shows whether the replicas are."""
        return True

    @property
    def depth(self) -> int:
        return len(self.running)

    def submit(self, jobs: list[Job]) -> None:
        if self.closing:
            raise Overloaded("the service is closing")
        if self.depth + len(jobs) > self.most:
            raise Overloaded(f"{self.depth} pictures are waiting already; try again later")
        for job in jobs:
            task = asyncio.get_running_loop().create_task(self.follow(job))
            self.running.add(task)
            task.add_done_callback(self.running.discard)

    async def follow(self, job: Job) -> None:
        """Draw one picture and settle its job. If its replica dies it is drawn again, up to ATTEMPTS times."""
        from ray.exceptions import ObjectLostError, RayActorError, RayError
        from ray.serve.exceptions import RayServeException

        began = time.monotonic()
        error: Exception = Overloaded(f"{ATTEMPTS} replicas died while drawing this picture")
        for _ in range(ATTEMPTS):
            if job.gone.is_set():
                error = Cancelled()
                break
            try:
                done = await self.drawn(job)
            except (RayActorError, ObjectLostError) as died:
                log.warning("a replica died: %s", type(died).__name__)
                continue
            except (RayError, RayServeException) as refusal:
                error = Overloaded(f"the cluster refused the request ({type(refusal).__name__})")
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
        """The outcome of a job, drawn by one replica; forwards its steps and audits meanwhile."""
        wants = job.on_step is not None or job.on_audit is not None
        order = Order(job.prompt, job.seed, job.ask, job.owner, self.rule, wants, job.clear)
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
        raise Overloaded("the replica ended without a result")

    async def audit(self, picture: Image.Image, prompt: str | None, key: Key) -> AuditResponse:
        from ray.exceptions import RayError

        try:
            response = self.handle.audit.remote(picture, prompt, key, self.rule)
            return await asyncio.wait_for(response, self.settings.timeout)
        except (TimeoutError, RayError) as error:
            raise Overloaded(f"no replica answered ({type(error).__name__})") from error

    async def catches(self, bad: Image.Image) -> bool:
        """Whether a replica flags the known-bad picture.

        If no replica answers in time, the last result under the same policy counts: a busy replica is not a broken one.
        """
        rule = self.rule
        try:
            self.caught = rule, await asyncio.wait_for(self.handle.catches.remote(bad, rule), PATIENCE)
        except TimeoutError:
            log.warning("no replica answered the self-test within %g s", PATIENCE)
        except Exception as error:
            log.warning("self-test failed: %s", type(error).__name__)
            self.caught = None
        return self.caught is not None and self.caught[0] is rule and self.caught[1]

    def log_problem(self) -> str:
        """Why the ingress's own log cannot take a record now; replicas fail closed by themselves."""
        return "" if self.record is None else self.record.problem()

    def rotate_log(self) -> str:
        """Put the ingress's own log aside; replicas' logs are rotated while they are stopped."""
        if self.record is None:
            raise BadConfig("this service keeps no audit log: start it with --audit-log")
        return self.record.rotate().name

    def change_policy(self, policy: Policy, by: str) -> None:
        """Send another policy with every later order. A change that cannot be logged is not made."""
        if policy.last_resort[-1] == "keep" and not self.facts.keeps:
            raise BadConfig(KEEP_REFUSED)
        known = self.facts.policy.names
        if policy.names != known:
            raise BadConfig(
                f"categories {', '.join(policy.names)}: the guard knows {', '.join(known)}; use these names"
            )
        with self.changing:
            if self.record is not None:
                event = {"policy": policy.to_dict(), "by": by, "deployment": self.facts.deployment}
                self.record.append([event], kind="event")
            began, count = self.rule.version
            self.rule = Rule(policy, (began, count + 1), by)

    def close(self) -> None:
        self.closing = True


def restored(record: AuditLog | None, facts: Facts) -> Policy | None:
    """The latest policy in the log that was set in the same deployment, for an ingress that Ray has restarted."""
    if record is None:
        return None
    events = [entry["event"] for _, entry, bad in read_entries(record.path) if not bad and "event" in entry]
    own = [e["policy"] for e in events if e.get("deployment") == facts.deployment and "policy" in e]
    return Policy.from_dict(own[-1], "policy") if own else None


async def let_go(job: Job, replies: Any) -> None:
    """Wait until nobody waits for a picture any more, then cancel its drawing."""
    while not job.gone.is_set():
        await asyncio.sleep(0.25)
    with contextlib.suppress(Exception):
        replies.cancel()


@dataclass
class Ingress:
    """The process that answers requests: the application, with a `Cluster` in place of a worker."""

    generators: Any
    facts: Facts
    settings: Settings
    name: str
    bad: Image.Image
    open_log: Callable[[], AuditLog | None]

    def __serve_build_asgi_app__(self) -> Any:
        worker = Cluster(self.generators, self.facts, self.settings, self.open_log())
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
    """Start the ingress and the replicas; return when they answer.

    `trial` is a worker on this machine that shows that everything loads; it is closed again.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise BadConfig("a cluster needs more packages: pip install 'guardpaint[serve,ray]'") from error

    settings = trial.settings
    fewest, most = replicas
    keeps = trial.policy.last_resort[-1] == "keep"
    facts = Facts(trial.ask, trial.scale, trial.retains, trial.policy, keeps, most, secrets.token_hex(8))
    trial.close()
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    serve.start(http_options={"host": address[0], "port": address[1]})
    listening(*address)
    target = {"min_replicas": fewest, "max_replicas": most, "target_ongoing_requests": settings.batch}
    count: dict[str, Any] = {"autoscaling_config": target} if most > fewest else {"num_replicas": fewest}
    generator: Any = serve.deployment(
        Generator,
        name=GENERATOR,
        max_ongoing_requests=2 * settings.batch,
        ray_actor_options={"num_cpus": 1, "num_gpus": 1 if ray.cluster_resources().get("GPU") else 0},
        health_check_period_s=2,
        graceful_shutdown_timeout_s=60,
        **count,
    )

    ingress: Any = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=4 * settings.queue,
    )
    try:
        serve.run(ingress.bind(generator.bind(load), facts, settings, name, bad, open_log), name=APP)
    except BaseException:
        stop()
        raise


def listening(host: str, port: int) -> None:
    """Raise unless Ray Serve listens on this address.

    A Serve that is running already keeps its own address, for which the check that keys are given was not made.
    """
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    config = client.http_config if client is not None else None
    if config is None:
        raise BadConfig(f"Ray Serve does not listen on {host}:{port}; shut it down and start again")
    if (config.host, config.port) != (host, port):
        address = f"--host {config.host} --port {config.port}"
        raise BadConfig(f"Ray Serve is running on another address than {host}:{port}; use {address}")


def stop() -> None:
    """Remove this application from the cluster; running requests get up to a minute to finish."""
    from ray import serve

    with contextlib.suppress(Exception):
        serve.delete(APP)
