"""Base of every section of the configuration: no unknown keys, immutable."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["Section"]


class Section(BaseModel):
    # strict: `steps = true` or `lr = "fast"` is reported as a mistake, not converted.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)
