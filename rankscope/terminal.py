"""Shared by all commands: the run argument, the console, and the exit on a user's error."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["RunArgument", "console", "fail"]

RunArgument = Annotated[Path, typer.Argument(help="A run's folder, e.g. runs/latest.", metavar="RUN")]


def fail(message: str) -> NoReturn:
    """Exit with code 2 and one line on stderr: what is wrong, where, and what to do."""
    typer.echo(f"rankscope: {message}", err=True)
    raise typer.Exit(2)


def console() -> Console:
    """Return a console: colours and width of the terminal, or plain text of a fixed width into a pipe or a file."""
    from rich.console import Console

    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=110, no_color=True)
