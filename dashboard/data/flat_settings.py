"""Nested settings as rows of a table.

flat({"train": {"steps": 100}})        # [("train", "steps", "100")]
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["flat"]

MAX_SETTINGS = 2_000
MAX_DEPTH = 8
MAX_VALUE_CHARS = 500


def flat(config: Any) -> list[tuple[str, str, str]]:
    """Return (section, name, value) of nested settings, in their order."""
    rows: list[tuple[str, str, str]] = []

    def walk(path: tuple[str, ...], item: Any) -> None:
        if len(rows) >= MAX_SETTINGS:
            return
        if isinstance(item, Mapping) and item and len(path) < MAX_DEPTH:
            for key, inner in item.items():
                walk((*path, str(key)[:200]), inner)
        elif path:
            text = item if isinstance(item, str) else json.dumps(item, default=str)
            rows.append((path[0] if len(path) > 1 else "", ".".join(path[1:]) or path[0], text[:MAX_VALUE_CHARS]))

    walk((), config if isinstance(config, Mapping) else {})
    return rows
