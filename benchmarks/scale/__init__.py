"""Time and memory for large runs, logs and fleets."""

from __future__ import annotations
