"""What every section of the configuration is: its keys are known, and it cannot change."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["Section"]


class Section(BaseModel):
    # strict: `steps = true` or `lr = "fast"` is a mistake to be told, not a value to be guessed.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)
