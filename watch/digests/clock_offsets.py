"""How far the clocks of the nodes are from the leader's, from round trips through the store that the nodes share.

    Answering(store, node=1).run(stopped)                 # on each node, in a thread of its own: answers at once
    asking = Asking(store, nodes=[1, 2]); asking.ask_some()          # on the leader, a few a second
    asking.offsets_ns[1], asking.errors_ns[1]

The leader sets a key that the node waits for; the node wakes, and sets its time. What the node's clock showed is put in
the middle of the round trip, so the error is at most half of it. Of the newest few the shortest counts: a long one
waited somewhere.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from threading import Event
from typing import Any

__all__ = ["Answering", "Asking", "Trip", "best"]

KEPT_TRIPS = 16
ASKED_AT_ONCE = 8
ANSWER_S = 0.25
"""A node that does not answer in this time is asked again when its turn comes."""
WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Trip:
    """One round trip: sent and received by the asker's clock, answered by the other's; epoch nanoseconds."""

    sent_ns: int
    answered_ns: int
    received_ns: int

    @property
    def duration_ns(self) -> int:
        """Of the whole trip."""
        return self.received_ns - self.sent_ns

    @property
    def offset_ns(self) -> int:
        """How far the other's clock is ahead, if both ways took as long."""
        return self.answered_ns - (self.sent_ns + self.received_ns) // 2


def best(trips: Sequence[Trip]) -> tuple[int, int]:
    """(offset, largest error) in nanoseconds, of the shortest trip."""
    shortest = min(trips, key=lambda trip: trip.duration_ns)
    return shortest.offset_ns, shortest.duration_ns // 2


class Answering:
    """A node's end. `store` is a connection of its own: it waits in it."""

    def __init__(self, store: Any, node: int, clock: Callable[[], int] = time.time_ns) -> None:
        self._store = store
        self._node = node
        self._clock = clock

    def run(self, stopped: Event) -> None:
        """Answer until `stopped`. Raises RuntimeError when the store is gone."""
        number = self._store.add(_counter(self._node), 0)
        while not stopped.is_set():
            asked = _asked(self._node, number)
            try:
                self._store.wait([asked], timedelta(seconds=WAIT_S))
            except RuntimeError as error:
                if "timeout" not in str(error).lower() and "timed out" not in str(error).lower():
                    raise
                number = self._store.add(_counter(self._node), 0)  # whoever asks may have begun anew
                continue
            self._store.set(_answer(self._node, number), str(self._clock()))
            number += 1


class Asking:
    """The leader's end."""

    def __init__(self, store: Any, nodes: Sequence[int]) -> None:
        self._store = store
        self._turns = deque(nodes)
        self._outstanding: set[int] = set()
        self._trips: dict[int, deque[Trip]] = {node: deque(maxlen=KEPT_TRIPS) for node in nodes}

    @property
    def offsets_ns(self) -> dict[int, int]:
        """How far each node's clock is ahead of ours, of those that have answered."""
        return {node: best(trips)[0] for node, trips in self._trips.items() if trips}

    @property
    def errors_ns(self) -> dict[int, int]:
        """By how much each may be wrong."""
        return {node: best(trips)[1] for node, trips in self._trips.items() if trips}

    def ask_some(self) -> None:
        """Ask the next few in turn. Raises RuntimeError when the store is gone."""
        for _ in range(min(ASKED_AT_ONCE, len(self._turns))):
            node = self._turns[0]
            self._turns.rotate(-1)
            self._ask(node)

    def _ask(self, node: int) -> None:
        number = self._store.add(_counter(node), 0)
        asked, answer = _asked(node, number), _answer(node, number)
        if node in self._outstanding or self._store.check([asked]):  # of an earlier time: its answer says nothing
            if self._store.check([answer]):
                self._outstanding.discard(node)
                self._next(node, asked, answer)
            return
        sent_ns = time.time_ns()
        self._store.set(asked, "")
        try:
            self._store.wait([answer], timedelta(seconds=ANSWER_S))
        except RuntimeError as error:
            if "timeout" not in str(error).lower() and "timed out" not in str(error).lower():
                raise
            self._outstanding.add(node)
            return
        received_ns = time.time_ns()
        self._trips[node].append(Trip(sent_ns, int(self._store.get(answer)), received_ns))
        self._next(node, asked, answer)

    def _next(self, node: int, asked: str, answer: str) -> None:
        self._store.add(_counter(node), 1)
        self._store.delete_key(asked)
        self._store.delete_key(answer)


def _counter(node: int) -> str:
    return f"rankscope/clock/{node}"


def _asked(node: int, number: int) -> str:
    return f"rankscope/clock/{node}/{number}/asked"


def _answer(node: int, number: int) -> str:
    return f"rankscope/clock/{node}/{number}/answer"
