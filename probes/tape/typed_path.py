"""Paths and commands as a user would type them in the folder in which the program was started.

as_typed(run.path)              # "runs/demo-1"
analyze_command(run.path)       # "rankscope analyze runs/demo-1"
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

__all__ = ["analyze_command", "as_typed", "change_folder"]

_started_in: list[Path] = []
"""The folder in which this process was started, if the process has changed to another folder since."""


def change_folder(folder: str) -> None:
    """Change to another folder; paths are still shown as in the present one. Raises OSError."""
    before = Path.cwd()
    os.chdir(folder)
    _started_in.append(before)


def as_typed(path: Path) -> str:
    """The path, relative to the folder in which this process was started if it lies in that folder."""
    try:
        return str(path.relative_to(_started_in[0] if _started_in else Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def analyze_command(run: Path) -> str:
    """The command that shows the verdict, to copy into a shell."""
    return f"rankscope analyze {shlex.quote(as_typed(run))}"
