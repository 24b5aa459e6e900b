"""Public incidents as minimal logs: whether `rankscope analyze` finds the cause that the thread settled on."""

from __future__ import annotations
