"""From the command line to a listening service."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console

from guardpaint.audit_log import AuditLog
from guardpaint.commands import load_base, load_guard
from guardpaint.errors import BadConfig
from guardpaint.images import load_image
from guardpaint.serve.settings import Settings, load_keys

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
    """The picture /ready must see caught: the user's own, or an undressed doll of the paper world."""
    if path is not None:
        return load_image(path).convert("RGB")
    from guardpaint.world.render import render
    from guardpaint.world.scene import sample_scene

    return Image.fromarray(render(sample_scene(1, "nudity", "flat")).image)


def build(options: Options, err: Console) -> Any:
    """The application; every missing piece is named before anything listens."""
    from guardpaint.serve.app import Service, create_app

    if options.keys is None and options.host not in LOOPBACK:
        raise BadConfig(f"host {options.host}: on an address that others reach, --keys is needed")
    settings = Settings(load_keys(options.keys) if options.keys else {}, options.queue, options.batch)
    guard = load_guard(options.guard, options.policy, err, options.base, retain_evidence=options.retain_evidence)
    if options.audit_log is not None:
        key = options.key_file.read_bytes() if options.key_file else None
        guard.audit_log = AuditLog(options.audit_log, key=key, anchor=options.anchor)
    pipe, call = load_base(options.base)
    return create_app(Service(guard, pipe, call, Path(options.base).name, settings, known_bad(options.self_test)))


def start(options: Options, err: Console) -> None:
    try:
        import uvicorn
    except ImportError as error:
        raise BadConfig("serving needs more packages: pip install 'guardpaint[serve]'") from error
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
