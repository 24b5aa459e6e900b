"""Mismatched calls: collectives with the same number that differ over ranks, and messages of unequal size.

    found = mismatched_collective(oldest_calls_by_rank)     # None, or cause, ranks, differing sides and the call
    found = compare_calls(calls_of_one_number)              # from dumps, execution traces or log lines, too
    found = unequal_message(view)                           # the same for a send and its receive

Messages are counted for each group, direction and peer, so a send and its receive have the same number. Some backends
allow a receive that is larger than its send, so unequal messages explain two calls that do not end, but prove nothing
by themselves. Tags may pair messages in another order: if another message in flight between the two ranks would match,
nothing is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from analyzers.run.calls.recorded_calls import Call, CallSite
from analyzers.run.calls.snapshot import AttemptView
from store.readers.dumps.recorded_call import common_op

__all__ = [
    "Mismatch",
    "compare_calls",
    "is_sized",
    "mismatched_collective",
    "mismatched_with_ended",
    "odd_side",
    "skipped_call",
    "smaller_side",
    "unequal_message",
]

_SIZED = ("all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Calls that belong together but differ. `differs`: {text of the call: ranks}."""

    cause: str
    ranks: tuple[int, ...]
    """The smaller side of a collective, or both ends of a message; all ranks if no side is smaller."""
    differs: Mapping[str, tuple[int, ...]]
    call: Call
    """A call of the larger side, or the send."""


Number = tuple[str, int]
"""Group of a collective, and its number there."""


def mismatched_collective(
    heads: Mapping[int, list[Call]], differing: Mapping[Number, tuple[Call, ...]] = MappingProxyType({})
) -> Mismatch | None:
    """The first collective in which members differ in operation, type or size. `heads`: calls in flight by rank.

    If they differ, the majority is taken over all calls of that number, with the calls that have ended (`differing`: of
    all ranks), because a rank that raised or continued has made one of the calls too.
    """
    together: dict[Number, list[Call]] = {}
    for calls in heads.values():
        for call in calls:
            if not call.is_p2p:
                together.setdefault((call.group, call.seq), []).append(call)
    found = _first_mismatch(together)
    if found is None or not (every := differing.get((found.call.group, found.call.seq))):
        return found
    return _first_mismatch({(found.call.group, found.call.seq): _with_ended(together, every)}) or found


def mismatched_with_ended(view: AttemptView) -> Mismatch | None:
    """Find a mismatch between a collective in flight and calls of other ranks that have ended or are queued."""
    by_number = sorted(view.differing.items(), key=lambda item: (item[0][1], item[0][0]))
    return _first_mismatch({number: list(calls) for number, calls in by_number})


def _with_ended(together: Mapping[Number, list[Call]], every: tuple[Call, ...]) -> list[Call]:
    """All ranks' calls of one number, those in flight first."""
    first = together[every[0].group, every[0].seq]
    known = {call.rank for call in first}
    return [*first, *(call for call in every if call.rank not in known)]


def _first_mismatch(together: Mapping[Number, list[Call]]) -> Mismatch | None:
    return next((found for calls in together.values() if (found := compare_calls(calls)) is not None), None)


def compare_calls(calls: Sequence[Call], *, sized: bool | None = None) -> Mismatch | None:
    """Compare the calls of ranks under one number of a group, from any source; None if all match.

    `sized`: whether the operation must have the same size on all members; None: decide by the operation's name.
    """
    sized = is_sized(calls[0].op) if sized is None else sized
    # Unrecorded operations, types and sizes match everything.
    with_size = [call for call in calls if call.num_bytes is not None] or [call for call in calls if call.shape]
    checks: list[tuple[str, Sequence[Call], Callable[[Call], str]]] = [
        ("mismatch_operation", [call for call in calls if call.op], lambda call: call.op),
        ("mismatch_dtype", [call for call in calls if call.dtype], lambda call: call.dtype),
        ("mismatch_size", with_size if sized else (), _size),
    ]
    for cause, known, kind_of in checks:
        kinds = {call.rank: kind_of(call) for call in known}
        if len(set(kinds.values())) > 1:
            named = smaller_side(kinds)
            differs: dict[str, list[int]] = {}
            for rank, kind in kinds.items():
                differs.setdefault(kind, []).append(rank)
            return Mismatch(
                cause=cause,
                ranks=named,
                differs={kind: tuple(sorted(ranks)) for kind, ranks in differs.items()},
                call=next((call for call in known if call.rank not in named), known[0]),
            )
    return None


def smaller_side(values: Mapping[int, object]) -> tuple[int, ...]:
    """The ranks that differ from the majority; all ranks if there is no majority."""
    counts = Counter(values.values())
    most = max(counts.values(), default=0)
    fewer = tuple(sorted(rank for rank, value in values.items() if counts[value] < most))
    return fewer or tuple(sorted(values))


def is_sized(op: str) -> bool:
    """Return True if an operation's input must have the same size on all members."""
    return common_op(op) in _SIZED


def skipped_call(view: AttemptView, calls: list[Call]) -> tuple[tuple[int, ...], Call] | None:
    """Ranks that are one call ahead of the others, and the call that they skipped; None if the order is unclear."""
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


def odd_side(view: AttemptView, calls: Sequence[Call]) -> tuple[int, ...]:
    """Ranks that made a call which never came next in earlier steps, while the calls of all others did; () if the order
    is unclear."""
    if any(call.step is None for call in calls):  # the calls are from a dump, too few to show the order in a step
        return ()
    group = calls[0].group
    newest = view.newest_calls.get(group)
    due = view.next_calls.get((group, newest), frozenset()) if newest else frozenset()
    odd = tuple(sorted({call.rank for call in calls if call.site not in due}))
    return odd if len(odd) < len({call.rank for call in calls}) else ()


def unequal_message(view: AttemptView) -> Mismatch | None:
    """A send and its receive, both in flight, that differ in size or dtype; None if there are none.

    For each pair of ranks and group, only the oldest message with both calls in flight is compared; lowest ranks first.
    """
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
    for cause, value_of, described in checks:
        sent, received = value_of(send), value_of(recv)
        if not sent or not received or sent == received:
            continue
        if sent in map(value_of, recvs.values()) or received in map(value_of, sends.values()):
            continue  # a tag may pair them with another message
        differs = {described(send): (send.rank,), described(recv): (recv.rank,)}
        ranks = tuple(sorted({send.rank, recv.rank}))  # name both ends, because it is unknown which one is wrong
        return Mismatch(cause=cause, ranks=ranks, differs=differs, call=send)
    return None


def _size(call: Call) -> str:
    """Operation and size, in elements where the shape is known: "all_reduce of 2,048 elements (8,192 bytes)"."""
    num_bytes = "" if call.num_bytes is None else f"{call.num_bytes:,} bytes"
    if not call.shape:
        return f"{call.op} of {num_bytes}"
    shape = f"{int(call.shape):,} elements" if call.shape.isdigit() else f"shape {call.shape}"
    return f"{call.op} of {shape}{num_bytes and f' ({num_bytes})'}"
