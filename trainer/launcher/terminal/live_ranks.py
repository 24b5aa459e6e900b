"""The table of ranks below the progress bar of `rankscope train`, read from the store in its own thread.

    table = LiveRanks(run)
    table.begin()
    table.newest            # drawn a moment ago; None until ranks have written records
    table.end()

Reading takes some hundredths of a second of a processor; the thread rests long enough to take few percent of a core.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from probes.tape.rundir import RunDir, RunError

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["LiveRanks"]

REST_S = 2.0
MAX_REST_S = 15.0
REST_PER_READING = 50
"""Rest / processor time of a reading, within these bounds."""
MAX_LINES = 20
JOIN_S = 5.0


class LiveRanks:
    """Draws the ranks of a run again and again between `begin` and `end`."""

    def __init__(self, run: RunDir) -> None:
        self.newest: RenderableType | None = None
        self._run = run
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="live-ranks", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._stop.set()
        self._thread.join(timeout=JOIN_S)

    def _draw(self) -> None:
        rest_s = REST_S
        while not self._stop.wait(rest_s):
            begin_s = time.thread_time()
            self._read()
            rest_s = min(max(REST_S, REST_PER_READING * (time.thread_time() - begin_s)), MAX_REST_S)

    def _read(self) -> None:
        import duckdb

        from analyzers.report.terminal.ranks_now import draw_ranks
        from store import StoreError

        try:
            drawn = draw_ranks(self._run, name=os.path.relpath(self._run.path), height=MAX_LINES, now_ns=time.time_ns())
        except (RunError, StoreError, OSError, duckdb.Error):
            return  # the store is being made, or replaced, at this moment: the former table stands
        self.newest = drawn.table if drawn.is_live else None
