"""Base class of the configuration's sections (no unknown keys, immutable), and defaults shared with other packages."""

from __future__ import annotations

import dataclasses
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Section", "shared_default"]


def shared_default(settings: type, name: str, **limits: Any) -> Any:
    """Make a field with the default and limits of `settings` in `probes.settings`, where other packages read them."""
    one = next(field for field in dataclasses.fields(settings) if field.name == name)
    return Field(default=one.default, **one.metadata, **limits)


class Section(BaseModel):
    # strict: `steps = true` or `lr = "fast"` is reported as a mistake, not converted.
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
