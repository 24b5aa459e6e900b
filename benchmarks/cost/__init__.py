"""Cost of the probes, `watch` and the pages for a training, by alternating blocks."""

from __future__ import annotations
