"""Who waits for whom, and who is to blame: wait-for reasoning over the calls that were in flight.

    blame = find_culprits(view)
    blame.cause, blame.culprits, blame.waiting      # "not_entered", (1,), (0, 2, 3)

1. A rank is waiting if it has a call in flight. Only the oldest of each group counts: the others queue behind it.
2. A stopped process is the culprit wherever it is.
3. The same (group, number) with another operation, dtype or size on different ranks is a mismatch; the smaller side is
   named (both, if they are equally many). If the group's order in former steps says that the other
   side's call was due and this side's comes right after it, then this side has left one out.
4. Edges: who is in a collective waits for the members that have not entered it; who receives waits for the sender
   that has not sent, and the reverse.
5. A rank that is waited for and is in no call is a culprit: it never came. Its open span says what it does instead, or
   `watch` saw that its interpreter is locked.
   If all who are waited for are in calls that everybody entered, it is those calls that do not end: because a send and
   its receive do not fit, where they do not (`unequal_messages`).
6. Without such a rank the edges hold a cycle, or everybody entered and nobody left. In a cycle, a rank that is awaited
   in a step that it has left behind, or in a gradient's call while it is in the optimizer's, has left a call out; where
   a message is awaited, that one is missing; else groups are taken in opposite order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from analyzers.hangs.message_sizes import unequal_message
from analyzers.run.snapshot import AttemptView, Call

__all__ = ["Blame", "Wait", "find_culprits", "waits_of"]

_SIZED = ("all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast")
"""Operations whose input must have one size on all members; the others may legitimately be uneven."""
_PHASE_CAUSES = {"data": "data", "checkpoint": "checkpoint", "evaluate": "evaluate", "eval": "evaluate"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """Culprits apart from those who wait. `call` is the call that the most ranks wait in."""

    cause: str
    culprits: tuple[int, ...]
    waiting: tuple[int, ...] = ()
    call: Call | None = None
    cycle: tuple[int, ...] = ()
    differs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """With a mismatch: what was called -> ranks."""

    @property
    def is_mismatch(self) -> bool:
        """Whether ranks met in one place with different calls; gloo may abort on it, or raise."""
        return self.cause == "skipped" or self.cause.startswith("mismatch")

    @property
    def is_proof(self) -> bool:
        """Whether it is wrong by itself, however short the silence was."""
        is_message = self.call is not None and self.call.is_p2p  # some backends allow a receive that is too large
        return (self.is_mismatch and not is_message) or self.cause == "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """`rank` waits in `call` for `awaited`, which has not come."""

    rank: int
    awaited: int
    call: Call


def waits_of(view: AttemptView, limit: int = 20_000) -> list[Wait]:
    """The edges of the wait-for graph, for whoever draws it; of thousands of ranks that wait for thousands, some."""
    waits = _Waits(view)
    alive = {rank: _heads(state.calls) for rank, state in view.ranks.items() if not state.closed}
    edges = (
        Wait(rank=rank, awaited=awaited, call=call)
        for rank, calls in sorted(alive.items())
        for call in calls
        for awaited in sorted(waits.targets([call]))
    )
    return list(islice(edges, limit))


def find_culprits(view: AttemptView) -> Blame:
    """Blame ranks for a standstill. Pure; says nothing of whether there is one."""
    alive = {rank: state for rank, state in view.ranks.items() if not state.closed}
    heads = {rank: _heads(state.calls) for rank, state in alive.items()}
    waiting = tuple(sorted(rank for rank in heads if heads[rank]))
    call = _commonest([call for calls in heads.values() for call in calls])

    stopped = tuple(sorted(rank for rank, state in alive.items() if state.state == "stopped"))
    if stopped:
        return Blame(
            cause="stopped", culprits=stopped, waiting=_without(waiting, stopped), call=_not_of(call, stopped, heads)
        )
    # A call that is open although a later one is done may be one that nobody waits for: unless its sides differ.
    mismatch = _mismatch(heads) or _mismatch({rank: list(state.unwaited) for rank, state in alive.items()})
    if mismatch is not None:
        cause, culprits, differs, first = mismatch
        ahead = _ahead(
            view, [c for calls in heads.values() for c in calls if (c.group, c.seq) == (first.group, first.seq)]
        )
        if ahead is not None:
            cause, (culprits, first) = "skipped", ahead
        return Blame(cause=cause, culprits=culprits, waiting=_without(waiting, culprits), call=first, differs=differs)

    waits = _Waits(view)
    edges = {rank: waits.targets(calls) for rank, calls in heads.items() if calls}
    missed = {rank for targets in edges.values() for rank in targets}
    roots = tuple(sorted(rank for rank in missed if not edges.get(rank)))
    if roots and all(heads.get(rank) for rank in roots):  # they did come: to a call that all whom we know of entered
        inside = _commonest([call for rank in roots for call in heads[rank]])
        return _unequal(view, waiting) or Blame(
            cause="all_entered", culprits=roots, waiting=_without(waiting, roots), call=inside
        )
    roots = tuple(rank for rank in roots if not heads.get(rank))
    if roots:
        awaited = _commonest([c for calls in heads.values() for c in calls if not waits.targets([c]).isdisjoint(roots)])
        return Blame(
            cause=_instead(view, roots, awaited), culprits=roots, waiting=_without(waiting, roots), call=awaited
        )
    cycle = _cycle(edges)
    if cycle and (gone := _past(view, cycle, heads, waits)) is not None:
        culprits, awaited = gone
        return Blame(cause="skipped", culprits=culprits, waiting=_without(waiting, culprits), call=awaited)
    messages = [c for rank in cycle for c in heads[rank] if c.is_p2p and waits.targets([c]) & set(cycle)]
    if messages:
        waiting = _without(waiting, cycle)
        return Blame(
            cause="p2p_unmatched", culprits=tuple(sorted(cycle)), waiting=waiting, call=messages[0], cycle=cycle
        )
    if cycle:
        return Blame(
            cause="order_inversion",
            culprits=tuple(sorted(cycle)),
            waiting=_without(waiting, cycle),
            call=call,
            cycle=cycle,
        )
    if waiting:
        return _unequal(view, waiting) or Blame(cause="all_entered", culprits=waiting, waiting=(), call=call)
    asleep = tuple(sorted(rank for rank, state in alive.items() if state.holds_gil))
    return Blame(cause="gil" if asleep else "busy", culprits=asleep or tuple(sorted(alive)), waiting=(), call=None)


def _unequal(view: AttemptView, waiting: tuple[int, ...]) -> Blame | None:
    """Blames both ends of a message that does not fit."""
    found = unequal_message(view)
    if found is None:
        return None
    return Blame(
        cause=found.cause,
        culprits=found.ranks,
        waiting=_without(waiting, found.ranks),
        call=found.send,
        differs=found.differs,
    )


def _heads(calls: tuple[Call, ...]) -> list[Call]:
    """The oldest call in flight of each group (of each direction and peer for p2p)."""
    oldest: dict[Any, Call] = {}
    for call in calls:
        key = (call.op, call.peer) if call.is_p2p else call.group
        if key not in oldest or call.seq < oldest[key].seq:
            oldest[key] = call
    return list(oldest.values())


class _Waits:
    """Whom a call waits for; who is behind in a group is worked out once for all who wait there."""

    def __init__(self, view: AttemptView) -> None:
        self._view = view
        self._behind: dict[tuple[str, int], frozenset[int]] = {}

    def targets(self, calls: list[Call]) -> set[int]:
        found: set[int] = set()
        for call in calls:
            found |= self._partner(call) if call.is_p2p else self._members_behind(call.group, call.seq)
        return found

    def _members_behind(self, group: str, seq: int) -> frozenset[int]:
        if (group, seq) not in self._behind:
            last_seq, members = self._view.last_seq, self._view.members.get(group, ())
            self._behind[group, seq] = frozenset(m for m in members if last_seq.get((group, m), -1) < seq)
        return self._behind[group, seq]

    def _partner(self, call: Call) -> set[int]:
        partner = "recv" if call.op == "send" else "send"
        if call.peer is None or self._view.last_p2p.get((call.peer, partner, call.rank), -1) >= call.seq:
            return set()
        return {call.peer}


def _mismatch(heads: Mapping[int, list[Call]]) -> tuple[str, tuple[int, ...], dict[str, tuple[int, ...]], Call] | None:
    together: dict[tuple[str, int], list[Call]] = {}
    for calls in heads.values():
        for call in calls:
            if not call.is_p2p:
                together.setdefault((call.group, call.seq), []).append(call)
    checks: list[tuple[str, Callable[[Call], str]]] = [
        ("mismatch_operation", lambda call: call.op),
        ("mismatch_dtype", lambda call: call.dtype),
        ("mismatch_size", lambda call: f"{call.op} of {call.shape or call.num_bytes} ({call.num_bytes} bytes)"),
    ]
    for calls in together.values():
        for cause, kind_of in checks:
            if cause == "mismatch_size" and calls[0].op not in _SIZED:
                continue
            kinds: dict[str, list[int]] = {}
            for call in calls:
                kinds.setdefault(kind_of(call), []).append(call.rank)
            if len(kinds) > 1:
                most = max(len(ranks) for ranks in kinds.values())
                fewer = [rank for ranks in kinds.values() if len(ranks) < most for rank in ranks]
                named = fewer or [rank for ranks in kinds.values() for rank in ranks]
                differs = {kind: tuple(sorted(ranks)) for kind, ranks in kinds.items()}
                return (
                    cause,
                    tuple(sorted(named)),
                    differs,
                    next(c for c in calls if fewer == [] or c.rank not in named),
                )
    return None


def _instead(view: AttemptView, roots: tuple[int, ...], awaited: Call | None) -> str:
    """The cause, from what the culprits do instead of what they are waited for."""
    if all(rank in view.ranks and view.ranks[rank].closed for rank in roots):
        return "finished"  # it said so itself: nobody is to wait for it any more
    if roots and all(rank in view.ranks and view.ranks[rank].holds_gil for rank in roots):
        return "gil"  # whatever it was doing, it is not Python that does it
    causes = {next((_PHASE_CAUSES[p] for p in reversed(view.ranks[r].phases) if p in _PHASE_CAUSES), "")
              for r in roots if r in view.ranks}  # fmt: skip
    if len(causes) == 1 and causes != {""}:
        return causes.pop()
    return "p2p_unmatched" if awaited is not None and awaited.is_p2p else "not_entered"


def _ahead(view: AttemptView, calls: list[Call]) -> tuple[tuple[int, ...], Call] | None:
    """The ranks that are one call ahead of the others, and the call that they left out."""
    sides: dict[tuple[str, str], list[Call]] = {}
    for call in calls:
        sides.setdefault((call.op, call.caller), []).append(call)
    if len(sides) != 2:
        return None
    (one, other), group = sides, calls[0].group
    due = view.next_calls.get((group, *view.newest_calls.get(group, ("", ""))), frozenset())
    ahead = [
        (skipping, missed)
        for skipping, missed in ((one, other), (other, one))
        if missed in due and skipping not in due and skipping in view.next_calls.get((group, *missed), ())
    ]
    if len(ahead) != 1:
        return None
    ((skipping, missed),) = ahead
    return tuple(sorted(call.rank for call in sides[skipping])), sides[missed][0]


def _past(
    view: AttemptView, cycle: tuple[int, ...], heads: Mapping[int, list[Call]], waits: _Waits
) -> tuple[tuple[int, ...], Call] | None:
    """The ranks of a cycle that are awaited in a call of a step, or of its gradients, which they have left behind."""
    missed: dict[int, Call] = {}
    for rank in cycle:
        for call in heads[rank]:
            for target in waits.targets([call]) & set(cycle):
                step = view.ranks[target].step
                if step is None or call.step is None:
                    continue
                gone = step > call.step or (step == call.step and _is_updating(heads[target], call))
                if gone:
                    missed[target] = call
    return (tuple(sorted(missed)), missed[min(missed)]) if missed else None


def _is_updating(own: list[Call], awaited: Call) -> bool:
    """Whether a rank is in the optimizer's calls, and is awaited in one that comes before them in every step."""
    return awaited.phase in ("forward", "backward") and bool(own) and all(call.phase == "optimizer" for call in own)


