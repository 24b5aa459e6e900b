"""`rankscope version`."""

from __future__ import annotations

from rankscope import __version__
from rankscope.terminal import FormatOption, echo, wants_json

__all__ = ["version"]


def version(output: FormatOption = "text") -> None:
    """Print the version."""
    if wants_json(output):
        echo(f'{{"rankscope": "{__version__}"}}')
        return
    echo(f"rankscope {__version__}")
