"""Lost nodes, and launchers that were killed or crashed, with the ranks that ended as a consequence.

1. `run.ends.lost_nodes` names the lost node: it fell silent and recorded no end. Deaths on other nodes are a
   consequence.
2. On a live run, a lost node explains only recorded deaths: other ranks may still wait for the node, until their
   launcher ends them or the limit for hangs is reached.
3. `watch` records that the launcher of its node is gone, and which ranks still run. If a rank had died more than
   `DeathPolicy.before_launcher_s` earlier, that death is the cause. If `watch` had reported a hang, the hang is the
   cause: people kill the launcher of a hanging job. In both cases this module reports nothing.
4. The checkpoint that these ranks saved as they ended is named. Earlier saves, after which the ranks continued, are not
   related to this launcher.
5. If a lost node had no rank in the attempt (it was a spare, or joined too late), its loss ended nothing and is
   reported only as advice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from analyzers.deaths.policy import DeathPolicy
from analyzers.deaths.rank_lost import lost_at, rank_lost
from analyzers.finding import Finding
from analyzers.run.calls.snapshot import AttemptView
from analyzers.run.ends.endings import Death, stopped_ranks
from analyzers.run.ends.lost_nodes import lost_node
from analyzers.run.records.event_log import EventLog
from analyzers.wording import counted, listed, ranks_text, sentence
from probes.tape import event_kinds

__all__ = ["launcher_lost", "node_lost", "spare_nodes_lost"]


def node_lost(
    view: AttemptView, log: EventLog, deaths: Sequence[Death], restart: str, *, is_live: bool = False
) -> Finding | None:
    """The finding of an attempt that lost a node; None if no node was lost, or if a rank had failed before."""
    lost = lost_node(view, log, deaths)
    if lost is None:
        return None
    node, ranks = lost.integer("node_rank"), tuple(sorted(lost.integers("ranks")))
    silent_s = lost.number("silent_s") or 0.0
    step = view.step
    ended = {death.rank for death in deaths} | stopped_ranks(view, log) if is_live else set(view.ranks)
    others = sorted((ended & set(view.ranks)) - set(ranks))
    summary = sentence(
        f"node {node} was lost {lost_at(view, step)}: {ranks_text(ranks)}, "
        "its launcher and its watch stopped at the same time without recording an end, and did not report again"
    )
    victims = f"{counted(len(others), 'other rank')} ended because of it"
    summary += f" {sentence(victims)}" if others else ""
    evidence = {
        "node_rank": node,
        "silent_s": round(silent_s, 1),
        "victims": others,
    }
    return rank_lost(view, "node_failed", summary, evidence, step=step, restart=restart, ranks=ranks)


def launcher_lost(
    view: AttemptView, log: EventLog, deaths: Sequence[Death], restart: str, policy: DeathPolicy = DeathPolicy()
) -> Finding | None:
    """The finding of an attempt whose launcher was lost; None if no launcher was lost, or if a rank had died before."""
    losses = [event for event in log.of(event_kinds.LAUNCHER_LOST, attempt=view.attempt) if event.integers("ranks")]
    if not losses:
        return None
    first = min(losses, key=lambda event: event.wall_ns)
    if view.reported_stall_ns is not None and view.reported_stall_ns < first.wall_ns:
        return None
    before_ns = first.wall_ns - policy.before_launcher_s * 1e9
    if any(not death.collateral and death.when_ns < before_ns for death in deaths):
        return None
    nodes = sorted({event.integer("node_rank") for event in losses})
    ranks = tuple(sorted({rank for event in losses for rank in event.integers("ranks")}))
    saves = [e for e in log.of(event_kinds.PREEMPTED, attempt=view.attempt) if e.rank in ranks]
    saved = max((e.integer("checkpoint_step") for e in saves if e.wall_ns >= before_ns), default=-1)
    step = max((own.step for rank, own in view.ranks.items() if rank in ranks and own.step is not None), default=None)
    when = lost_at(view, None) if step is None else f"in step {step}"
    where = (
        "the launcher" if nodes == [0] and view.world_size == len(ranks) else f"the launcher of node {listed(nodes)}"
    )
    if saved >= 0:
        ended = f"Its ranks saved a checkpoint at step {saved} and ended."
    else:
        ended = sentence(f"{ranks_text(ranks)} ended with it")
    evidence = {
        "launcher_pid": first.integer("pid"),
        "nodes": nodes,
        "checkpoint_step": saved if saved >= 0 else None,
    }
    summary = f"{sentence(f'{where} ended {when} without a record of its end')} {ended}"
    return rank_lost(view, "launcher_lost", summary, evidence, step=step, restart=restart, ranks=ranks)


def spare_nodes_lost(view: AttemptView, log: EventLog) -> list[Finding]:
    """Remarks on launchers that were lost with nodes on which the attempt had no rank."""
    found = []
    for event in log.of(event_kinds.LAUNCHER_LOST, attempt=view.attempt):
        if not event.integers("ranks"):
            node = event.integer("node_rank")
            summary = (
                f"A spare node left: the launcher of node {node} ended without a record of its end. No rank ran there."
            )
            evidence = {"launcher_pid": event.integer("pid"), "nodes": [node], "checkpoint_step": None}
            lost = rank_lost(view, "launcher_lost", summary, evidence, step=None, restart="")
            found.append(replace(lost, severity="info"))
    return found
