"""List a folder of checkpoints. An unreadable folder is an error, not an empty list.

    checkpoint_steps(run.checkpoints)       # [50]
    subfolders(run.checkpoints)             # ["step-00000050", "step-00000100.condemned"]

`Path.glob` treats an unreadable folder as empty, so that the run would start over from step 1.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["STEP_NAME", "checkpoint_steps", "subfolders"]

STEP_NAME = re.compile(r"step-(\d{8,18})")


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of the finished checkpoints in a folder, oldest first. Raises OSError if the folder cannot be read now."""
    return sorted(int(match[1]) for name in subfolders(folder) if (match := STEP_NAME.fullmatch(name)))


def subfolders(folder: Path) -> list[str]:
    """Sorted names of the subfolders; empty if `folder` does not exist. Raises OSError if it cannot be read now."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []
