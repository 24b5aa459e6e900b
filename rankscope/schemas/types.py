"""JSON Schemas of dataclasses and plain values, as `dataclasses.asdict` and `json` write them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

__all__ = ["INTEGER", "NUMBER", "STRING", "any_of", "array", "by_name", "obj", "of_type", "or_null"]

STRING: dict[str, Any] = {"type": "string"}
INTEGER: dict[str, Any] = {"type": "integer"}
NUMBER: dict[str, Any] = {"type": "number"}
_PLAIN: dict[object, dict[str, Any]] = {
    str: STRING, int: INTEGER, float: NUMBER, bool: {"type": "boolean"}, NoneType: {"type": "null"}, Any: {},
}  # fmt: skip


def obj(**properties: dict[str, Any]) -> dict[str, Any]:
    """Schema of an object that has all of these keys, and may have more."""
    return {"type": "object", "required": list(properties), "properties": properties}


def array(items: dict[str, Any]) -> dict[str, Any]:
    """Schema of an array of items of one type."""
    return {"type": "array", "items": items}


def by_name(values: dict[str, Any], description: str) -> dict[str, Any]:
    """Schema of an object with arbitrary names as keys."""
    return {"type": "object", "additionalProperties": values, "description": description}


def or_null(found: dict[str, Any], description: str = "") -> dict[str, Any]:
    """Allow null in addition to the given schema."""
    described = {"description": description} if description else {}
    if isinstance(found.get("type"), str) and found.keys() <= {"type"}:
        return {"type": [found["type"], "null"]} | described
    return any_of(found, {"type": "null"}) | described


def any_of(*found: dict[str, Any]) -> dict[str, Any]:
    """Schema for one of several alternatives."""
    return {"anyOf": [*found]}


def of_type(kind: Any) -> dict[str, Any]:
    """Schema of a dataclass, or of the type of a field. Raises TypeError for any other type."""
    if kind in _PLAIN:
        return dict(_PLAIN[kind])
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return obj(**{field.name: of_type(hints[field.name]) for field in dataclasses.fields(kind)})
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, UnionType):
        others = [of_type(one) for one in inner if one is not NoneType]
        found = others[0] if len(others) == 1 else any_of(*others)
        return or_null(found) if NoneType in inner else found
    if origin is tuple:
        return array(of_type(inner[0]) if len(set(inner) - {...}) == 1 else {})
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": of_type(inner[1])}
    raise TypeError(f"{kind}: no JSON")
