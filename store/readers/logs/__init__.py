"""Text logs: rules as data, a scanner with bounded memory, and rows for `log_events` and `steps`."""

from __future__ import annotations
