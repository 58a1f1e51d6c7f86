"""Starts the service from its command-line options, in this process or on a Ray cluster."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from PIL import Image
from rich.console import Console

from guardpaint.bases import load_base, load_guard
from guardpaint.errors import BadConfig
from guardpaint.loop.audit_log import AuditLog, read_key
from guardpaint.serve.app import create_app
from guardpaint.serve.service import Service
from guardpaint.serve.settings import Settings, load_keys
from guardpaint.serve.worker import Worker
from guardpaint.store.images import load_image
from guardpaint.testbed import KnownPictures, need, open_testbed

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


def known_bad(path: Path | None) -> Image.Image:
    """The picture that the guard must flag for /ready: the given file, or one that the testbed knows to be unsafe."""
    if path is not None:
        return load_image(path).convert("RGB")
    return need(open_testbed(), KnownPictures, "serve without --self-test").known_bad()


def limits(options: Options) -> Settings:
    """The service's settings; an address that others can reach needs a key file."""
    if options.keys is None and options.host not in LOOPBACK:
        raise BadConfig(f"host {options.host}: other machines can reach this address, so --keys is needed")
    return Settings(load_keys(options.keys) if options.keys else {}, options.queue, options.batch)


def load_worker(options: Options, settings: Settings, err: Console | None = None, name: str | None = None) -> Worker:
    """Load the guard, its audit log and the base. A named worker is one of several and has its own log file."""
    console = err or Console(stderr=True)
    guard = load_guard(
        options.guard,
        options.policy,
        lambda text: console.print(f"note: {text}", style="yellow", soft_wrap=True),
        options.base,
        retain_evidence=options.retain_evidence,
    )
    guard.audit_log = open_log(options, name)
    base = load_base(options.base)
    return Worker(guard, base.pipe, dict(base.call), settings)


def open_log(options: Options, name: str | None = None) -> AuditLog | None:
    """Open the audit log, if one is configured. Worker x writes audit-x.jsonl in place of audit.jsonl."""

    def own(path: Path) -> Path:
        return path if name is None else path.with_name(f"{path.stem}-{name}{path.suffix}")

    if options.audit_log is None:
        return None
    key = read_key(options.key_file)
    return AuditLog(own(options.audit_log), key=key, anchor=own(options.anchor) if options.anchor else None)


def build(options: Options, err: Console) -> Any:
    """The application with everything loaded; what is missing raises before the service listens."""
    settings = limits(options)
    worker = load_worker(options, settings, err)
    return create_app(Service(worker, Path(options.base).name, settings, known_bad(options.self_test)))


def start(options: Options, err: Console) -> None:
    """Serve in this process until it is interrupted."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    app = build(options, err)
    err.print(f"http://{options.host}:{options.port}", highlight=False)
    uvicorn.run(
        app,
        host=options.host,
        port=options.port,
        log_level="warning",
        timeout_graceful_shutdown=60,
        h11_max_incomplete_event_size=65536,
    )


def absolute(options: Options) -> Options:
    """The options with absolute paths, because replicas run in another working directory."""
    paths: dict[str, Any] = {n: p.resolve() for n, p in vars(options).items() if isinstance(p, Path)}
    for name in ("base", "guard"):
        value = getattr(options, name)
        if value is not None and Path(value).is_dir():
            paths[name] = str(Path(value).resolve())
    return replace(options, **paths)


def start_cluster(options: Options, replicas: int, most: int, err: Console) -> None:
    """Serve the same application with Ray Serve until it is interrupted."""
    from guardpaint.serve.cluster import deploy, stop

    if most < replicas:
        raise BadConfig(f"most_replicas={most}: must be at least replicas={replicas}")
    settings, options = limits(options), absolute(options)
    interrupted = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: interrupted.set())
    deploy(
        load_worker(replace(options, audit_log=None), settings, err),
        partial(load_worker, options, settings, None),
        partial(open_log, options, "ingress"),
        Path(options.base).name,
        known_bad(options.self_test),
        replicas=(replicas, most),
        address=(options.host, options.port),
    )
    err.print(f"http://{options.host}:{options.port}, {replicas} to {most} replicas", highlight=False)
    interrupted.wait()
    stop()
