"""Culprits of a hang: wait-for reasoning over the calls in flight.

    found = find_culprits(view)
    found.cause, found.culprits, found.waiting      # "not_entered", (1,), (0, 2, 3)

1. A rank is waiting if it has a call in flight. Only the oldest call of each group counts. Later calls queue behind it.
2. A stopped process is the culprit. The exception is a process that waits in a call which a running rank has not
   reached. That process was stopped during the hang, by a debugger for example.
3. A mismatch is different calls (operation, dtype or size) under one sequence number of a group. If the call of one
   side came right after the call of the other side in earlier steps, the first side has skipped a call. Otherwise the
   smaller side is named. If both sides are equally large, the side with the unusual call is named: the call never came
   next in earlier steps. If there is no such side, both are named.
4. If all other members have completed a call on devices, the remaining device is the culprit. Some operations cannot
   complete before all members have entered. Once one member has completed such a call, all devices still in it are
   culprits.
5. Edges (`wait_graph`): a rank in a collective waits for the members that have not entered it. A receiver waits for
   a sender that has not sent, and a sender for its receiver. A rank on another node without records here is only named
   as awaited.
6. An awaited rank that is in no call is a culprit: it did not reach the call. Its open span shows its present activity,
   unless `watch` saw that its GIL is held. A rank in a later step than the awaited call has skipped the call. If the
   rank's host has enqueued calls that the device has not started, the device is stuck.
7. If all awaited ranks are in calls that all members entered, those calls do not end. There are three causes. A send
   and its receive differ in size (`unequal_message`). A rank made a different call with the same number or a later one,
   which may have ended (`mismatched_with_ended`). Or the network or the backend is stuck.
8. If no device is in a call, the devices that have not started the calls enqueued by their hosts are stuck. A rank is a
   culprit, too, if its host has not enqueued the call.
9. Otherwise the edges form a cycle, or all ranks entered and none left. A rank in a cycle has skipped a call if it is
   past the step in which it is awaited. So has a rank in the optimizer that is awaited in a gradient's call. Otherwise
   an awaited message is missing, or groups are entered in opposite order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from analyzers.hangs.mismatches import (
    Mismatch,
    mismatched_collective,
    mismatched_with_ended,
    odd_side,
    skipped_call,
    unequal_message,
)
from analyzers.hangs.wait_graph import WaitGraph, commonest_call, cycle_of, oldest_calls
from analyzers.run.calls.recorded_calls import Call
from analyzers.run.calls.snapshot import AttemptView, RankView
from store.readers.dumps.recorded_call import TOGETHER

__all__ = ["HangCause", "cause_of_mismatch", "find_culprits"]

_PHASE_CAUSES = {
    "data": "data", "checkpoint": "checkpoint", "evaluate": "evaluate", "eval": "evaluate", "compile": "compile",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class HangCause:
    """Culprits and the ranks that wait for them. `call` is the call in which most ranks wait."""

    cause: str
    culprits: tuple[int, ...]
    waiting: tuple[int, ...] = ()
    call: Call | None = None
    cycle: tuple[int, ...] = ()
    differs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """{text of the call: ranks} of a mismatch; else empty."""
    unseen: tuple[int, ...] = ()
    """Awaited ranks without records here, if no other rank is the culprit."""
    absent: tuple[int, ...] = ()
    """If the device of the culprit has not started the call: the further ranks that have not reached it."""

    @property
    def is_mismatch(self) -> bool:
        """True if ranks made different calls at the same number; gloo may then abort or raise."""
        return self.cause == "skipped" or self.cause.startswith("mismatch")

    @property
    def is_proof(self) -> bool:
        """True if this is an error on its own, however short the silence is."""
        is_message = self.call is not None and self.call.is_p2p  # no proof: some backends accept too large a receive
        return (self.is_mismatch and not is_message) or self.cause == "stopped"


def find_culprits(view: AttemptView) -> HangCause:
    """Find the ranks that the others wait for. Pure; does not decide whether the run hangs."""
    alive = {rank: state for rank, state in view.ranks.items() if not state.closed}
    oldest = {rank: oldest_calls(state.calls) for rank, state in alive.items()}
    graph = WaitGraph(view)
    heads = {rank: graph.heads(state) for rank, state in alive.items()}
    waiting = tuple(sorted(rank for rank in heads if heads[rank]))
    all_calls = [call for calls in heads.values() for call in calls]

    edges = {rank: graph.targets(calls) for rank, calls in heads.items() if calls}
    running = {rank for rank, state in alive.items() if state.state != "stopped"}
    stopped = tuple(
        rank for rank in sorted(alive.keys() - running)
        if not any(awaited in running and not heads[awaited] for awaited in edges.get(rank, ()))
    )  # fmt: skip
    if stopped:
        others_call = commonest_call([c for rank, calls in heads.items() if rank not in stopped for c in calls])
        return _cause("stopped", stopped, waiting, others_call or commonest_call(all_calls))
    # If a later call has completed, the program has probably never waited for an open one. This is no evidence unless
    # the ranks' calls differ.
    unwaited = {rank: list(state.unwaited) for rank, state in alive.items()}
    if mismatch := mismatched_collective(oldest, view.differing) or mismatched_collective(unwaited, view.differing):
        of_oldest = [c for calls in oldest.values() for c in calls]
        together = [c for c in of_oldest if (c.group, c.seq) == (mismatch.call.group, mismatch.call.seq)]
        if (skipped := skipped_call(view, together)) is not None:
            return _cause("skipped", skipped[0], waiting, skipped[1], differs=mismatch.differs)
        if len(mismatch.ranks) == len({call.rank for call in together}) and (odd := odd_side(view, together)):
            due = next(call for call in together if call.rank not in odd)
            mismatch = replace(mismatch, ranks=odd, call=due)
        return cause_of_mismatch(mismatch, waiting)

    if stuck := _left_by_others(view, heads):
        return _cause("device_stuck", tuple(sorted({call.rank for call in stuck})), waiting, stuck[0])
    awaited_ranks = {rank for targets in edges.values() for rank in targets}
    roots = tuple(sorted(rank for rank in awaited_ranks if not edges.get(rank)))
    if roots and view.elsewhere.issuperset(roots):
        awaited = commonest_call([c for c in all_calls if not graph.targets([c]).isdisjoint(roots)])
        return replace(_cause("not_seen", (), waiting, awaited), unseen=roots)
    roots = tuple(rank for rank in roots if rank not in view.elsewhere)
    for rank in roots:
        # All members entered these calls, and the rank has left the phase in which it made them. So it is probably in
        # none of them.
        if rank in alive and all(map(alive[rank].may_have_left, heads[rank])):
            heads[rank] = []
    if roots and all(heads.get(rank) for rank in roots):  # the awaited ranks are in calls that all members entered
        if mismatch := unequal_message(view) or mismatched_with_ended(view):
            return cause_of_mismatch(mismatch, waiting)
        stuck_calls = [c for rank in roots for c in heads[rank]]
        ends = {c.peer for c in stuck_calls if c.is_p2p and c.peer is not None}  # a link has two ends: name both
        return _cause("all_entered", tuple(sorted({*roots, *ends})), waiting, commonest_call(stuck_calls))
    roots = tuple(rank for rank in roots if not heads.get(rank))
    if roots:
        awaited = commonest_call([c for c in all_calls if not graph.targets([c]).isdisjoint(roots)])
        return _cause(_cause_of_absence(view, roots, awaited), roots, waiting, awaited)
    if cycle := cycle_of(edges):
        return _in_cycle(view, cycle, heads, graph, waiting)
    if waiting:
        mismatch = unequal_message(view) or mismatched_with_ended(view)
        return (
            cause_of_mismatch(mismatch, waiting)
            if mismatch
            else _cause("all_entered", waiting, (), commonest_call(all_calls))
        )
    if behind := [call for state in alive.values() for call in oldest_calls(state.enqueued)]:
        call, stuck_ranks = commonest_call(behind), tuple(sorted({call.rank for call in behind}))
        absent = tuple(rank for rank in sorted(alive) if rank not in stuck_ranks and _has_not_reached(view, rank, call))
        return replace(_cause("device_stuck", stuck_ranks, (), call), absent=absent)
    holding_gil = tuple(sorted(rank for rank, state in alive.items() if state.holds_gil))
    return _cause("gil" if holding_gil else "busy", holding_gil or tuple(sorted(alive)), (), None)


def _cause(
    cause: str,
    culprits: tuple[int, ...],
    waiting: tuple[int, ...],
    call: Call | None,
    *,
    cycle: tuple[int, ...] = (),
    differs: Mapping[str, tuple[int, ...]] | None = None,
) -> HangCause:
    others = tuple(rank for rank in waiting if rank not in culprits)
    return HangCause(cause=cause, culprits=culprits, waiting=others, call=call, cycle=cycle, differs=differs or {})


def cause_of_mismatch(found: Mismatch, waiting: tuple[int, ...] = ()) -> HangCause:
    """The cause of a hang in mismatched calls."""
    return _cause(found.cause, found.ranks, waiting, found.call, differs=found.differs)


def _in_cycle(
    view: AttemptView,
    cycle: tuple[int, ...],
    heads: Mapping[int, list[Call]],
    graph: WaitGraph,
    waiting: tuple[int, ...],
) -> HangCause:
    """The cause of ranks that wait for each other: a skipped call, a missing message, or groups in opposite order."""
    if (skipped := _skipped_in_cycle(view, cycle, heads, graph)) is not None:
        return _cause("skipped", skipped[0], waiting, skipped[1])
    members = tuple(sorted(cycle))
    messages = [c for rank in cycle for c in heads[rank] if c.is_p2p and graph.targets([c]) & set(cycle)]
    if messages:
        return _cause("p2p_unmatched", members, waiting, messages[0], cycle=cycle)
    call = commonest_call([c for calls in heads.values() for c in calls])
    return _cause("order_inversion", members, waiting, call, cycle=cycle)


def _left_by_others(view: AttemptView, heads: Mapping[int, list[Call]]) -> list[Call]:
    """Device calls that a member is still in although all others have completed them. Some operations cannot complete
    on any member before all have entered. For these it is enough that one other member has completed the call, if the
    rest are still in it."""
    found = []
    inside = {(call.group, call.seq, rank) for rank, calls in heads.items() for call in calls if not call.is_p2p}
    for rank, calls in heads.items():
        for call in (call for call in calls if call.on_device):
            if call.is_p2p:
                is_left = _has_answered(view, heads, call)
            else:
                others = {member for member in view.members.get(call.group, ()) if member != rank}
                left = {other for other in others if _has_left(view, heads, other, call)}
                still_in = {other for other in others if (call.group, call.seq, other) in inside}
                is_left = bool(left) and (left == others or (call.op in TOGETHER and left | still_in == others))
            if is_left:
                found.append(call)
    return found


def _has_left(view: AttemptView, heads: Mapping[int, list[Call]], rank: int, call: Call) -> bool:
    """Return True if a rank has entered a call and completed it."""
    is_behind = any(head.group == call.group and head.seq <= call.seq for head in heads.get(rank, ()))
    return not is_behind and view.last_seq.get((call.group, rank), -1) >= call.seq


def _has_answered(view: AttemptView, heads: Mapping[int, list[Call]], call: Call) -> bool:
    """Return True if the other end of a message has completed its part."""
    if call.peer is None:
        return False
    op = "recv" if call.op == "send" else "send"
    is_in_it = any((h.op, h.peer) == (op, call.rank) and h.seq <= call.seq for h in heads.get(call.peer, ()))
    return not is_in_it and view.last_p2p.get((call.peer, op, call.rank), -1) >= call.seq


def _is_past(state: RankView | None, awaited: Call) -> bool:
    """Return True if a rank is past the step in which others await it in a collective."""
    if state is None or state.step is None or awaited.step is None or awaited.is_p2p or awaited.on_device:
        return False
    return state.step > awaited.step


def _is_queued(view: AttemptView, rank: int, awaited: Call | None) -> bool:
    """Return True if a rank's host has enqueued the awaited call, but its device has not started it."""
    if awaited is None:
        return False
    if awaited.is_p2p:
        partner = "recv" if awaited.op == "send" else "send"
        return view.queued_p2p.get((rank, partner, awaited.rank), -1) >= awaited.seq
    return view.queued.get((awaited.group, rank), -1) >= awaited.seq


