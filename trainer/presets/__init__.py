"""Configurations by name: `rankscope train debug`, `rankscope plan llama-8b --gpus 64`.

config_path("llama-8b")     # the TOML file next to this one
config_path("my.toml")      # the file itself: a file takes precedence over a preset
"""

from __future__ import annotations

import difflib
from pathlib import Path

from trainer.config.load import ConfigError

__all__ = ["config_path", "preset_names"]


_EXAMPLES = Path(__file__).parents[2] / "examples"
"""Folder of the demo's configuration in a checkout; in a wheel the file is next to this module."""


def preset_names() -> list[str]:
    return sorted(_presets())


def _presets() -> dict[str, Path]:
    """The file of each preset."""
    found = [*Path(__file__).parent.glob("*.toml"), _EXAMPLES / "gpt-demo.toml"]
    return {path.stem: path for path in found if path.is_file()}


def config_path(name: str | Path) -> Path:
    """Return the file of this name. If it does not exist, return the preset's file. Raises ConfigError if there is
    neither."""
    path = Path(name)
    if str(name) in _presets() and not path.exists():
        return _presets()[str(name)]
    if not path.exists():
        near = difflib.get_close_matches(path.stem, preset_names(), n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise ConfigError(f"{name}: no such file or preset{hint} Presets: {', '.join(preset_names())}.")
    return path
