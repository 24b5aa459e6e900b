"""Text logs: rules as data, a scanner in bounded memory, rows for `log_events` and `steps`."""

from __future__ import annotations
