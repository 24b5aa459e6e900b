"""Answer the queries of a plug-in: those of a source, within its time and with a bounded number of rows.

answered(store, "rows", ["SELECT rank, loss FROM steps WHERE step = ?", [40]], deadline_s)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

__all__ = ["MAX_ROWS", "QueryLimitError", "answered"]

MAX_ROWS = {"rows": 1_000_000, "query": 5_000_000}
"""Rows of one answer; tuples take ten times the memory of columns."""
_BOUNDED = ("select", "with", "from")


class QueryLimitError(Exception):
    """A query was interrupted because its plug-in's time is over."""


def answered(source: Any, what: str, arguments: Sequence[Any], deadline_s: float) -> tuple[str, Any]:
    """("result", the answer) or ("error", one line). Raises QueryLimitError past the deadline (`time.monotonic()`)."""
    if source is None or what not in ("rows", "query", "has"):
        return "error", "no records can be asked for here"
    is_late = threading.Event()

    def interrupt() -> None:
        is_late.set()
        if (stop := getattr(source, "interrupt", None)) is not None:
            stop()

    timer = threading.Timer(max(0.01, deadline_s - time.monotonic()), interrupt)
    timer.daemon = True
    timer.start()
    try:
        if what == "has":
            return "result", bool(source.has(str(arguments[0])))
        sql, params = str(arguments[0]), list(arguments[1] or ())
        found = getattr(source, what)(_bounded(sql, MAX_ROWS[what]), params)
        count = len(found) if what == "rows" else max(map(len, found.values()), default=0)
        if count > MAX_ROWS[what]:
            return "error", f"more than {MAX_ROWS[what]:,} rows: aggregate in SQL"
        return "result", found
    except (Exception, KeyboardInterrupt) as error:
        if is_late.is_set():
            raise QueryLimitError from None
        if isinstance(error, KeyboardInterrupt):
            raise
        return "error", " ".join(str(error).split())[:500]
    finally:
        timer.cancel()


def _bounded(sql: str, max_rows: int) -> str:
    """The statement, with at most one row more than allowed."""
    statement = sql.strip().rstrip(";")
    if not statement.lower().startswith(_BOUNDED):
        return sql
    return f"SELECT * FROM (\n{statement}\n) LIMIT {max_rows + 1}"
