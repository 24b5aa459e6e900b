"""Nodes lost as a whole in an attempt, which only the leader's `watch` can report.

    lost = lost_node(view, log, find_deaths(view, log))
    lost.integer("node_rank"), lost.integers("ranks")        # an event `node_silent`; None if no node was lost

A node counts as lost if

1. the leader's `watch` recorded that the node's digests stopped (`node_silent`), and none arrived later in the attempt;
2. no end of its ranks is recorded: no rank closed its records, failed or exited. Its launcher or `watch` would have
   recorded the end of a process, unless the whole node was lost;
3. no rank of another node failed before the silence, and no standstill began well before it (after such a failure or
   standstill, the silence is a consequence);
4. no rank recorded anything well after it (in that case only the node's `watch` or its link failed).
"""

from __future__ import annotations

from collections.abc import Sequence

from analyzers.run.calls.snapshot import AttemptView
from analyzers.run.ends.endings import Death
from analyzers.run.policy import StallPolicy
from analyzers.run.records.event_log import Event, EventLog
from probes.tape import event_kinds

__all__ = ["lost_node"]


def lost_node(
    view: AttemptView, log: EventLog, deaths: Sequence[Death], policy: StallPolicy = StallPolicy()
) -> Event | None:
    """Return the event `node_silent` of a lost node; None if none was lost, or if a rank had failed before."""
    silences = (event for event in log.of(event_kinds.NODE_SILENT, attempt=view.attempt) if event.integers("ranks"))
    lost = next((event for event in silences if not _reported_again(event, view, log, deaths)), None)
    if lost is None:
        return None
    ranks = set(lost.integers("ranks"))
    began_ns = lost.wall_ns - (lost.number("silent_s") or 0.0) * 1e9
    if any(not death.collateral and death.when_ns < began_ns and death.rank not in ranks for death in deaths):
        return None
    if view.reported_stall_ns is not None and view.last_ns < began_ns - policy.watch_late_s * 1e9:
        return None
    return None if view.last_ns > lost.wall_ns + policy.watch_late_s * 1e9 else lost


def _reported_again(silence: Event, view: AttemptView, log: EventLog, deaths: Sequence[Death]) -> bool:
    """Return True if the node recorded anything after its silence began, or the end of one of its ranks is known."""
    node, ranks = silence.integer("node_rank"), set(silence.integers("ranks"))
    if any(event.integer("node_rank") == node and event.wall_ns >= silence.wall_ns
           for event in log.of(event_kinds.NODE_HEARD, attempt=view.attempt)):  # fmt: skip
        return True
    if any(death.rank in ranks and death.cause != "vanished" for death in deaths):
        return True
    if any(event.integer("exit_rank") in ranks for event in log.of(event_kinds.RANK_STOPPED, attempt=view.attempt)):
        return True
    known = [view.ranks[rank] for rank in ranks if rank in view.ranks]
    return any(rank.closed or rank.last_ns > silence.wall_ns for rank in known)
