"""Arrows between the ranks of one collective call, and from a send to its receive.

    flows.add(Call(...))                # every call of a piece of the run
    yield from flows.drain(clock)       # the arrows between those added

The arrow of a collective connects the ranks in the order in which they made the call and points at the last one. The
arrow of a transfer goes from the start of the send to the end of the receive.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from analyzers.report.chrome_trace.clock import TraceClock
from analyzers.report.chrome_trace.plain_values import text

__all__ = ["Call", "CallFlows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of one rank; `end_ns` is None if it never ended."""

    attempt: int
    rank: int
    thread: int
    op: str
    group: str | None
    number: int | None
    peer: int | None
    begin_ns: int
    end_ns: int | None

    @property
    def key(self) -> Hashable:
        """Key that is equal for all ranks of one call; None if it is not known which calls belong together. None, too,
        if the slice has no length, because an arrow must begin and end inside a slice."""
        if self.group is None or self.number is None or (self.end_ns is not None and self.end_ns <= self.begin_ns):
            return None
        if not self.is_transfer:
            return (self.attempt, self.group, self.number)
        if self.peer is None:
            return None
        ends = (self.rank, self.peer) if self.op.startswith("send") else (self.peer, self.rank)
        return (self.attempt, self.group, self.number, *ends)

    @property
    def is_transfer(self) -> bool:
        """True for a send or a receive."""
        return self.op.startswith(("send", "recv"))


class CallFlows:
    """Calls kept until the calls of the other ranks are known. Each matched call gets the next flow id."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, list[Call]] = {}
        self._num_flows = 0

    def add(self, call: Call) -> None:
        """Keep a call until `drain`."""
        if (key := call.key) is not None:
            self._calls.setdefault(key, []).append(call)

    def drain(self, clock: TraceClock) -> Iterator[dict[str, Any]]:
        """Flow events between the calls that were added; a call that only one rank recorded has none."""
        calls, self._calls = self._calls, {}
        for matched in calls.values():
            if len(matched) < 2 or len({call.rank for call in matched}) < len(matched):
                continue  # one rank made two calls of this number: it is unknown which of them the others made
            self._num_flows += 1
            points = _points(matched)
            for place, (at_ns, call) in enumerate(points):
                ph = "s" if place == 0 else "f" if place == len(points) - 1 else "t"
                event = {
                    "ph": ph, "cat": "call", "name": text(f"{call.group} number {call.number}"), "id": self._num_flows,
                    "pid": call.rank, "tid": call.thread, "ts": clock.us(at_ns),
                }  # fmt: skip
                yield event | {"bp": "e"} if ph == "f" else event


def _points(calls: list[Call]) -> list[tuple[int, Call]]:
    """Return where an arrow begins, passes and ends, each inside the slice of its call."""
    if calls[0].is_transfer:
        send, receive = sorted(calls, key=lambda call: not call.op.startswith("send"))
        if receive.end_ns is not None and receive.end_ns - 1 >= send.begin_ns:
            return [(send.begin_ns, send), (receive.end_ns - 1, receive)]
    return sorted(((call.begin_ns, call) for call in calls), key=lambda point: (point[0], point[1].rank))
