"""The command line: every group of commands, and those that installed packages add.

Exit codes: 0 clean or repaired · 1 error · 2 usage · 3 blocked · 4 released although flagged.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated, NoReturn

import typer

from guardpaint import __version__
from guardpaint.cli import (
    audit,
    calibrate,
    compose,
    data,
    demo,
    doctor,
    evaluate,
    evaluate_labels,
    generate,
    log,
    presets,
    recipe,
    rollouts,
    serve,
    train,
)
from guardpaint.cli.common import EXIT_HELP, err
from guardpaint.errors import BadPlugin, GuardPaintError
from guardpaint.store import plugins

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its notes about optional packages are not for our users
app = typer.Typer(
    help="GuardPaint: safety for text-to-image diffusion that repairs the picture while it is being made.",
    epilog=EXIT_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command(epilog=EXIT_HELP)(generate.generate)
app.command()(audit.audit)
app.command()(audit.inspect)
app.command()(doctor.doctor)
app.command()(presets.presets)
app.command()(demo.demo)
app.command()(serve.serve)
app.command()(calibrate.calibrate)
app.command()(calibrate.calibrate_scope)
app.command()(calibrate.calibrate_waves)
app.command()(calibrate.drift)
app.command()(compose.compose)
app.command()(compose.push)
for name, group in (
    ("log", log.app),
    ("rollouts", rollouts.app),
    ("recipe", recipe.app),
    ("train", train.app),
    ("data", data.app),
    ("eval", evaluate.app),
):
    app.add_typer(group, name=name)

evaluate_labels.add_to(evaluate.app)


def add_plugins() -> None:
    """Command groups of installed packages. One that cannot be used is left out: the rest must go on working."""
    for name in plugins.registered(plugins.COMMANDS):
        try:
            app.add_typer(command_group(name), name=name)
        except GuardPaintError as error:
            err.print(f"note: {error}", style="yellow", markup=False, soft_wrap=True)


def command_group(name: str) -> typer.Typer:
    """The command group that a package registers; BadPlugin if it is none or cannot be built."""
    group = plugins.load(plugins.COMMANDS, name, f"the command {name!r}")
    try:
        typer.main.get_group(group)
    except Exception as error:
        point = plugins.registered(plugins.COMMANDS)[name]
        raise BadPlugin(
            f"the command {name!r}: the entry point {point.value} of the package `{plugins.package_of(point)}` is no "
            f"command group of typer ({type(error).__name__}: {error})"
        ) from error
    built: typer.Typer = group
    return built


def main() -> None:
    """Entry point: known errors and a full disk become one line and exit code 1."""
    try:
        add_plugins()
        app()
    except GuardPaintError as error:
        stop(str(error))
    except Exception as error:
        if not is_full_disk(error):
            raise
        stop(f"the disk is full ({error}); what was finished is kept: make room, then run the same command again")


def stop(message: str) -> NoReturn:
    """Print an error and leave with exit code 1."""
    err.print(f"error: {message}", style="red", markup=False, soft_wrap=True)
    sys.exit(1)


def is_full_disk(error: BaseException) -> bool:
    """Whether there was no room for a file; the writers of safetensors and torch have errors of their own for it."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return os.strerror(errno.ENOSPC) in str(error)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit
