"""Sends and receives that belong together and do not fit: the n-th send of a to b with the n-th receive of b from a.

    found = unequal_message(view)       # None, or cause, both ranks, what each side brings, and the send

Numbers of messages are counted for each group, direction and peer, so a send and its receive have the same one. A
receive larger than what is sent is allowed by some backends and ends; so this explains two calls that do not end, and
is no proof by itself. Tags may pair messages in another order: where another message in flight between the two would
fit, nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from analyzers.run.snapshot import AttemptView, Call

__all__ = ["UnequalMessage", "unequal_message"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnequalMessage:
    """A send and its receive, both in flight. `differs`: what was called -> ranks."""

    cause: str
    send: Call
    recv: Call
    differs: Mapping[str, tuple[int, ...]]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Both ends: nothing says which of them is wrong."""
        return tuple(sorted({self.send.rank, self.recv.rank}))


def unequal_message(view: AttemptView) -> UnequalMessage | None:
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


def _unequal(sends: Mapping[int, Call], recvs: Mapping[int, Call]) -> UnequalMessage | None:
    number = min(sends.keys() & recvs.keys(), default=None)
    if number is None:
        return None
    send, recv = sends[number], recvs[number]
    checks: list[tuple[str, Callable[[Call], object], Callable[[Call], str]]] = [
        ("mismatch_size", lambda call: call.num_bytes, _size),
        ("mismatch_dtype", lambda call: call.dtype, lambda call: f"{call.op} of {call.dtype}"),
    ]
    for cause, of, told in checks:
        if not of(send) or not of(recv) or of(send) == of(recv):
            continue
        if of(send) in map(of, recvs.values()) or of(recv) in map(of, sends.values()):
            continue
        differs = {told(send): (send.rank,), told(recv): (recv.rank,)}
        return UnequalMessage(cause=cause, send=send, recv=recv, differs=differs)
    return None


def _size(call: Call) -> str:
    shape = f"{call.shape} " if call.shape else ""
    return f"{call.op} of {shape}({call.num_bytes} bytes)"
