"""The process that runs a user's SQL statement: `store.sql.process` starts it and talks to it.

A request is a JSON object, a response a pickle of plain values. Each request has its own limits (`store.limited`).
"""

from __future__ import annotations

import json
import os
import pickle
from contextlib import closing
from pathlib import Path
from typing import Any

from store.database import StoreError, connect_attached, lock_down
from store.limited import limits
from store.sql import console as sql_console
from store.views import make_views

__all__ = ["serve"]

GRACE_S = 1.0
"""DuckDB is interrupted at the time limit. If it has not stopped this many seconds later, the process is killed."""
THREADS = 4
DUCKDB_SHARE = 0.75
"""Share of the memory limit given to DuckDB. Some operators allocate beyond it, up to RLIMIT_AS."""
MAX_ANSWER_BYTES = 64 << 20


def serve() -> None:
    """Answer requests until the input ends."""
    limits.serve(lambda question: _answer(json.loads(question)), _warm_up)


def _warm_up() -> None:
    import duckdb

    with duckdb.connect(":memory:", config={"threads": THREADS}) as warm:  # load what the first connection needs
        warm.execute("SELECT 1")


def _answer(question: dict[str, Any]) -> bytes:
    with limits.time_limit(question["limit_s"] + GRACE_S):
        try:
            found = pickle.dumps(_run(question))
            if len(found) > MAX_ANSWER_BYTES:
                raise StoreError(
                    f"the answer is larger than {MAX_ANSWER_BYTES >> 20} MiB: select fewer rows or columns"
                )
            return found
        except MemoryError:
            return pickle.dumps({"is_out_of_memory": True})
        except StoreError as error:
            return pickle.dumps({"error": str(error)})
        finally:
            limits.limit_memory(None)


def _run(question: dict[str, Any]) -> dict[str, Any]:
    import duckdb

    memory_bytes = question["memory_bytes"]
    paths = [Path(path) for path in question["paths"]]
    with closing(
        connect_attached({f"n{i}": path for i, path in enumerate(paths)}, wait_s=question["wait_s"])
    ) as opened:
        make_views(opened, paths)
        opened.execute(f"SET threads = {min(THREADS, os.cpu_count() or 1)}")
        lock_down(opened, memory_bytes=int(memory_bytes * DUCKDB_SHARE))
        limits.limit_memory(memory_bytes)
        try:
            found = sql_console.run(opened, question["sql"], max_rows=question["max_rows"], limit_s=question["limit_s"])
        except duckdb.Error as error:  # DuckDB reports a failed allocation as one of several errors
            raise StoreError(str(error)[:2000]) from None
    return {"names": found.names, "rows": found.rows, "is_cut": found.is_cut, "took_s": found.took_s}


if __name__ == "__main__":
    serve()