def _has_not_reached(view: AttemptView, rank: int, call: Call | None) -> bool:
    """Return True if a member of the call's group has neither entered it nor enqueued it, and is in no other call."""
    if call is None or call.is_p2p or rank not in view.members.get(call.group, ()) or view.ranks[rank].calls:
        return False
    place = call.group, rank
    return max(view.last_seq.get(place, -1), view.queued.get(place, -1)) < call.seq and place in view.last_seq


def _is_behind(state: RankView | None) -> bool:
    """Return True if a rank's host has enqueued calls that its device, which is in none, has not started."""
    return state is not None and bool(state.enqueued) and not state.calls


def _cause_of_absence(view: AttemptView, roots: tuple[int, ...], awaited: Call | None) -> str:
    """The cause by the activity of culprits that did not reach the call."""
    if awaited is not None and all(_is_past(view.ranks.get(rank), awaited) for rank in roots):
        return "skipped"
    if all(rank in view.ranks and view.ranks[rank].closed for rank in roots):
        return "finished"  # the awaited ranks have ended normally, and the others should not wait for them
    if all(_is_queued(view, rank, awaited) or _is_behind(view.ranks.get(rank)) for rank in roots):
        return "device_stuck"
    if roots and all(rank in view.ranks and view.ranks[rank].holds_gil for rank in roots):
        return "gil"  # the rank runs native code that holds the GIL; its open span does not matter
    causes = {next((_PHASE_CAUSES[p] for p in reversed(view.ranks[r].phases) if p in _PHASE_CAUSES), "")
              for r in roots if r in view.ranks}  # fmt: skip
    if len(causes) == 1 and causes != {""}:
        return causes.pop()
    return "p2p_unmatched" if awaited is not None and awaited.is_p2p else "not_entered"


