"""Configurations by name: `rankscope train debug`, `rankscope plan llama-8b --gpus 64`.

config_path("llama-8b")     # the TOML file beside this one
config_path("my.toml")      # the file itself: a file of one's own comes first
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["config_path", "preset_names"]


def preset_names() -> list[str]:
    return sorted(path.stem for path in Path(__file__).parent.glob("*.toml"))


def config_path(name: str | Path) -> Path:
    """A file if there is one of this name, else the preset, else the name: the reader reports that it is missing."""
    path = Path(name)
    if str(name) in preset_names() and not path.exists():
        return Path(__file__).with_name(f"{name}.toml")
    return path
