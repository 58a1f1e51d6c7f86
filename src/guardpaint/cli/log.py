"""`guardpaint log …`: verify, replay, rotate and mend audit logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from guardpaint.cli.common import JsonOption, fail

File = Annotated[Path, typer.Argument(help="Audit log (JSONL).")]
KeyFile = Annotated[Path | None, typer.Option(help="Key the log is written with.")]
AnchorFile = Annotated[Path | None, typer.Option(help="Anchor file of the log.")]
app = typer.Typer(help="Verify, replay, rotate and mend audit logs.", no_args_is_help=True)


@app.command("verify")
def log_verify(
    file: Annotated[Path, typer.Argument(help="Audit log (JSONL).")],
    key_file: Annotated[Path | None, typer.Option(help="Key the log was written with.")] = None,
    anchor: Annotated[Path | None, typer.Option(help="Anchor file: detects a cut tail.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Verify the hash chain. Exits 1 and names the line if the log was edited, reordered or cut."""
    from guardpaint.loop.audit_log import read_key, verify_log

    state = verify_log(file, key=read_key(key_file), anchor=anchor)
    if as_json:
        typer.echo(json.dumps(state.to_dict()))
    elif state.ok:
        typer.echo(f"{file}: {state.records} records, chain intact")
        for note in state.notes:
            typer.echo(note)
        if not state.anchored:
            typer.echo("no anchor given: a cut tail would not be noticed")
        if not state.keyed:
            typer.echo("no key given: a rewritten chain would not be noticed")
    else:
        fail(f"{file}: {state.problems[0]}")
    raise typer.Exit(0 if state.ok else 1)


@app.command("replay")
def log_replay(
    file: Annotated[Path, typer.Argument(help="Audit log (JSONL).")],
    record: Annotated[int, typer.Option(min=0, help="Record number, from 0.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Recompute gates, utilities and winners of one record from its recorded scores."""
    from guardpaint.loop.audit_log import read_entries, replay

    rows = read_entries(file)
    if record >= len(rows) or rows[record][2]:
        fail(f"{file}: no record {record}; it has {sum(not r[2] for r in rows)}")
    if "report" not in rows[record][1]:
        fail(f"{file}: record {record} is an event, not a picture: {json.dumps(rows[record][1].get('event'))}")
    problems = replay(rows[record][1]["report"])
    tournaments = sum(len(s["tournaments"]) for s in rows[record][1]["report"]["steps"])
    if as_json:
        typer.echo(json.dumps({"record": record, "tournaments": tournaments, "problems": problems}))
    elif problems:
        for p in problems:
            typer.echo(p, err=True)
    else:
        typer.echo(f"record {record}: {tournaments} tournaments recomputed, every decision follows from its scores")
    raise typer.Exit(1 if problems else 0)


@app.command("rotate")
def log_rotate(file: File, key_file: KeyFile = None, anchor: AnchorFile = None) -> None:
    """Put a log aside and begin the next file of its chain. A running service does it by POST /v1/log/rotate."""
    from guardpaint.loop.audit_log import AuditLog, read_key

    with AuditLog(file, key=read_key(key_file), anchor=anchor) as log:
        typer.echo(f"{log.rotate()}: put aside; {file} goes on with the chain")


@app.command("begin")
def log_begin(
    file: File,
    reason: Annotated[str, typer.Option(help="Why the old chain ends; it is recorded.")],
    key_file: KeyFile = None,
    anchor: AnchorFile = None,
) -> None:
    """Start a new chain after the old log was lost. Its first record holds the old head and the reason."""
    from guardpaint.loop.audit_log import begin_chain, read_key

    begin_chain(file, key=read_key(key_file), anchor=anchor, reason=reason)
    typer.echo(f"{file}: a new chain, whose first record names the head of the old one")


@app.command("repair")
def log_repair(file: File, key_file: KeyFile = None, anchor: AnchorFile = None) -> None:
    """Mend a last line that a crash left half-written. The repair is recorded, and what is cut off is kept."""
    from guardpaint.loop.audit_log import read_key
    from guardpaint.loop.log_repair import repair_log

    kept = repair_log(file, key=read_key(key_file), anchor=anchor).kept
    what = "a whole record got its newline" if kept is None else f"the half-written line is cut off and kept in {kept}"
    typer.echo(f"{file}: {what}; the log verifies")


@app.command("sign")
def log_sign(
    file: File,
    key_file: Annotated[Path, typer.Option(help="Key the log is written with.")],
    anchor: Annotated[Path, typer.Option(help="Anchor file that an older version wrote without a signature.")],
) -> None:
    """Sign the anchor of a log that verifies."""
    from guardpaint.loop.audit_log import read_key, sign_anchor

    key = read_key(key_file)
    assert key is not None
    sign_anchor(file, key=key, anchor=anchor)
    typer.echo(f"{anchor}: signed")
