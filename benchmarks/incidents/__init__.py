"""Public incidents as minimal logs, to test whether `rankscope analyze` finds the accepted cause."""

from __future__ import annotations
