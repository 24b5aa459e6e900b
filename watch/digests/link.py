"""Digests between the nodes' watches, through the store of the rendezvous.

    with DigestLink("node-0:29500", node=1, num_nodes=4) as link:
        link.publish(digest)                     # returns at once; the newest is sent
        link.received(), link.offsets_ns         # the leader (node 0): the others' newest, and their clocks
        link.publish_verdict(Verdict(...)); link.verdict     # the leader's finding, for the node of the blamed rank

All communication happens in threads of this object: a lost node, or a store that is lost with the leader's machine,
delays no tick. What cannot be sent is counted and dropped; the records are in the node's own store.
Imports torch, in its thread, and only here: a watch of a single node does not load it.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

from analyzers.run.digest import Digest, DigestError, decode, encode
from watch.digests.clock_offsets import ClockClient, ClockServer

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

__all__ = ["LEADER", "DigestLink", "Traffic", "Verdict"]

logger = logging.getLogger("rankscope.watch")
LEADER = 0
PERIOD_S = 0.5
"""Between two polls; a new digest is sent at once."""
STORE_S = 5.0
RECONNECT_S = 2.0
CLOSE_S = 3.0
ANSWERS_S = 3.0
"""Without an answer of the store for so long the connection counts as lost: it is polled twice a second."""
MAX_VERDICT_BYTES = 16 << 10
_VERDICT = "rankscope/verdict"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The ranks that keep a job waiting, as the leader found."""

    attempt: int
    ranks: tuple[int, ...]
    summary: str


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Totals of the link so far."""

    sent_bytes: int = 0
    received_bytes: int = 0
    sent: int = 0
    received: int = 0
    failures: int = 0
    refused: dict[int, str] = field(default_factory=dict)
    """Nodes whose digests could not be read, and why."""


class DigestLink:
    """One node's end."""

    def __init__(self, endpoint: str, *, node: int, num_nodes: int, clock: Callable[[], int] = time.time_ns) -> None:
        host, _, port = endpoint.rpartition(":")
        self.endpoint = endpoint
        self.node = node
        self.traffic = Traffic()
        self.offsets_ns: dict[int, int] = {}
        self.errors_ns: dict[int, int] = {}
        self.verdict: Verdict | None = None
        self.is_connected = False
        self._answered_s = -math.inf
        self._address = host, int(port)
        self._clock = clock
        self._others = [other for other in range(num_nodes) if other != node]
        self._known: set[int] = set()
        self._received: dict[int, Digest] = {}
        self._outgoing: bytes | None = None
        self._outgoing_verdict: bytes | None = None
        self._stopped = threading.Event()
        self._wake = threading.Event()
        self._threads = [threading.Thread(target=self._serve, args=(self._exchange,), name="digests", daemon=True)]
        if node != LEADER:
            clock_thread = threading.Thread(target=self._serve, args=(self._answer_clock,), name="clock", daemon=True)
            self._threads.append(clock_thread)

    def __enter__(self) -> DigestLink:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(CLOSE_S)  # the last digest; a process that ends while torch waits aborts

    def publish(self, digest: Digest) -> None:
        """Send a digest as soon as possible; one that was not sent yet is replaced."""
        self._outgoing = encode(digest)
        self._wake.set()

    def publish_verdict(self, verdict: Verdict) -> None:
        """Send the leader's verdict to all nodes."""
        self._outgoing_verdict = json.dumps(asdict(verdict)).encode()[:MAX_VERDICT_BYTES]
        self._wake.set()

    @property
    def answers(self) -> bool:
        """True while the store, and so the leader's node, answers."""
        return self.is_connected and time.monotonic() - self._answered_s < ANSWERS_S

    def received(self) -> list[Digest]:
        """The newest digest of each other node, `received_ns` by our clock."""
        return list(self._received.values())

    def _serve(self, work: Callable[[TCPStore], None]) -> None:
        """Run `work` on a connection, on a new one when the store was lost, until the end."""
        while not self._stopped.is_set():
            try:
                work(self._connect())
            except Exception as error:  # torch raises many kinds for one thing: the store does not answer
                self.is_connected = False
                self.traffic.failures += 1
                if self.traffic.failures in (1, 10, 100):
                    logger.warning("Digests over %s failed: %s", self.endpoint, " ".join(str(error).split())[:200])
            self._stopped.wait(RECONNECT_S)

    def _connect(self) -> TCPStore:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost store is one line of ours, not pages of torch's
        distributed: Any = importlib.import_module("torch.distributed")  # exports no name for type checkers

        host, port = self._address
        with socket.create_connection(self._address, STORE_S):
            pass  # torch's own attempts take their whole timeout, and a process that ends in one aborts
        store: TCPStore = distributed.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=STORE_S)
        )
        return store

    def _answer_clock(self, store: TCPStore) -> None:
        ClockServer(store, self.node, self._clock).run(self._stopped)

    def _exchange(self, store: TCPStore) -> None:
        clocks = ClockClient(store, self._others, self._clock) if self.node == LEADER else None
        self.is_connected = True
        while True:
            is_last = self._stopped.is_set()
            self._send(store)
            if clocks is None:
                self._read_verdict(store)
            elif not is_last:
                self._gather(store)
                clocks.poll_some()
                self.offsets_ns, self.errors_ns = clocks.offsets_ns, clocks.errors_ns
            self._answered_s = time.monotonic()
            if is_last:
                return
            self._wake.wait(PERIOD_S)
            self._wake.clear()

    def _send(self, store: Any) -> None:  # torch's stub of `set` lacks bytes
        outgoing, self._outgoing = self._outgoing, None
        if outgoing is not None and self.node != LEADER:
            store.set(_key(self.node), outgoing)
            self.traffic.sent += 1
            self.traffic.sent_bytes += len(outgoing)
        verdict, self._outgoing_verdict = self._outgoing_verdict, None
        if verdict is not None:
            store.set(_VERDICT, verdict)

    def _gather(self, store: TCPStore) -> None:
        """Read all known nodes in one request; a node that has not been seen yet costs one more."""
        self._known |= {node for node in self._others if node not in self._known and store.check([_key(node)])}
        known = sorted(self._known)
        for node, data in zip(known, store.multi_get([_key(node) for node in known]) if known else [], strict=True):
            self.traffic.received_bytes += len(data)
            try:
                digest = decode(bytes(data))
                if digest.node != node:
                    raise DigestError(f"it names node {digest.node} as its sender")
            except DigestError as error:
                self.traffic.refused[node] = str(error)
                continue
            before = self._received.get(node)
            if before is None or digest.sent_ns != before.sent_ns:
                self.traffic.received += 1
                self._received[node] = replace(digest, received_ns=self._clock())

    def _read_verdict(self, store: TCPStore) -> None:
        if not store.check([_VERDICT]):
            return
        try:
            found = json.loads(bytes(store.get(_VERDICT)))
            ranks = tuple(int(rank) for rank in found["ranks"])
            self.verdict = Verdict(attempt=int(found["attempt"]), ranks=ranks, summary=str(found["summary"]))
        except (ValueError, KeyError, TypeError):
            return


def _key(node: int) -> str:
    return f"rankscope/digest/{node}"
