"""Access to a run for the dashboard: its version, short-lived readers, cached queries, state and diagnosis.

    access = RunAccess(run, answers)
    access.version()                     # changes with new data
    access.ask(load_overview, 40)        # load_overview(store, 40), through the cache
    access.state(), access.diagnosis()

`shared_store` ingests the run's tapes and opens its store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any

from analyzers.compare.two_runs import Side, compare
from analyzers.diagnose import Diagnosis, diagnose
from analyzers.figures.course import loss_curve
from analyzers.run.live.folder_state import folder_state
from analyzers.run.live.state import RunState
from analyzers.run.policy import stall_policy
from dashboard.data.background_answers import OFTEN_REST_FACTOR, REST_FACTOR, Answer, Answers
from dashboard.data.processes.diagnosis_process import diagnose_in_process
from dashboard.data.run_summary import run_summary, worst_of
from dashboard.data.shared_store import CATCH_UP_S, SharedStore, files_version
from probes.tape.rundir import RunDir
from store import Store, is_watched
from store.published.copy_time import stored_until_ns
from store.sql import process as sql_process
from store.sql.console import ConsoleAnswer

__all__ = ["FIRST_S", "LARGE_BYTES", "RunAccess"]

LARGE_BYTES = 256 << 20
"""Store size in bytes from which pages are noticeably slow."""
SEPARATE_PROCESS_BYTES = 16 << 20
"""Store size in bytes from which a run is diagnosed in a separate process, because the analyzers would hold the GIL for
seconds.
"""
FIRST_S, AGAIN_S = 0.4, 0.1
"""Seconds that a part of a page waits for its first result, and for a newer one, before the next part is drawn."""
STATE_S = 0.6
"""Seconds that a page waits for the run's state before it says that the run is being read."""


