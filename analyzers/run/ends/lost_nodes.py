"""Nodes that were lost as a whole in an attempt: what they did is known from the leader's `watch` alone.

    lost = lost_node(view, log, find_deaths(view, log))
    lost.integer("node_rank"), lost.integers("ranks")        # of the event `node_silent`; None where none was lost

1. The leader's `watch` recorded that a node's digests stopped, and they did not come again within the attempt.
2. Nothing of that node recorded an end: no rank of it closed, failed or was seen to exit. What a process does by itself
   is recorded by its launcher or `watch`; only what ends the whole node leaves nothing.
3. No rank of another node failed before the silence began. A standstill that began well before it is not of
   the node's loss either.
4. Ranks that go on well after it show that only `watch` or its link failed there.
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
    """The event of the silence of a node that was lost; None where none was, or a rank had failed before."""
    silences = (event for event in log.of(event_kinds.NODE_SILENT, attempt=view.attempt) if event.integers("ranks"))
    lost = next((event for event in silences if not _reported_again(event, view, log, deaths)), None)
    if lost is None:
        return None
    ranks = set(lost.integers("ranks"))
    began_ns = lost.wall_ns - (lost.number("silent_s") or 0.0) * 1e9
    if any(not death.collateral and death.when_ns < began_ns and death.rank not in ranks for death in deaths):
        return None
    if view.stood_still_ns is not None and view.last_ns < began_ns - policy.watch_late_s * 1e9:
        return None
    return None if view.last_ns > lost.wall_ns + policy.watch_late_s * 1e9 else lost


def _reported_again(silence: Event, view: AttemptView, log: EventLog, deaths: Sequence[Death]) -> bool:
    """Return True if anything of the node was recorded after its silence began, or the end of any of its ranks."""
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
