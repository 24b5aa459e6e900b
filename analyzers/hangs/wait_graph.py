"""Wait-for graph of an attempt's ranks: edges from calls in flight to the ranks that have not entered them.

for wait in waits_of(view):
    wait.rank, wait.awaited, wait.call
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from analyzers.run.calls.recorded_calls import Call
from analyzers.run.calls.snapshot import AttemptView, RankView

__all__ = ["Wait", "WaitGraph", "commonest_call", "cycle_of", "oldest_calls", "waits_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """`rank` waits in `call` for `awaited`, which has not entered it."""

    rank: int
    awaited: int
    call: Call


def waits_of(view: AttemptView, limit: int = 20_000) -> list[Wait]:
    """Edges of the wait-for graph, at most `limit`, because thousands of ranks may each wait for thousands of
    others."""
    waits = WaitGraph(view)
    alive = {rank: waits.heads(state) for rank, state in view.ranks.items() if not state.closed}
    edges = (
        Wait(rank=rank, awaited=awaited, call=call)
        for rank, calls in sorted(alive.items())
        for call in calls
        for awaited in sorted(waits.targets([call]))
    )
    return list(islice(edges, limit))


class WaitGraph:
    """Finds ranks that calls wait for; members that are behind are computed once per group and number."""

    def __init__(self, view: AttemptView) -> None:
        self._view = view
        self._behind: dict[tuple[str, int], frozenset[int]] = {}

    def heads(self, state: RankView) -> list[Call]:
        """Return the oldest open call of each group that this rank still waits in.

        If all ranks have entered a call and this rank has left the call's phase, only the call's handle has not been
        waited for yet. Such a call is skipped in favour of a later one of its group. Without a later open call, it is
        returned all the same.
        """
        held = oldest_calls(
            tuple(call for call in state.calls if not state.may_have_left(call) or self.targets([call]))
        )
        keys = {_key(call) for call in held}
        return held + [call for call in oldest_calls(state.calls) if _key(call) not in keys]

    def targets(self, calls: list[Call]) -> set[int]:
        """Ranks that have not entered these calls."""
        found: set[int] = set()
        for call in calls:
            found |= self._partner(call) if call.is_p2p else self._members_behind(call.group, call.seq)
        return found

    def _members_behind(self, group: str, seq: int) -> frozenset[int]:
        if (group, seq) not in self._behind:
            view = self._view
            self._behind[group, seq] = frozenset(
                member
                for member in view.members.get(group, ())
                if view.last_seq.get((group, member), -1) < seq and view.may_have_entered.get((group, member), -1) < seq
            )
        return self._behind[group, seq]

    def _partner(self, call: Call) -> set[int]:
        partner = "recv" if call.op == "send" else "send"
        if call.peer is None or self._view.last_p2p.get((call.peer, partner, call.rank), -1) >= call.seq:
            return set()
        return {call.peer}


def oldest_calls(calls: tuple[Call, ...]) -> list[Call]:
    """The oldest call in flight of each group (for p2p: of each direction and peer)."""
    oldest: dict[Any, Call] = {}
    for call in calls:
        key = _key(call)
        if key not in oldest or call.seq < oldest[key].seq:
            oldest[key] = call
    return list(oldest.values())


def _key(call: Call) -> Any:
    return (call.op, call.peer) if call.is_p2p else call.group


def cycle_of(edges: Mapping[int, set[int]]) -> tuple[int, ...]:
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


def commonest_call(calls: list[Call]) -> Call | None:
    """The call that most ranks are in, as made by the lowest of them."""
    if not calls:
        return None
    ((key, _),) = Counter((call.group, call.seq, call.op) for call in calls).most_common(1)
    return min((c for c in calls if (c.group, c.seq, c.op) == key), key=lambda c: (c.issue_ns, c.rank))
