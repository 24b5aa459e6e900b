"""Cost of the probes, `watch` and the pages for a training run, measured in alternating blocks."""

from __future__ import annotations
