"""The folder of a run's first launch: relative paths of the configuration start there.

enter_launch_folder(config, run.manifest())     # before the data is opened, by a later launch or a replay
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from trainer.config.config import Config
from trainer.config.load import ConfigError

__all__ = ["enter_launch_folder"]


def enter_launch_folder(config: Config, manifest: dict[str, Any]) -> None:
    """Change to the folder of the first launch where the data's paths are relative. Raises ConfigError."""
    folder = manifest.get("cwd")
    if isinstance(folder, str) and any(
        not Path(path).is_absolute() for path in (*config.data.path, *config.data.validation.values())
    ):
        try:
            os.chdir(folder)
        except OSError as error:
            raise ConfigError(f"data.path is relative to {folder}: {error.strerror}") from None
