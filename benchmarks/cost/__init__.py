"""What the probes, `watch` and the pages take from a training, by alternating blocks."""

from __future__ import annotations
