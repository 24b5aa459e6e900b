"""Read a section of a run's configuration into a frozen dataclass, which alone defines the defaults.

    recovery = read(RecoverySettings, run.manifest())
    recovery.grace_s                    # 20.0 if the run sets no valid value, as for an attached run

A manifest may be damaged, older, or written by hand: a value of a wrong type or outside its limits is replaced by the
default, and an unknown key is ignored. The trainer's configuration refuses such values instead, with defaults and
limits from the same fields (`trainer.config.section`).
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import field, fields
from functools import cache
from typing import Any, ClassVar, Literal, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

__all__ = ["SettingsSection", "amount", "read", "read_config"]

_UNFIT = object()


class SettingsSection(Protocol):
    """A frozen dataclass with defaults for all fields."""

    section: ClassVar[str]
    """Key of the section in the configuration."""


S = TypeVar("S", bound=SettingsSection)


def amount(default: float, *, least: float | None = None, above: float | None = None, most: float | None = None) -> Any:
    """A field for a number, with its limits; `above` is an exclusive lower limit."""
    limits = {"ge": least, "gt": above, "le": most}
    return field(default=default, metadata={name: limit for name, limit in limits.items() if limit is not None})


def read(cls: type[S], manifest: Mapping[str, Any]) -> S:
    """Read the section from a run's manifest."""
    return read_config(cls, manifest.get("config"))


def read_config(cls: type[S], config: object) -> S:
    """Read the section from a configuration."""
    given = config.get(cls.section) if isinstance(config, Mapping) else None
    if not isinstance(given, Mapping):
        return cls()
    hints = _hints(cls)
    found = {}
    for one in fields(cls):  # type: ignore[arg-type]
        if one.name in given:
            value = _fitted(given[one.name], hints[one.name])
            if value is not _UNFIT and _is_within(value, one.metadata):
                found[one.name] = value
    return cls(**found)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _fitted(value: object, hint: Any) -> Any:
    """Return the value if it has its field's type, converted if necessary, else `_UNFIT`."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        tried = (_fitted(value, one) for one in args if one is not type(None))
        return next((one for one in tried if one is not _UNFIT), _UNFIT)
    if origin is Literal:
        return value if isinstance(value, str) and value in args else _UNFIT
    if origin is tuple:
        items = [_fitted(item, args[0]) for item in value] if isinstance(value, (list, tuple)) else [_UNFIT]
        return _UNFIT if any(item is _UNFIT for item in items) else tuple(items)
    if hint in (int, float):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        return hint(value) if is_number else _UNFIT
    return value if isinstance(value, hint) else _UNFIT


def _is_within(value: Any, limits: Mapping[str, float]) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return True
    return (
        ("ge" not in limits or value >= limits["ge"])
        and ("gt" not in limits or value > limits["gt"])
        and ("le" not in limits or value <= limits["le"])
    )
