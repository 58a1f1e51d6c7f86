"""`guardpaint serve`: guarded generation over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from guardpaint.cli.common import BASE_HELP, GuardOption, PolicyOption, SeamOption, err, opens_bases
from guardpaint.errors import BadConfig

if TYPE_CHECKING:
    from guardpaint.bases import BaseOptions


@opens_bases
def serve(
    base: Annotated[str, typer.Option(help=BASE_HELP)] = "mini-sd",
    guard: GuardOption = None,
    policy: PolicyOption = None,
    seam: SeamOption = None,
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
    connections: Annotated[
        int, typer.Option(min=0, help="Most open connections; 0: half of the open files allowed, at most 1024.")
    ] = 0,
    address_connections: Annotated[
        int, typer.Option(min=0, help="Most open connections from one address; 0: half of all. A proxy is one address.")
    ] = 0,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A host name by which the service may be called; may be repeated.")
    ] = None,
    per_key: Annotated[
        int | None,
        typer.Option(min=1, help="Pictures of one key that may wait. Default: a quarter of the queue, at least 8."),
    ] = None,
    picture_timeout: Annotated[
        float,
        typer.Option(min=0.1, help="Seconds that one picture may take before the process that draws is replaced."),
    ] = 75.0,
    grace: Annotated[float, typer.Option(min=0.0, help="Seconds that running pictures get on shutdown.")] = 20.0,
    state: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps a policy changed over the API. Default: that of the audit log, if any."),
    ] = None,
    changed_policy: Annotated[
        str | None,
        typer.Option(help="If another policy is configured than the kept one was changed from: keep or discard it."),
    ] = None,
    weak: Annotated[
        list[str] | None,
        typer.Option(help="Weak setting to accept (last_resort, trigger, calibration, scope); repeatable."),
    ] = None,
    ray: Annotated[bool, typer.Option("--ray", help="Deploy on a Ray cluster: RAY_ADDRESS, or this machine.")] = False,
    replicas: Annotated[int, typer.Option(min=1, help="With --ray: replicas at the start.")] = 1,
    most_replicas: Annotated[
        int | None, typer.Option(min=1, help="With --ray: largest number of replicas under load.")
    ] = None,
    *,
    options: BaseOptions,
) -> None:
    """Serve guarded generation: an OpenAI-compatible API, a page at /, metrics at /metrics."""
    try:
        from guardpaint.serve.records import CHOICES
        from guardpaint.serve.start import Options, start, start_cluster
    except ImportError as error:
        raise BadConfig("serving needs more packages: pip install 'guardpaint[serve]'") from error

    if changed_policy not in (None, *CHOICES):
        raise BadConfig(f"--changed-policy {changed_policy}: must be {' or '.join(CHOICES)}")
    service = Options(
        base, guard, policy, host, port, keys, queue, batch, retain_evidence, audit_log, key_file, anchor, self_test,
        connections, address_connections, tuple(allow_host or ()),
        per_key, picture_timeout, grace, state, changed_policy,
        tuple(weak or ()), options, seam,
    )  # fmt: skip
    if ray:
        start_cluster(service, replicas, most_replicas or replicas, err)
    else:
        start(service, err)
