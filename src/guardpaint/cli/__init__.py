"""The command line, one file per group of commands. Heavy imports wait until a command runs."""

from guardpaint.cli.main import main

__all__ = ["main"]
