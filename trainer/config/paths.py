"""Check the files, folders and programs named in a configuration, before the run's folder is created.

    check_paths(config, base=Path.cwd())         # raises ConfigError

Their contents are checked when they are opened. Without this check, ranks and `watch` would fail during the run.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from trainer.config.config import Config
from trainer.config.load import ConfigError

__all__ = ["check_paths"]


def check_paths(config: Config, *, base: Path) -> None:
    """Raise ConfigError for the first unusable path; relative paths refer to `base`."""
    for setting, text in _read(config):
        path = base / Path(text).expanduser()
        if not path.exists():
            raise ConfigError(f"{setting} = {text!r}: no such file or folder")
        if not os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK):
            raise ConfigError(f"{setting} = {text!r}: cannot be read (Permission denied)")
    for setting, text in _written(config):
        folder = base / Path(text.removeprefix("file://")).expanduser()
        nearest = next(path for path in (folder, *folder.parents) if os.path.exists(path))
        if not nearest.is_dir():
            raise ConfigError(f"{setting} = {text!r}: {nearest} is not a folder")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise ConfigError(f"{setting} = {text!r}: {nearest} cannot be written (Permission denied)")
    if words := shlex.split(config.alerts.command):
        program = str(base / words[0]) if "/" in words[0] else words[0]
        if shutil.which(program) is None:
            raise ConfigError("alerts.command = (redacted): no such program, or it cannot be executed")


def _read(config: Config) -> Iterator[tuple[str, str]]:
    for text in config.data.path:
        yield "data.path", text
    for name, text in config.data.validation.items():
        yield f"data.validation.{name}", text
    if config.model.weights:
        yield "model.weights", config.model.weights
    for name in ("tls_cert", "tls_key", "token_file") if config.metrics.listen else ():
        if text := getattr(config.metrics, name):
            yield f"metrics.{name}", text


def _written(config: Config) -> Iterator[tuple[str, str]]:
    """Folders that are created, with their parents, when something is written to them."""
    if "tensorboard" in config.trackers.to and config.trackers.tensorboard_dir:
        yield "trackers.tensorboard_dir", config.trackers.tensorboard_dir
    for setting, address in (
        ("publish.address", config.publish.address),
        ("checkpoint.remote", config.checkpoint.remote),
    ):
        if address.startswith("file://"):
            yield setting, address
