"""State of a job from its flight-recorder dumps, as the snapshot by which recorded runs are judged.

world = dumped_world(dumps)
world.view             # AttemptView: calls in flight, last numbers by group and rank, members
world.rows.undumped    # ranks that left no dump
world.reference_ns     # time at which the dumps were written
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from analyzers.run.calls.snapshot import AttemptView, take_snapshot
from analyzers.run.records.event_log import EventLog
from store.readers.dumps.dump_rows import DumpRows, rows_of_dumps
from store.readers.dumps.flight_recorder import RankDump
from store.readers.memory_store import MemoryStore

__all__ = ["DumpedWorld", "dumped_world"]

MARGIN_NS = 60 * 10**9
FIRST_WALL_NS = 10**18
"""September 2001: earlier times are not wall-clock times, but for example a host's uptime."""
LONGEST_SILENCE_NS = 3 * 86_400 * 10**9
"""A file that was written more than this time after its newest record is a copy, because no rank waits longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpedWorld:
    """All dumps of a job, and the time at which they were written."""

    view: AttemptView
    rows: DumpRows
    reference_ns: int
    clock_is_known: bool


def dumped_world(dumps: Sequence[RankDump]) -> DumpedWorld:
    """Make a snapshot from these dumps, one per rank."""
    rows = rows_of_dumps(dumps)
    with MemoryStore() as store:
        for table, table_rows in rows.tables.items():
            store.add(table, table_rows)
        recorded = take_snapshot(store, 0, EventLog([]))
    # Dumps contain neither steps nor exits of processes. So each rank is assumed to be training: in its open call, or
    # else in user code.
    ranks = {rank: replace(view, step_is_open=True, finished_steps=1) for rank, view in recorded.ranks.items()}
    view = replace(
        recorded,
        ranks=ranks,
        may_have_entered=rows.assumed,
        world_size=len(ranks),  # without the ranks that have no dump: these are judged separately, and are not late
        elsewhere=frozenset(rows.undumped),
    )
    reference_ns, clock_is_known = _reference(dumps, view)
    return DumpedWorld(view=view, rows=rows, reference_ns=reference_ns, clock_is_known=clock_is_known)


def _reference(dumps: Sequence[RankDump], view: AttemptView) -> tuple[int, bool]:
    """Time at which the dumps were written, from the files' modification times, and True if it is plausible.

    A watchdog dumps when a call times out, so a much later modification time means that the file is a copy. The silence
    of the ranks is unknown for a copy, and for records without times.
    """
    last_ns = view.last_ns
    if last_ns < FIRST_WALL_NS:
        return last_ns, False
    written_ns = max((dump.modified_ns for dump in dumps), default=0)
    open_calls = [call for dump in dumps for calls in dump.calls.values() for call in calls.values() if not call.done]
    # When the first watchdog times out, all ranks write their dumps. So the shortest timeout is the one that passed.
    timeout_ns = min((call.timeout_ms for call in open_calls if call.timeout_ms), default=0) * 10**6
    longest_ns = timeout_ns + MARGIN_NS if timeout_ns else LONGEST_SILENCE_NS
    if written_ns > last_ns + longest_ns:
        return last_ns, False
    return max(written_ns, last_ns), written_ns > last_ns
