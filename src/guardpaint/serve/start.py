"""Starts the service from its command-line options, in this process or on a Ray cluster."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from PIL import Image
from rich.console import Console

from guardpaint.bases import BaseOptions, load_base, load_guard
from guardpaint.errors import BadConfig
from guardpaint.guard import GuardPaint
from guardpaint.loop.audit_log import AuditLog, read_key
from guardpaint.serve.app import create_app
from guardpaint.serve.child import Recipe
from guardpaint.serve.connections import bounded
from guardpaint.serve.dispatcher import first_policy
from guardpaint.serve.jobs import Drawing
from guardpaint.serve.quiet import log_to
from guardpaint.serve.records import PolicyFile, Records
from guardpaint.serve.service import Service
from guardpaint.serve.settings import Settings, load_keys
from guardpaint.serve.supervisor import Supervisor
from guardpaint.serve.worker import Worker
from guardpaint.store.folders import Access
from guardpaint.store.images import as_rgb, load_image
from guardpaint.testbed import KnownPictures, need, open_testbed
from guardpaint.verify.weak import refuse_weak

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class Options:
    """The options of `guardpaint serve`."""

    base: str
    guard: str | None
    policy: Path | None
    host: str
    port: int
    keys: Path | None
    queue: int
    batch: int
    retain_evidence: bool
    audit_log: Path | None
    key_file: Path | None
    anchor: Path | None
    self_test: Path | None
    connections: int = 0
    address_connections: int = 0
    hosts: tuple[str, ...] = ()
    per_key: int | None = None
    picture_timeout: float = Settings.picture_timeout
    grace: float = Settings.grace
    state: Path | None = None
    changed_policy: str | None = None
    weak: tuple[str, ...] = ()
    """Names of weak settings that are accepted."""
    opening: BaseOptions = field(default_factory=BaseOptions)
    seam: str | None = None
    """Seam metric by name; None: the guard's own."""
    """How the base is opened and called."""


def known_bad(path: Path | None) -> Image.Image:
    """The picture that the guard must flag for /ready: the given file, or one that the testbed knows to be unsafe."""
    if path is not None:
        return as_rgb(load_image(path))
    return need(open_testbed(), KnownPictures, "serve without --self-test").known_bad()


def limits(options: Options) -> Settings:
    """The service's settings; an address that others can reach needs a key file."""
    if options.keys is None and options.host not in LOOPBACK:
        raise BadConfig(f"host {options.host}: other machines can reach this address, so --keys is needed")
    return Settings(
        load_keys(options.keys) if options.keys else {},
        options.queue,
        options.batch,
        connections=options.connections,
        address_connections=options.address_connections,
        hosts=tuple(h.lower() for h in options.hosts),
        per_key=options.per_key,
        picture_timeout=options.picture_timeout,
        grace=options.grace,
    )


def load_parts(
    base: str,
    guard: str | None,
    policy: Path | None,
    retain_evidence: bool,
    weak: tuple[str, ...] = (),
    opening: BaseOptions | None = None,
    seam: str | None = None,
) -> tuple[GuardPaint, Any, Mapping[str, Any]]:
    """Guard, pipeline and call arguments; the guard is where the pipeline runs."""
    console = Console(stderr=True)
    loaded = load_guard(
        guard,
        policy,
        lambda text: console.print(f"note: {text}", style="yellow", soft_wrap=True),
        base,
        seam,
        access=None if opening is None else Access(token=opening.load.token),
        retain_evidence=retain_evidence,
    )
    refuse_weak(loaded.policy, loaded.config, weak)
    found = load_base(base, opening)
    return loaded.to(found.pipe._execution_device), found.pipe, found.call


def recipe(options: Options) -> Recipe:
    """How another process loads guard and pipeline; no keys and no log are in it."""
    guard = options.guard, options.policy, options.retain_evidence, options.weak
    return partial(load_parts, options.base, *guard, options.opening, options.seam)


def load_worker(options: Options, settings: Settings, name: str | None = None) -> Worker:
    """A worker in this process. A named one is one of several and has its own log file."""
    guard, pipe, call = recipe(options)()
    guard.audit_log = open_log(options, name)
    return Worker(guard, pipe, dict(call), settings)


