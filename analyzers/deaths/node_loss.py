"""Nodes that were lost, with the ranks that ended because of it.

1. `run.lost_nodes` says which node was lost: it is silent, and nothing of it recorded an end.
2. Ends of other nodes' ranks are a consequence.
3. While the run lives only ranks whose end is recorded have ended of it: others may still wait for the node, and their
   launchers or a hang's limits free them.
"""

from __future__ import annotations

from collections.abc import Sequence

from analyzers.deaths.rank_lost import rank_lost
from analyzers.finding import Finding
from analyzers.run.endings import Death, stopped_ranks
from analyzers.run.event_log import EventLog
from analyzers.run.lost_nodes import lost_node
from analyzers.run.snapshot import AttemptView
from analyzers.wording import counted, ranks_text, sentence

__all__ = ["node_lost"]


def node_lost(
    view: AttemptView, log: EventLog, deaths: Sequence[Death], again: str, *, is_live: bool = False
) -> Finding | None:
    """The finding of an attempt that lost a node; None where none was lost, or a rank had failed before."""
    lost = lost_node(view, log, deaths)
    if lost is None:
        return None
    node, ranks = lost.integer("node_rank"), tuple(sorted(lost.integers("ranks")))
    silent_s = lost.number("silent_s") or 0.0
    step = view.step
    ended = {death.rank for death in deaths} | stopped_ranks(view, log) if is_live else set(view.ranks)
    others = sorted((ended & set(view.ranks)) - set(ranks))
    summary = sentence(
        f"node {node} was lost {'before the first step' if step is None else f'at step {step}'}: {ranks_text(ranks)}, "
        "its launcher and its watch stopped at once, without a record of an end, and did not report again"
    )
    victims = f"{counted(len(others), 'other rank')} ended because of it"
    summary += f" {sentence(victims)}" if others else ""
    evidence = {
        "node_rank": node,
        "silent_s": round(silent_s, 1),
        "victims": others,
    }
    return rank_lost(view, "node_failed", summary, evidence, step=step, again=again, ranks=ranks)