def _skipped_in_cycle(
    view: AttemptView, cycle: tuple[int, ...], heads: Mapping[int, list[Call]], graph: WaitGraph
) -> tuple[tuple[int, ...], Call] | None:
    """Ranks of a cycle that are past the step in which they are awaited, or that are in the optimizer but are awaited
    in a gradient's call. Also returns the call that they missed."""
    missed: dict[int, Call] = {}
    for rank in cycle:
        for call in heads[rank]:
            for target in graph.targets([call]) & set(cycle):
                step = _step_of(view.ranks[target], heads[target])
                if step is None or call.step is None:
                    continue
                if step > call.step or (step == call.step and _is_updating(heads[target], call)):
                    missed[target] = call
    return (tuple(sorted(missed)), missed[min(missed)]) if missed else None


def _step_of(state: RankView, calls: list[Call]) -> int | None:
    """The step that a rank is in; for calls on a device the device's step, because its host runs ahead."""
    steps = [call.step for call in calls if call.on_device and call.step is not None]
    return min(steps, default=state.step)


def _is_updating(calls: list[Call], awaited: Call) -> bool:
    """Return True if a rank is in the optimizer's calls but awaited in one that precedes them in every step."""
    return awaited.phase in ("forward", "backward") and bool(calls) and all(call.phase == "optimizer" for call in calls)
