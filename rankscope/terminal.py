"""What all commands share: the run as an argument, the console, and how a mistake of the user ends."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["RunArgument", "console", "fail"]

RunArgument = Annotated[Path, typer.Argument(help="A run's folder, e.g. runs/latest.", metavar="RUN")]


def fail(message: str) -> NoReturn:
    """End with exit code 2 and one line on stderr."""
    typer.echo(f"rankscope: {message}", err=True)
    raise typer.Exit(2)


def console() -> Console:
    """A terminal's colours and width, or plain text of a fixed width into a pipe or a file."""
    from rich.console import Console

    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=110, no_color=True)
