"""`rankscope version`."""

from __future__ import annotations

import typer

from rankscope import __version__

__all__ = ["version"]


def version() -> None:
    """Print the version."""
    typer.echo(f"rankscope {__version__}")
