"""The store: one DuckDB file a node, written from the tapes by one process and read by anybody.

with Ingester(run) as ingester:           # the writer: `watch`
    ingester.tick()
with Store.open(run) as store:            # readers: analyze, dashboard
    store.query("SELECT step, max(duration_ns) AS slowest_ns FROM steps GROUP BY step ORDER BY step")
rebuild(run)                              # the store is only a copy: make it again
"""

from __future__ import annotations

from store.database import StoreBusyError, StoreCorruptError, StoreError, StoreLockedError, is_watched
from store.ingest.ingest import Ingester, TickResult
from store.reader import Store
from store.rebuild import RebuildResult, rebuild

__all__ = [
    "Ingester",
    "RebuildResult",
    "Store",
    "StoreBusyError",
    "StoreCorruptError",
    "StoreError",
    "StoreLockedError",
    "TickResult",
    "is_watched",
    "rebuild",
]