def open_log(options: Options, name: str | None = None) -> AuditLog | None:
    """Open the audit log, if one is configured. Worker x writes audit-x.jsonl in place of audit.jsonl."""

    def own(path: Path) -> Path:
        return path if name is None else path.with_name(f"{path.stem}-{name}{path.suffix}")

    if options.audit_log is None:
        return None
    key = read_key(options.key_file)
    return AuditLog(own(options.audit_log), key=key, anchor=own(options.anchor) if options.anchor else None)


def open_policy_file(options: Options) -> PolicyFile | None:
    """Where a changed policy is kept: in the state folder, or else beside the audit log."""
    if options.state is not None:
        return PolicyFile(options.state / "policy.json")
    if options.audit_log is not None:
        return PolicyFile(options.audit_log.with_name(f"{options.audit_log.stem}-policy.json"))
    return None


def say_restored(records: Records, err: Console) -> None:
    """Tell the operator that the policy is not the configured one."""
    changed = records.restored
    if changed is not None:
        text = f"policy: as {changed.by} changed it over the API at {changed.at}, not as configured"
        err.print(text, style="bold yellow", soft_wrap=True)


def build(options: Options, err: Console) -> Any:
    """The application with everything loaded; what is missing raises before the service listens."""
    settings, bad = limits(options), known_bad(options.self_test)
    records = Records(open_log(options), open_policy_file(options))
    supervisor = Supervisor(recipe(options), settings, records, options.changed_policy)
    say_restored(records, err)
    return create_app(Service(supervisor, Path(options.base).name, settings, bad))


class Server(uvicorn.Server):
    """Closes the worker before the sockets: until running pictures are finished, new requests get 503."""

    def __init__(self, config: uvicorn.Config, worker: Drawing) -> None:
        super().__init__(config)
        self.worker, self.stopping = worker, False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.stopping:  # the second signal does not wait
            super().handle_exit(sig, frame)
            return
        self.stopping = True
        threading.Thread(target=self.stop, args=(sig, frame), daemon=True).start()

    def stop(self, sig: int, frame: FrameType | None) -> None:
        try:
            self.worker.close()
        finally:
            super().handle_exit(sig, frame)


def start(options: Options, err: Console) -> None:
    """Serve in this process until it is interrupted; another process draws."""
    log_to(sys.stderr)
    app = build(options, err)
    err.print(f"http://{options.host}:{options.port}", highlight=False)
    listen(app, options.host, options.port)


def listen(app: Any, host: str, port: int) -> None:
    """Answer requests until a signal stops the service."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        timeout_graceful_shutdown=10,
        **bounded(app.state.service.settings),
    )
    Server(config, app.state.service.worker).run()


def open_records(options: Options, name: str) -> Records:
    """The audit log and the policy file of the ingress of a cluster."""
    return Records(open_log(options, name), open_policy_file(options))


def absolute(options: Options) -> Options:
    """The options with absolute paths, because replicas run in another working directory."""
    paths: dict[str, Any] = {n: p.resolve() for n, p in vars(options).items() if isinstance(p, Path)}
    for name in ("base", "guard"):
        value = getattr(options, name)
        if value is not None and Path(value).is_dir():
            paths[name] = str(Path(value).resolve())
    kind, colon, file = (options.seam or "").partition(":")
    if colon and Path(file).is_file():
        paths["seam"] = f"{kind}:{Path(file).resolve()}"
    load = options.opening.load
    loras = tuple(replace(r, path=str(Path(r.path).resolve())) if Path(r.path).exists() else r for r in load.loras)
    return replace(options, **paths, opening=replace(options.opening, load=replace(load, loras=loras)))


def start_cluster(options: Options, replicas: int, most: int, err: Console) -> None:
    """Serve the same application with Ray Serve until it is interrupted."""
    from guardpaint.serve.cluster import deploy, stop

    if most < replicas:
        raise BadConfig(f"most_replicas={most}: must be at least replicas={replicas}")
    settings, options = limits(options), absolute(options)
    trial = load_worker(replace(options, audit_log=None), settings)
    records = Records(policy_file=open_policy_file(options))
    trial.use_policy(first_policy(records, trial.facts, options.changed_policy))
    say_restored(records, err)
    interrupted = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: interrupted.set())
    deploy(
        trial,
        partial(load_worker, options, settings),
        partial(open_records, options, "ingress"),
        Path(options.base).name,
        known_bad(options.self_test),
        replicas=(replicas, most),
        address=(options.host, options.port),
    )
    err.print(f"http://{options.host}:{options.port}, {replicas} to {most} replicas", highlight=False)
    interrupted.wait()
    stop()
