"""Rendezvous handler that never blocks the launcher, even if the node that hosts the store is lost.

    handler = ResponsiveHandler(handler, "10.0.0.1:29500")     # wraps torch's handler, for torch's agent

torch queries the store in the launcher's main thread each time it polls its ranks. A machine without power does not
even refuse connections, so torch waits until TCP times out after a quarter of an hour. In that time it does not notice
the death of a rank, and handles no signal. Here another thread makes the query, and a call ends when the endpoint has
not been reached for `LOST_S`.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

__all__ = ["LOST_S", "ResponsiveHandler"]

LOST_S = 30.0
"""Seconds without a connection after which the store counts as lost."""
PROBE_S = 2.0
LEAVE_S = 5.0
"""Time limit for closing the rendezvous."""
Answer = TypeVar("Answer")


class ResponsiveHandler(RendezvousHandler):
    """Behaves like torch's handler, but raises instead of blocking forever."""

    def __init__(self, handler: RendezvousHandler, endpoint: str, *, lost_s: float = LOST_S) -> None:
        host, _, port = endpoint.rpartition(":")
        self._handler = handler
        self._endpoint = endpoint
        self._address = host.strip("[]"), int(port)
        self._lost_s = lost_s
        self._reached_s = time.monotonic()
        self._probed_s = 0.0
        self._round = 0
        self._waiting = 0
        self._query_due = threading.Event()
        self._query_thread: threading.Thread | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next rendezvous. Raises RendezvousConnectionError if the endpoint cannot be reached for `lost_s`."""
        self._reached_s = time.monotonic()
        info = self._while_reachable(self._handler.next_rendezvous)
        self._round += 1  # nodes that were waiting have joined it
        self._waiting = 0
        return info

    def num_nodes_waiting(self) -> int:
        """Number of waiting nodes as of the store's last answer; 0 before the first."""
        if self._query_thread is None:
            self._query_thread = threading.Thread(target=self._query, name="rendezvous", daemon=True)
            self._query_thread.start()
        self._query_due.set()
        return self._waiting

    def shutdown(self) -> bool:
        """Close the rendezvous; False if the store could not be reached."""
        outcome = _in_thread(self._handler.shutdown)
        try:
            return outcome.get(timeout=LEAVE_S) is True
        except queue.Empty:
            return False

    def _query(self) -> None:
        while True:
            self._query_due.wait()
            self._query_due.clear()
            asked_in = self._round
            try:
                waiting = self._handler.num_nodes_waiting()
            except Exception:
                waiting = 0
            if asked_in == self._round:
                self._waiting = waiting

    def _while_reachable(self, call: Callable[[], Answer]) -> Answer:
        outcome = _in_thread(call)
        while True:
            try:
                answer = outcome.get(timeout=0.2)
            except queue.Empty:
                if self._is_lost():
                    raise RendezvousConnectionError(
                        f"The rendezvous at {self._endpoint} was not reached for {self._lost_s:.0f} s"
                    ) from None
                continue
            if isinstance(answer, BaseException):
                raise answer
            return answer  # type: ignore[no-any-return]  # the queue carries results and exceptions

    def _is_lost(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._probed_s >= min(PROBE_S, self._lost_s / 4):
            self._probed_s = now_s
            try:
                with socket.create_connection(self._address, PROBE_S):
                    self._reached_s = time.monotonic()
            except OSError:
                pass
        return time.monotonic() - self._reached_s > self._lost_s

    # Calls that torch answers immediately.

    def get_backend(self) -> str:
        return self._handler.get_backend()

    def is_closed(self) -> bool:
        return self._handler.is_closed()

    def set_closed(self) -> None:
        self._handler.set_closed()  # type: ignore[no-untyped-call]  # torch: no types

    def get_run_id(self) -> str:
        return self._handler.get_run_id()

    @property
    def use_agent_store(self) -> bool:
        return self._handler.use_agent_store


def _in_thread(call: Callable[[], Any]) -> queue.SimpleQueue[Any]:
    """Run a call in a thread, because it may never return. Returns the queue that receives its result or exception."""
    outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put(call())
        except BaseException as error:
            outcome.put(error)

    threading.Thread(target=run, name="rendezvous", daemon=True).start()
    return outcome
