"""Large runs, logs and fleets: seconds and memory."""

from __future__ import annotations
