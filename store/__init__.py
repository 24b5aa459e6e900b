"""The store: one DuckDB file per node, written from the tapes by one process and read by any number of readers.

with Ingester(run) as ingester:           # the writer: `watch`
    ingester.tick()
with Store.open(run) as store:            # readers: analyze, dashboard
    store.query("SELECT step, max(duration_ns) AS slowest_ns FROM steps GROUP BY step ORDER BY step")
rebuild(run)                              # the store is only a copy of the tapes

Names are imported on first use: a plug-in's process needs few of them, and would take four times as long to start if
all were imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from store.database import StoreBusyError, StoreCorruptError, StoreError, StoreLockedError, is_watched
    from store.ingest.ingest import Ingester, TickResult
    from store.reader import Store
    from store.rebuilding import RebuildResult, rebuild

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
_MODULES = {
    "Ingester": "store.ingest.ingest",
    "RebuildResult": "store.rebuilding",
    "Store": "store.reader",
    "StoreBusyError": "store.database",
    "StoreCorruptError": "store.database",
    "StoreError": "store.database",
    "StoreLockedError": "store.database",
    "TickResult": "store.ingest.ingest",
    "is_watched": "store.database",
    "rebuild": "store.rebuilding",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return found
