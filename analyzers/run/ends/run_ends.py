"""End of the newest launch of a run, without nodes that left while the other nodes continued.

ended = run_ends(log, last_ns=view.last_ns)         # the last one is the run's end, if there is any
"""

from __future__ import annotations

from analyzers.run.records.event_log import Event, EventLog
from probes.tape import event_kinds

__all__ = ["run_ends"]

CLOCKS_NS = 1_000_000_000
"""Maximum difference between the clocks of two nodes: a rank counts as later only beyond it."""


def run_ends(log: EventLog, *, last_ns: int) -> list[Event]:
    """Ends that launchers recorded since the newest start, in order. `last_ns`: time of the newest record of a rank.

    Node 0 hosts the rendezvous, so its end is the run's end. Another node may leave: if ranks continued after its end,
    only that node ended.
    """
    began_ns = max((event.wall_ns for event in log.of(event_kinds.RUN_STARTED)), default=0)
    ends = [event for event in log.of(event_kinds.RUN_ENDED) if event.wall_ns >= began_ns]
    return [end for end in ends if end.integer("node_rank", 0) == 0 or last_ns <= end.wall_ns + CLOCKS_NS]
