"""Files and folders that a configuration names: whether they are there, before a run's folder is.

    check_paths(config, base=Path.cwd())         # raises ConfigError

What is in them is looked at where they are opened, by each rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from trainer.config.config import Config
from trainer.config.load import ConfigError

__all__ = ["check_paths"]


def check_paths(config: Config, *, base: Path) -> None:
    """Raise ConfigError for the first path that is not there or cannot be read; relative ones begin at `base`."""
    for setting, text in _paths(config):
        path = base / Path(text).expanduser()
        if not path.exists():
            raise ConfigError(f"{setting} = {text!r}: no such file or folder")
        if not os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK):
            raise ConfigError(f"{setting} = {text!r}: cannot be read (Permission denied)")


def _paths(config: Config) -> Iterator[tuple[str, str]]:
    for text in config.data.path:
        yield "data.path", text
    for name, text in config.data.validation.items():
        yield f"data.validation.{name}", text
    if config.model.weights:
        yield "model.weights", config.model.weights
