"""The folder of a run's first launch, to which the configuration's relative paths refer.

enter_launch_folder(config, run.manifest())     # before the data is opened, by a later launch or a replay
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from probes.tape.typed_path import change_folder
from trainer.config.config import Config
from trainer.config.load import ConfigError

__all__ = ["enter_launch_folder"]


def enter_launch_folder(config: Config, manifest: dict[str, Any]) -> None:
    """Change to the folder of the first launch if data paths are relative. Raises ConfigError."""
    folder = manifest.get("cwd")
    if isinstance(folder, str) and any(
        not Path(path).is_absolute() for path in (*config.data.path, *config.data.validation.values())
    ):
        try:
            change_folder(folder)
        except OSError as error:
            raise ConfigError(f"data.path is relative to {folder}: {error.strerror}") from None
