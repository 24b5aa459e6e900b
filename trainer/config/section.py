"""Base of every section of the configuration: no unknown keys, immutable; defaults that other packages read, too."""

from __future__ import annotations

import dataclasses
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Section", "taken"]


def taken(settings: type, name: str, **limits: Any) -> Any:
    """A field with the default and the limits that it has in `probes.settings`, where other packages read it."""
    one = next(field for field in dataclasses.fields(settings) if field.name == name)
    return Field(default=one.default, **one.metadata, **limits)


class Section(BaseModel):
    # strict: `steps = true` or `lr = "fast"` is reported as a mistake, not converted.
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