class RunAccess:
    """Shared by all visitors of a run."""

    def __init__(self, run: RunDir, answers: Answers) -> None:
        self.run = run
        self._answers = answers
        self._store = SharedStore(run)
        self._last_state = RunState(word="")
        self._last_diagnosis: tuple[Hashable, Diagnosis] | None = None
        self._diagnosing = threading.Lock()

    @property
    def is_watched(self) -> bool:
        """True while a watch process follows the run."""
        return is_watched(self.run.stores())

    def manifest(self) -> dict[str, Any]:
        """`run.json`."""
        return self.run.manifest()

    def version(self) -> Hashable:
        """A value that changes with new data."""
        parts = files_version(self.run)
        if not self.is_watched and self._may_grow():
            return (*parts, int(time.monotonic() / CATCH_UP_S))
        return parts

    def open(self) -> AbstractContextManager[Store]:
        """Open a reader for one query. Raises StoreError."""
        return self._store.session(may_grow=self.is_watched or self._may_grow())

    def ask_sql(self, statement: str, *, max_rows: int, limit_s: float) -> ConsoleAnswer:
        """Run one read-only statement in a process with memory and time limits. Raises StoreError."""
        catch_up = self._store.is_due(may_grow=self._may_grow())
        return sql_process.ask(self.run, statement, max_rows=max_rows, limit_s=limit_s, catch_up=catch_up)

    def size_bytes(self) -> int:
        """Total size of the run's stores."""
        return sum(path.stat().st_size for path in self.run.stores() if path.exists())

    def ask(
        self, load: Callable[..., Any], *parameters: Hashable, first_s: float = FIRST_S, often: bool = False
    ) -> Answer:
        """Return `load(store, *parameters)` for the newest version of the run. `often`: refresh with shorter pauses."""

        def compute() -> Any:
            with self.open() as store:
                return load(store, *parameters)

        key = (str(self.run.path), f"{load.__module__}.{load.__qualname__}", parameters)
        rest = OFTEN_REST_FACTOR if often else REST_FACTOR
        return self._answers.get(
            key,
            self.version(),
            compute,
            patience_s=first_s,
            again_s=2 * AGAIN_S if often else AGAIN_S,
            rest_factor=rest,
        )

    def state(self, *, first_s: float = STATE_S) -> Answer:
        """Return the RunState. While the run may be alive, it is computed every second even without new records."""
        policy, watched = stall_policy(self.manifest()), self.is_watched

        def compute() -> RunState:
            with self.open() as store:
                found = folder_state(self.run, store, policy, now_ns=time.time_ns())
            self._last_state = found
            return found

        moment = int(time.monotonic()) if watched or self._may_grow() else 0
        version = (self.version(), watched, moment)
        return self._answers.get(
            ("state", str(self.run.path)), version, compute, patience_s=first_s, again_s=2 * AGAIN_S,
            rest_factor=OFTEN_REST_FACTOR,
        )  # fmt: skip

    def summary(self, answers: Answers) -> Answer:
        """Return the run's row in the table of runs (`run_summary`), cached in `answers`. Never waits."""
        policy, watched = stall_policy(self.manifest()), self.is_watched

        def compute() -> dict[str, Any]:
            with self.open() as store:
                self._last_state = folder_state(self.run, store, policy, now_ns=time.time_ns())
                return run_summary(store, self._last_state)

        key = ("summary", str(self.run.path))
        return answers.get(key, (self.version(), watched), compute, patience_s=0.0, again_s=0.0)

    def worst_finding(self, answers: Answers) -> Answer:
        """Return the worst finding of the run's diagnosis (`worst_of`), cached in `answers`. Never waits."""
        version = (self.version(), self.is_watched)
        key = ("judged", str(self.run.path))
        return answers.get(key, version, lambda: worst_of(self._diagnosed(version)), patience_s=0.0, again_s=0.0)

    def diagnosis(self, *, first_s: float = FIRST_S) -> Answer:
        """Return the Diagnosis of the whole run, as in `rankscope analyze`. A slow one is returned by a later poll."""
        watched = self.is_watched

        version = (self.version(), watched)
        key = ("diagnosis", str(self.run.path))
        # Do not wait for the diagnosis of a large run, which would not finish in time.
        patience_s = 0.0 if self.size_bytes() >= SEPARATE_PROCESS_BYTES else first_s
        return self._answers.get(key, version, lambda: self._diagnosed(version), patience_s=patience_s)

    def compared_with(self, other: RunAccess) -> Answer:
        """Return the Comparison of this run (B) with another run (A), and both loss curves."""

        def compute() -> dict[str, Any]:
            found_a, found_b = (run._diagnosed((run.version(), run.is_watched)) for run in (other, self))
            with other.open() as store_a, self.open() as store_b:
                side_a, side_b = other._side(store_a, found_a), self._side(store_b, found_b)
                found = {"comparison": compare(side_a, side_b)}
                return found | {"loss_a": loss_curve(store_a), "loss_b": loss_curve(store_b)}

        # The first read of a run may ingest new records, which changes the version in the cache key. So read it first.
        for run in (other, self):
            state = run.state(first_s=FIRST_S)
            if state.value is None:
                return state
        key = ("compare", str(self.run.path), str(other.run.path))
        return self._answers.get(key, (self.version(), other.version()), compute, patience_s=FIRST_S)

    def _side(self, store: Store, diagnosis: Diagnosis) -> Side:
        return Side(source=store, manifest=self.manifest(), diagnosis=diagnosis)

    def _diagnosed(self, version: Hashable) -> Diagnosis:
        """Diagnosis of this version of the run, computed once, and in a separate process for a large run."""
        with self._diagnosing:  # the table of runs, the Overview and a comparison may request it at the same time
            known = self._last_diagnosis
            if known is not None and known[0] == version:
                return known[1]
            now_ns = stored_until_ns(self.run) if self.is_watched else None
            if self.size_bytes() >= SEPARATE_PROCESS_BYTES:
                with self.open():  # opening ingests new records if the run has no `watch` process
                    pass
                found = diagnose_in_process(self.run, now_ns=now_ns)
            else:
                with self.open() as store:
                    found = diagnose(store, self.manifest(), now_ns=now_ns, stacks_dir=self.run.stacks)
            self._last_diagnosis = (version, found)
            return found

    def _may_grow(self) -> bool:
        """Return True if the run was live when its state was last determined. Before the first state is known, returns
        False, because that state would otherwise be computed twice.
        """
        return self._last_state.is_live
