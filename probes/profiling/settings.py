"""Section `profiler` of a run's configuration, as the recorder of a rank reads it.

settings = ProfilerSettings.of({"profiler": {"interval": 100, "ranks": [0, 3]}})
settings.is_scheduled(3, 200)            # True
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["MAX_STEPS", "ProfilerSettings"]

MAX_STEPS = 100
"""Steps of one capture at most: a trace of more is too large to open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerSettings:
    """The meaning of each field is in `docs/configuration.md`."""

    interval: int = 0
    active_steps: int = 3
    ranks: tuple[int, ...] = (0,)
    on_request: bool = True
    ranges: bool = False
    record_shapes: bool = False
    with_stack: bool = False
    memory_history: int = 0
    budget_mb: float = 256.0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ProfilerSettings:
        """From a configuration, whose values may be of any type: one that does not fit has the default."""
        section = config.get("profiler")
        given: Mapping[str, Any] = section if isinstance(section, Mapping) else {}
        found: dict[str, Any] = {}
        for field in fields(cls):
            value, default = given.get(field.name), field.default
            if field.name == "ranks":
                if isinstance(value, (list, tuple)) and all(isinstance(rank, int) for rank in value):
                    found["ranks"] = tuple(value)
            elif isinstance(default, bool):
                if isinstance(value, bool):
                    found[field.name] = value
            elif isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0:
                found[field.name] = int(value) if isinstance(default, int) else float(value)
        return cls(**found)

    def is_scheduled(self, rank: int, step: int) -> bool:
        """Return True if a capture of this rank begins with this step. No rank given: all."""
        return self.interval > 0 and step % self.interval == 0 and (not self.ranks or rank in self.ranks)
