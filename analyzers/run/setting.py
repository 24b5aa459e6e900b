"""One setting of a run's configuration, as its manifest holds it.

setting(manifest, "checkpoint.interval")        # 50; None if there is no such setting, or no configuration
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["number", "setting"]


def setting(manifest: Mapping[str, Any], name: str) -> Any:
    """The value at a dotted name; a manifest may be damaged or of an attached run."""
    value: Any = manifest.get("config")
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def number(manifest: Mapping[str, Any], name: str) -> float | None:
    """The same if it is a number."""
    value = setting(manifest, name)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
