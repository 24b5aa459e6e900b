"""Measure the nodes' clock offsets from the leader's clock, by round trips through the shared store.

    ClockServer(store, signer).run(stopped)               # on each node, in a separate thread: answers immediately
    clocks = ClockClient(store, [1, 2], signer); clocks.poll_some()    # on the leader, a few times a second
    clocks.offsets()[1]              # ClockOffset(offset_ns=..., error_ns=...)

The leader sets a key that the node waits for; the node wakes up and answers with its time. The node's clock is assumed
to be read in the middle of the round trip, so the error is at most half of its duration. The shortest of the last few
round trips is used. The key holds a random number that the signed answer repeats, so an answer can be neither
precomputed nor replayed.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from threading import Event
from typing import Any, NamedTuple

from watch.digests.signed_messages import SESSION_BYTES, MessageRefused, Signer

__all__ = ["ClockClient", "ClockOffset", "ClockServer", "RoundTrip", "best_offset"]

KEPT_TRIPS = 16
POLLED_AT_ONCE = 8
ANSWER_S = 0.25
"""A node that does not answer within this time is polled again in its next turn."""
WAIT_S = 1.0
_LEADER = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrip:
    """One round trip: sent and received by the leader's clock, answered by the node's clock; epoch nanoseconds."""

    sent_ns: int
    answered_ns: int
    received_ns: int

    @property
    def duration_ns(self) -> int:
        """Duration of the round trip."""
        return self.received_ns - self.sent_ns

    @property
    def offset_ns(self) -> int:
        """Offset of the node's clock (positive: ahead), assuming that both directions took equally long."""
        return self.answered_ns - (self.sent_ns + self.received_ns) // 2


class ClockOffset(NamedTuple):
    """A node's clock offset as measured by the leader."""

    offset_ns: int
    """Node's clock minus leader's clock."""
    error_ns: int
    """Maximum error of `offset_ns`."""


def best_offset(trips: Sequence[RoundTrip]) -> ClockOffset:
    """Return the offset by the shortest round trip, which has the smallest error."""
    shortest = min(trips, key=lambda trip: trip.duration_ns)
    return ClockOffset(shortest.offset_ns, shortest.duration_ns // 2)


class ClockServer:
    """The node's side. `store` must be a separate connection, because calls on it block."""

    def __init__(self, store: Any, signer: Signer, clock: Callable[[], int] = time.time_ns) -> None:
        self._store = store
        self._signer = signer
        self._node = signer.node
        self._clock = clock

    def run(self, stopped: Event) -> None:
        """Answer until `stopped` is set. Raises RuntimeError if the store is lost."""
        number = self._store.add(_counter(self._node), 0)
        while not stopped.is_set():
            if not _arrives(self._store, _request(self._node, number), WAIT_S):
                number = self._store.add(_counter(self._node), 0)  # the leader may have been restarted
                continue
            nonce = bytes(self._store.get(_request(self._node, number)))[:SESSION_BYTES].ljust(SESSION_BYTES, b"\0")
            body = str(self._clock()).encode()
            self._store.set(_answer(self._node, number), self._signer.seal("clock", body, to=_LEADER, echo=nonce))
            number += 1


class ClockClient:
    """The leader's side."""

    def __init__(
        self,
        store: Any,
        nodes: Sequence[int],
        signer: Signer,
        clock: Callable[[], int] = time.time_ns,
        refuse: Callable[[int, str, str], None] = lambda node, purpose, reason: None,
    ) -> None:
        """`refuse` is called with the node, "clock" and the reason for a forged, replayed or malformed answer."""
        self._store = store
        self._signer = signer
        self._refuse = refuse
        self._clock = clock
        self._turns = deque(nodes)
        self._outstanding: set[int] = set()
        self._trips: dict[int, deque[RoundTrip]] = {node: deque(maxlen=KEPT_TRIPS) for node in nodes}

    def offsets(self) -> dict[int, ClockOffset]:
        """Clock offsets of the nodes that have answered."""
        return {node: best_offset(trips) for node, trips in self._trips.items() if trips}

    def poll_some(self) -> None:
        """Poll the next few nodes in turn. Raises RuntimeError if the store is lost."""
        for _ in range(min(POLLED_AT_ONCE, len(self._turns))):
            node = self._turns[0]
            self._turns.rotate(-1)
            self._poll(node)

    def _poll(self, node: int) -> None:
        number = self._store.add(_counter(node), 0)
        request, answer = _request(node, number), _answer(node, number)
        if node in self._outstanding or self._store.check([request]):  # unanswered in time
            if self._store.check([answer]):
                self._outstanding.discard(node)
                self._next(node, request, answer)
            return
        nonce = os.urandom(SESSION_BYTES)
        sent_ns = self._clock()
        self._store.set(request, nonce)
        if not _arrives(self._store, answer, ANSWER_S):
            self._outstanding.add(node)
            return
        received_ns = self._clock()
        try:
            message = self._signer.open("clock", bytes(self._store.get(answer)), sender=node, to=_LEADER)
            if message.echo != nonce:
                raise MessageRefused("it answers another request (replayed)")
            answered_ns = int(message.body)
            self._trips[node].append(RoundTrip(sent_ns=sent_ns, answered_ns=answered_ns, received_ns=received_ns))
        except ValueError as error:
            self._refuse(node, "clock", str(error))
        self._next(node, request, answer)

    def _next(self, node: int, request: str, answer: str) -> None:
        self._store.add(_counter(node), 1)
        self._store.delete_key(request)
        self._store.delete_key(answer)


def _arrives(store: Any, key: str, timeout_s: float) -> bool:
    """Wait for a key; False on a timeout. Raises RuntimeError if the store is lost."""
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except RuntimeError as error:
        if "timeout" not in str(error).lower() and "timed out" not in str(error).lower():
            raise
        return False
    return True


def _counter(node: int) -> str:
    return f"rankscope/clock/{node}"


def _request(node: int, number: int) -> str:
    return f"rankscope/clock/{node}/{number}/asked"


def _answer(node: int, number: int) -> str:
    return f"rankscope/clock/{node}/{number}/answer"