def _cycle(edges: Mapping[int, set[int]]) -> tuple[int, ...]:
    """One cycle of the wait-for graph, from its smallest rank; empty if there is none."""
    finished: set[int] = set()
    for start in sorted(edges):
        path: list[int] = []
        on_path: dict[int, int] = {}
        stack = [(start, iter(sorted(edges[start])))] if start not in finished else []
        if stack:
            on_path[start] = 0
            path.append(start)
        while stack:
            rank, targets = stack[-1]
            target = next(targets, None)
            if target is None:
                stack.pop()
                path.pop()
                del on_path[rank]
                finished.add(rank)
            elif target in on_path:
                cycle = path[on_path[target] :]
                smallest = cycle.index(min(cycle))
                return tuple(cycle[smallest:] + cycle[:smallest])
            elif target in edges and target not in finished:
                on_path[target] = len(path)
                path.append(target)
                stack.append((target, iter(sorted(edges[target]))))
    return ()


def _commonest(calls: list[Call]) -> Call | None:
    if not calls:
        return None
    ((key, _),) = Counter((call.group, call.seq, call.op) for call in calls).most_common(1)
    return min((c for c in calls if (c.group, c.seq, c.op) == key), key=lambda c: (c.issue_ns, c.rank))


def _not_of(call: Call | None, culprits: tuple[int, ...], heads: Mapping[int, list[Call]]) -> Call | None:
    """The call that the others wait in, if any does."""
    return _commonest([c for rank, calls in heads.items() if rank not in culprits for c in calls]) or call


def _without(ranks: tuple[int, ...], culprits: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(rank for rank in ranks if rank not in culprits)
