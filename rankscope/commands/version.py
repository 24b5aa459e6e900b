"""`rankscope version`."""

from __future__ import annotations

from rankscope import __version__
from rankscope.terminal import echo

__all__ = ["version"]


def version() -> None:
    """Print the version."""
    echo(f"rankscope {__version__}")
