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
from guardpaint.loop.audit_log import read_entries
from guardpaint.loop.report import GuardReport
from guardpaint.policy import Policy
from guardpaint.serve.app import create_app
from guardpaint.serve.disclosure import audited
from guardpaint.serve.dispatcher import check_change
from guardpaint.serve.engine import catches
from guardpaint.serve.fairness import FairQueue
from guardpaint.serve.jobs import CLOSING, Cancelled, Done, Facts, Job, Order, Overloaded, settle
from guardpaint.serve.records import Records
from guardpaint.serve.schemas import AuditResponse
from guardpaint.serve.service import Service
from guardpaint.serve.settings import Key, Settings
from guardpaint.serve.worker import Worker

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
class Deployment:
    """What the ingress knows about its replicas without loading any weights."""

    facts: Facts
    policy: Policy
    """The policy to start with: the configured one of `facts`, or one that was changed over the API before."""
    replicas: int = 1
    """The largest number of replicas."""
    name: str = ""
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

    async def draw(self, order: Order, rule: Rule) -> AsyncIterator[tuple[str, Any]]:
        """Yield steps and audits as they happen, then ("done", Done) or ("failed", error).

        A consumer that stops early frees the place in the queue.
        """
        try:
            self.take(rule)
        except GuardPaintError as error:
            yield "failed", error
            return
        loop, events = asyncio.get_running_loop(), asyncio.Queue[tuple[str, Any]]()
        job = order.job()
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
        """Ray replaces a replica whose worker has died or hangs."""
        if not self.worker.alive:
            raise RuntimeError("the worker hangs or has died")


class Cluster:
    """The ingress's stand-in for a `Worker`: it has the same methods and sends each request to a replica."""

    def __init__(self, handle: Any, deployment: Deployment, settings: Settings, records: Records | None = None) -> None:
        self.handle, self.deployment, self.settings = handle, deployment, settings
        self.records, facts = records or Records(), deployment.facts
        self.waiting: FairQueue[Job] = FairQueue(settings.queue, settings.share)
        self.most = deployment.replicas * settings.batch
        """Number of pictures that are sent to replicas at once; others wait here for their turn."""
        self.ask, self.scale, self.retains, self.scope = facts.ask, facts.scale, facts.retains, facts.scope
        self.uncovered: list[str] = facts.settings.get("uncovered", [])
        self.rule = Rule(restored(self.records, deployment), (time.time_ns(), 0), "at the start")
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
    def policy_note(self) -> str:
        return self.records.note(self.policy, self.deployment.facts.policy)

    @property
    def depth(self) -> int:
        self.waiting.purge()
        return len(self.waiting) + len(self.running)

    def submit(self, jobs: list[Job]) -> None:
        if self.closing:
            raise Overloaded(CLOSING)
        self.waiting.add(jobs)
        self.send()

    def send(self) -> None:
        """Send waiting pictures to the replicas, as far as they can draw at once."""
        while len(self.running) < self.most and (turn := self.waiting.take(1)):
            task = asyncio.get_running_loop().create_task(self.follow(turn[0]))
            self.running.add(task)
            task.add_done_callback(self.ended)

    def ended(self, task: asyncio.Task[None]) -> None:
        self.running.discard(task)
        self.send()

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
        replies = self.handle.options(stream=True).draw.remote(Order.of(job), self.rule)
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
        from ray.exceptions import RayError, RayTaskError

        try:
            response = self.handle.audit.remote(picture, prompt, key, self.rule)
            return await asyncio.wait_for(response, self.settings.timeout)
        except RayTaskError as error:  # what the replica itself raised
            raise error.cause if isinstance(error.cause, Exception) else error from None
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
        return self.records.problem()

    def rotate_log(self) -> str:
        """Put the ingress's own log aside; replicas' logs are rotated while they are stopped."""
        return self.records.rotate()

    def change_policy(self, policy: Policy, by: str) -> None:
        """Send another policy with every later order. A change that cannot be logged is not made."""
        check_change(policy, self.deployment.facts)
        with self.changing:
            self.records.change_policy(policy, by, deployment=self.deployment.name)
            began, count = self.rule.version
            self.rule = Rule(policy, (began, count + 1), by)

    def close(self) -> None:
        self.closing = True
        for job in self.waiting.clear():
            settle(job, error=Overloaded(CLOSING))


def restored(records: Records, deployment: Deployment) -> Policy:
    """The latest policy that was set in the same deployment, for an ingress that Ray has restarted: from the policy
    file, or else from the log."""
    if records.policy_file is not None:
        changed = records.policy_file.restore(deployment.facts.policy)
        return deployment.policy if changed is None else changed.policy
    if records.log is None:
        return deployment.policy
    events = [entry["event"] for _, entry, bad in read_entries(records.log.path) if not bad and "event" in entry]
    own = [e["policy"] for e in events if e.get("deployment") == deployment.name and "policy" in e]
    return Policy.from_dict(own[-1], "policy") if own else deployment.policy


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
    deployment: Deployment
    settings: Settings
    name: str
    bad: Image.Image
    open_records: Callable[[], Records]

    def __serve_build_asgi_app__(self) -> Any:
        worker = Cluster(self.generators, self.deployment, self.settings, self.open_records())
        return create_app(Service(worker, self.name, self.settings, self.bad))


def deploy(
    trial: Worker,
    load: Callable[[str], Worker],
    open_records: Callable[[], Records],
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
    deployment = Deployment(trial.facts, trial.policy, most, secrets.token_hex(8))
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
        serve.run(ingress.bind(generator.bind(load), deployment, settings, name, bad, open_records), name=APP)
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
