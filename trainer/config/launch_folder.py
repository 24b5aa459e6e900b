"""The folder of a run's first launch, to which the configuration's relative paths refer.

enter_launch_folder(config, run.manifest())     # before the data is opened, by a later launch or a replay
as_typed(run.path)                              # "runs/demo-1", from the folder in which this command was started
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from trainer.config.config import Config
from trainer.config.load import ConfigError

__all__ = ["as_typed", "enter_launch_folder"]

_started_in: list[Path] = []
"""The folder in which this process was started, if the process has changed to another folder since."""


def enter_launch_folder(config: Config, manifest: dict[str, Any]) -> None:
    """Change to the folder of the first launch if data paths are relative. Raises ConfigError."""
    folder = manifest.get("cwd")
    if isinstance(folder, str) and any(
        not Path(path).is_absolute() for path in (*config.data.path, *config.data.validation.values())
    ):
        try:
            before = Path.cwd()
            os.chdir(folder)
            _started_in.append(before)
        except OSError as error:
            raise ConfigError(f"data.path is relative to {folder}: {error.strerror}") from None


def as_typed(path: Path) -> str:
    """A path as the user would type it in the folder in which this command was started."""
    try:
        return str(path.relative_to(_started_in[0] if _started_in else Path.cwd()))
    except (ValueError, OSError):
        return str(path)
