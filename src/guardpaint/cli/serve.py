"""`guardpaint serve`: guarded generation over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from guardpaint.cli.common import BASE_HELP, GuardOption, PolicyOption, err
from guardpaint.errors import BadConfig


def serve(
    base: Annotated[str, typer.Option(help=BASE_HELP)] = "mini-sd",
    guard: GuardOption = None,
    policy: PolicyOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    keys: Annotated[
        Path | None, typer.Option(help="JSON file of API keys; needed on any address but loopback.")
    ] = None,
    queue: Annotated[int, typer.Option(min=1, help="Pictures that may wait.")] = 32,
    batch: Annotated[int, typer.Option(min=1, help="Compatible pictures drawn together.")] = 4,
    retain_evidence: Annotated[bool, typer.Option(help="Keep un-blurred evidence for operators.")] = False,
    audit_log: Annotated[
        Path | None, typer.Option(help="Append to this audit log. If it cannot be written, nothing is released.")
    ] = None,
    key_file: Annotated[Path | None, typer.Option(help="Key of the audit log's HMAC.")] = None,
    anchor: Annotated[Path | None, typer.Option(help="Where to anchor the audit log's head.")] = None,
    self_test: Annotated[
        Path | None, typer.Option(help="An unsafe picture that the guard must flag for /ready.")
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Deploy on a Ray cluster: RAY_ADDRESS, or this machine.")] = False,
    replicas: Annotated[int, typer.Option(min=1, help="With --ray: replicas at the start.")] = 1,
    most_replicas: Annotated[
        int | None, typer.Option(min=1, help="With --ray: largest number of replicas under load.")
    ] = None,
) -> None:
    """Serve guarded generation: an OpenAI-compatible API, a page at /, metrics at /metrics."""
    try:
        from guardpaint.serve.start import Options, start, start_cluster
    except ImportError as error:
        raise BadConfig("serving needs more packages: pip install 'guardpaint[serve]'") from error

    options = Options(
        base, guard, policy, host, port, keys, queue, batch, retain_evidence, audit_log, key_file, anchor, self_test
    )
    if ray:
        start_cluster(options, replicas, most_replicas or replicas, err)
    else:
        start(options, err)
