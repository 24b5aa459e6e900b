"""torch's rendezvous without its endless waiting: the launcher of a node whose leader has gone still hears and acts.

    handler = PatientHandler(handler, "10.0.0.1:29500")     # for torch's agent, in the place of the one that is given

torch asks the store at every look at its ranks, in the launcher's main thread. A machine that lost its power does not
even refuse a connection, and the answer is waited for until TCP gives up after a quarter of an hour: in that time no
rank's death is noticed and no signal is heard. Here another thread asks, and what takes long ends when the endpoint has
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

__all__ = ["LOST_S", "PatientHandler"]

LOST_S = 30.0
"""For so long a link may be down before a node takes the store for lost."""
PROBE_S = 2.0
LEAVE_S = 5.0
"""For how long one that leaves tells the others."""
Answer = TypeVar("Answer")


class PatientHandler(RendezvousHandler):
    """The same answers, or an error; never silence."""

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
        self._asked = threading.Event()
        self._asking: threading.Thread | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the others. Raises RendezvousConnectionError if the endpoint cannot be reached for `lost_s`."""
        self._reached_s = time.monotonic()
        info = self._while_reachable(self._handler.next_rendezvous)
        self._round += 1  # who waited until now is in it
        self._waiting = 0
        return info

    def num_nodes_waiting(self) -> int:
        """By the last answer that came; nobody, until one comes."""
        if self._asking is None:
            self._asking = threading.Thread(target=self._ask, name="rendezvous", daemon=True)
            self._asking.start()
        self._asked.set()
        return self._waiting

    def shutdown(self) -> bool:
        """Close the door; False if that could not be told."""
        outcome = _begun(self._handler.shutdown)
        try:
            return outcome.get(timeout=LEAVE_S) is True
        except queue.Empty:
            return False

    def _ask(self) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            of_round = self._round
            try:
                waiting = self._handler.num_nodes_waiting()
            except Exception:
                waiting = 0
            if of_round == self._round:
                self._waiting = waiting

    def _while_reachable(self, call: Callable[[], Answer]) -> Answer:
        outcome = _begun(call)
        while True:
            try:
                answer = outcome.get(timeout=0.2)
            except queue.Empty:
                if self._is_lost():
                    raise RendezvousConnectionError(
                        f"{self._endpoint}, where the nodes meet, was not reached for {self._lost_s:.0f} s"
                    ) from None
                continue
            if isinstance(answer, BaseException):
                raise answer
            return answer

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

    # What torch answers at once.

    def get_backend(self) -> str:
        return self._handler.get_backend()

    def is_closed(self) -> bool:
        return self._handler.is_closed()

    def set_closed(self) -> None:
        self._handler.set_closed()

    def get_run_id(self) -> str:
        return self._handler.get_run_id()

    @property
    def use_agent_store(self) -> bool:
        return self._handler.use_agent_store


def _begun(call: Callable[[], Any]) -> queue.SimpleQueue[Any]:
    """Where the answer of a call that may never end will be, or its exception."""
    outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put(call())
        except BaseException as error:
            outcome.put(error)

    threading.Thread(target=run, name="rendezvous", daemon=True).start()
    return outcome
