"""The process in which a statement that somebody typed is run: `store.sql.process` starts it and talks to it.

It reads questions from standard input, one JSON object a line, and writes each answer as eight bytes of length and a
pickle of plain values. Each question has its own limits, which the kernel enforces: RLIMIT_AS for its memory, and
SIGALRM, which ends the process, for its time.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import struct
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

from store.database import StoreError, connect_attached, lock_down
from store.sql import console as sql_console
from store.views import make_views

__all__ = ["serve"]

LATE_S = 1.0
"""DuckDB is asked to stop at the limit; a process that has not stopped so much later is ended."""
THREADS = 4
DUCKDB_SHARE = 0.75
"""Of the memory limit: what DuckDB accounts for. Some operators allocate beyond it, up to RLIMIT_AS."""
MAX_ANSWER_BYTES = 64 << 20
MAX_KEPT_BYTES = 300 << 20
"""Memory that a process may keep between two questions; one that keeps more ends."""


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer until there are no more questions."""
    import duckdb

    with duckdb.connect(":memory:", config={"threads": THREADS}) as warm:  # what the first connection loads
        warm.execute("SELECT 1")
    _write(answers, b"ready")
    for line in questions:
        _write(answers, _answer(json.loads(line)))
        if _status_bytes("VmRSS") > MAX_KEPT_BYTES:
            return


def _answer(question: dict[str, Any]) -> bytes:
    signal.setitimer(signal.ITIMER_REAL, question["limit_s"] + LATE_S)
    try:
        found = pickle.dumps(_run(question))
        if len(found) > MAX_ANSWER_BYTES:
            raise StoreError(f"the answer is larger than {MAX_ANSWER_BYTES >> 20} MiB: select fewer rows or columns")
        return found
    except MemoryError:
        return pickle.dumps({"is_out_of_memory": True})
    except StoreError as error:
        return pickle.dumps({"error": str(error)})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _limit_memory(None)


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
        _limit_memory(memory_bytes)
        try:
            found = sql_console.run(opened, question["sql"], max_rows=question["max_rows"], limit_s=question["limit_s"])
        except duckdb.Error as error:  # DuckDB wraps a failed allocation in several of its errors
            raise StoreError(str(error)[:2000]) from None
    return {"names": found.names, "rows": found.rows, "is_cut": found.is_cut, "took_s": found.took_s}


def _limit_memory(memory_bytes: int | None) -> None:
    """Let this process allocate so much beyond what it has mapped now; None: without a limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = hard if memory_bytes is None else _status_bytes("VmSize") + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _status_bytes(name: str) -> int:
    """A size of this process, from the kernel."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name + ":"))


def _write(answers: BinaryIO, blob: bytes) -> None:
    answers.write(struct.pack(">Q", len(blob)) + blob)
    answers.flush()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not mix with the answers
    serve(sys.stdin.buffer, channel)
