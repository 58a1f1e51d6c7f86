"""What the commands share: consoles, options, JSON output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from guardpaint.errors import GuardPaintError

EXIT_HELP = (
    "Exit codes: 0 clean or repaired (or blurred), 1 error, 2 usage, 3 at least one image blocked, "
    "4 at least one image released although flagged."
)
err = Console(stderr=True)
out = Console()

GuardOption = Annotated[
    str | None,
    typer.Option("--guard", help="Guard: a directory, hub:OWNER/NAME, or tiny (random). Default: the embedded one."),
]
PolicyOption = Annotated[Path | None, typer.Option("--policy", help="Content policy YAML.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
BASE_HELP = (
    "Base model: one that an installed package provides (mini-sd, mini-sd3 …; `guardpaint doctor` lists them), a small "
    "random one (tiny-sd, tiny-sdxl, tiny-sd3, tiny-flux), a directory, or hub:OWNER/NAME."
)


def warn(text: str) -> None:
    """A note on standard error."""
    err.print(f"note: {text}", style="yellow", soft_wrap=True)


def fail(message: str) -> NoReturn:
    raise GuardPaintError(message)


def dump(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
