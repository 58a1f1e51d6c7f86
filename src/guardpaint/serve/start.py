"""From the command line to a listening service."""

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
    """The picture that /ready must see caught: the user's own, or one that the installed testbed knows to be unsafe."""
    if path is not None:
        return load_image(path).convert("RGB")
    return need(open_testbed(), KnownPictures, "serve without --self-test").known_bad()


def limits(options: Options) -> Settings:
    if options.keys is None and options.host not in LOOPBACK:
        raise BadConfig(f"host {options.host}: on an address that others reach, --keys is needed")
    return Settings(load_keys(options.keys) if options.keys else {}, options.queue, options.batch)


def load_worker(options: Options, settings: Settings, err: Console | None = None, name: str | None = None) -> Worker:
    """Guard, log and base; a named worker is one of several and keeps a log of its own."""
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
    """One chain per process: audit.jsonl of worker x is audit-x.jsonl."""

    def own(path: Path) -> Path:
        return path if name is None else path.with_name(f"{path.stem}-{name}{path.suffix}")

    if options.audit_log is None:
        return None
    key = read_key(options.key_file)
    return AuditLog(own(options.audit_log), key=key, anchor=own(options.anchor) if options.anchor else None)


def build(options: Options, err: Console) -> Any:
    """The application; every missing piece is named before anything listens."""
    settings = limits(options)
    worker = load_worker(options, settings, err)
    return create_app(Service(worker, Path(options.base).name, settings, known_bad(options.self_test)))


def start(options: Options, err: Console) -> None:
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
    """Paths as replicas need them, whose working directory is another."""
    paths: dict[str, Any] = {n: p.resolve() for n, p in vars(options).items() if isinstance(p, Path)}
    for name in ("base", "guard"):
        given = getattr(options, name)
        if given is not None and Path(given).is_dir():
            paths[name] = str(Path(given).resolve())
    return replace(options, **paths)


def start_cluster(options: Options, replicas: int, most: int, err: Console) -> None:
    """The same application on Ray Serve, until interrupted."""
    from guardpaint.serve.cluster import deploy, stop

    if most < replicas:
        raise BadConfig(f"most_replicas={most}: at least as many as replicas={replicas}")
    settings, options = limits(options), absolute(options)
    asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.set())
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
    asked.wait()
    stop()
