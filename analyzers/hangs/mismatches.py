"""Calls that do not fit together: collectives of one place that differ over ranks, and messages of unequal size.

    found = mismatched_collective(oldest_calls_by_rank)     # None, or cause, ranks, differing sides and the call
    found = unequal_message(view)                           # the same of a send and its receive

Messages are counted for each group, direction and peer, so a send and its receive have the same number. Some backends
allow a receive that is larger than its send, so unequal messages explain two calls that do not end, but prove nothing
by themselves. Tags may pair messages in another order: where another message in flight between the two would fit,
nothing is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from analyzers.run.recorded_calls import Call, CallSite
from analyzers.run.snapshot import AttemptView

__all__ = ["Mismatch", "mismatched_collective", "mismatched_with_ended", "skipped_call", "unequal_message"]

_SIZED = ("all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast")
"""Operations whose input must have one size on all members; the others may legitimately be uneven."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Calls that belong together and differ. `differs`: what was called -> ranks."""

    cause: str
    ranks: tuple[int, ...]
    """The smaller side of a collective, both ends of a message; all where no side is smaller."""
    differs: Mapping[str, tuple[int, ...]]
    call: Call
    """A call of the larger side, or the send."""


Number = tuple[str, int]
"""Group of a collective, and its number there."""


def mismatched_collective(
    heads: Mapping[int, list[Call]], differing: Mapping[Number, tuple[Call, ...]] = MappingProxyType({})
) -> Mismatch | None:
    """The first collective whose members differ in operation, type or size. `heads`: calls in flight by rank.

    Where they differ, the calls of that number that have ended (`differing`, of all ranks) count for the sides too: a
    rank that raised or went on is one of the many that called the same.
    """
    together: dict[Number, list[Call]] = {}
    for calls in heads.values():
        for call in calls:
            if not call.is_p2p:
                together.setdefault((call.group, call.seq), []).append(call)
    found = _first_mismatch(together)
    if found is None or not (every := differing.get((found.call.group, found.call.seq))):
        return found
    return _first_mismatch({(found.call.group, found.call.seq): _with(together, every)}) or found


def mismatched_with_ended(view: AttemptView) -> Mismatch | None:
    """Find a mismatch among collectives in flight whose other calls have ended, or stand behind older ones."""
    by_number = sorted(view.differing.items(), key=lambda item: (item[0][1], item[0][0]))
    return _first_mismatch({number: list(calls) for number, calls in by_number})


def _with(together: Mapping[Number, list[Call]], every: tuple[Call, ...]) -> list[Call]:
    """All ranks' calls of one number, those in flight first."""
    first = together[every[0].group, every[0].seq]
    known = {call.rank for call in first}
    return [*first, *(call for call in every if call.rank not in known)]


def _first_mismatch(together: Mapping[Number, list[Call]]) -> Mismatch | None:
    checks: list[tuple[str, Callable[[Call], str]]] = [
        ("mismatch_operation", lambda call: call.op),
        ("mismatch_dtype", lambda call: call.dtype),
        ("mismatch_size", _size),
    ]
    for calls in together.values():
        for cause, kind_of in checks:
            if cause == "mismatch_size" and calls[0].op not in _SIZED:
                continue
            # A size or type that was not recorded differs from nothing.
            known = [call for call in calls if _is_known(cause, call)]
            kinds: dict[str, list[int]] = {}
            for call in known:
                kinds.setdefault(kind_of(call), []).append(call.rank)
            if len(kinds) > 1:
                most = max(len(ranks) for ranks in kinds.values())
                fewer = [rank for ranks in kinds.values() if len(ranks) < most for rank in ranks]
                named = fewer or [rank for ranks in kinds.values() for rank in ranks]
                differs = {kind: tuple(sorted(ranks)) for kind, ranks in kinds.items()}
                call = next(c for c in known if not fewer or c.rank not in named)
                return Mismatch(cause=cause, ranks=tuple(sorted(named)), differs=differs, call=call)
    return None


def _is_known(cause: str, call: Call) -> bool:
    return {"mismatch_dtype": bool(call.dtype), "mismatch_size": call.num_bytes is not None}.get(cause, True)


def skipped_call(view: AttemptView, calls: list[Call]) -> tuple[tuple[int, ...], Call] | None:
    """Ranks that are one call ahead of the others, and the call that they skipped; None if the order does not tell."""
    sides: dict[CallSite, list[Call]] = {}
    for call in calls:
        sides.setdefault(call.site, []).append(call)
    if len(sides) != 2:
        return None
    (one, other), group = sides, calls[0].group
    newest = view.newest_calls.get(group)
    due = view.next_calls.get((group, newest), frozenset()) if newest else frozenset()
    ahead = [
        (skipping, missed)
        for skipping, missed in ((one, other), (other, one))
        if missed in due and skipping not in due and skipping in view.next_calls.get((group, missed), ())
    ]
    if len(ahead) != 1:
        return None
    ((skipping, missed),) = ahead
    return tuple(sorted(call.rank for call in sides[skipping])), sides[missed][0]


def unequal_message(view: AttemptView) -> Mismatch | None:
    """The oldest such pair of the lowest ranks; None if all that are known of both sides fit."""
    pairs: dict[tuple[int, int, str], tuple[dict[int, Call], dict[int, Call]]] = {}
    for rank, state in view.ranks.items():
        for call in state.calls if not state.closed else ():
            if call.is_p2p and call.peer is not None:
                ends = (rank, call.peer) if call.op == "send" else (call.peer, rank)
                sends, recvs = pairs.setdefault((*ends, call.group), ({}, {}))
                (sends if call.op == "send" else recvs)[call.seq] = call
    found = (_unequal(sends, recvs) for _, (sends, recvs) in sorted(pairs.items()))
    return next((pair for pair in found if pair is not None), None)


def _unequal(sends: Mapping[int, Call], recvs: Mapping[int, Call]) -> Mismatch | None:
    number = min(sends.keys() & recvs.keys(), default=None)
    if number is None:
        return None
    send, recv = sends[number], recvs[number]
    checks: list[tuple[str, Callable[[Call], object], Callable[[Call], str]]] = [
        ("mismatch_size", lambda call: call.num_bytes, _size),
        ("mismatch_dtype", lambda call: call.dtype, lambda call: f"{call.op} of {call.dtype}"),
    ]
    for cause, of, described in checks:
        if not of(send) or not of(recv) or of(send) == of(recv):
            continue
        if of(send) in map(of, recvs.values()) or of(recv) in map(of, sends.values()):
            continue
        differs = {described(send): (send.rank,), described(recv): (recv.rank,)}
        ranks = tuple(sorted({send.rank, recv.rank}))  # both ends: nothing tells which of them is wrong
        return Mismatch(cause=cause, ranks=ranks, differs=differs, call=send)
    return None


def _size(call: Call) -> str:
    """Operation and size, in elements where the shape is known: "all_reduce of 2,048 elements (8,192 bytes)"."""
    if not call.shape:
        return f"{call.op} of {call.num_bytes:,} bytes"
    shape = f"{int(call.shape):,} elements" if call.shape.isdigit() else f"shape {call.shape}"
    return f"{call.op} of {shape} ({call.num_bytes:,} bytes)"
