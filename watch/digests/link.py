"""Digests between the nodes' watches, through the store of the rendezvous.

    with DigestLink("node-0:29500", node=1, num_nodes=4) as link:
        link.publish(digest)                  # returns at once; the newest is sent
        link.received(), link.offsets_ns      # the leader (node 0): the others' newest, and their clocks
        link.tell(Verdict(...)); link.verdict # what the leader found, for the node whose rank it is

All talk happens in threads of this object: a node that is gone, or a store that is gone with the leader's machine,
holds no tick up. What cannot be sent is counted and left; the records are in the node's own store anyway.
Imports torch, in its thread, and only here: a watch of a single node has none of it.
"""

from __future__ import annotations

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
from typing import Any

from analyzers.run.digest import Digest, DigestError, decode, encode
from watch.digests.clock_offsets import Answering, Asking

__all__ = ["LEADER", "DigestLink", "Traffic", "Verdict"]

logger = logging.getLogger("rankscope.watch")
LEADER = 0
PERIOD_S = 0.5
"""Between two looks of the leader; a new digest is sent at once."""
STORE_S = 5.0
AGAIN_S = 2.0
LEAVE_S = 3.0
ANSWERS_S = 3.0
"""Without a word of the store for so long, the way to it is taken for lost: it is asked twice a second."""
MAX_VERDICT_BYTES = 16 << 10
_VERDICT = "rankscope/verdict"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Who keeps a job waiting, by the leader's word."""

    attempt: int
    ranks: tuple[int, ...]
    summary: str


@dataclass(slots=True, kw_only=True)
class Traffic:
    """What went over the link so far."""

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
        self._told: bytes | None = None
        self._stopped = threading.Event()
        self._wake = threading.Event()
        self._threads = [threading.Thread(target=self._keep, args=(self._talk,), name="digests", daemon=True)]
        if node != LEADER:
            self._threads.append(threading.Thread(target=self._keep, args=(self._answer,), name="clock", daemon=True))

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
            thread.join(LEAVE_S)  # the last digest; a process that ends within torch's waiting aborts

    def publish(self, digest: Digest) -> None:
        """Send it as soon as the line is free; one that was not sent yet is replaced."""
        self._outgoing = encode(digest)
        self._wake.set()

    def tell(self, verdict: Verdict) -> None:
        """The leader's word to all nodes."""
        self._told = json.dumps(asdict(verdict)).encode()[:MAX_VERDICT_BYTES]
        self._wake.set()

    @property
    def answers(self) -> bool:
        """Whether the store, and so the leader's node, is there at the moment."""
        return self.is_connected and time.monotonic() - self._answered_s < ANSWERS_S

    def received(self) -> list[Digest]:
        """The newest digest of each other node, `received_ns` by our clock."""
        return list(self._received.values())

    def _keep(self, work: Any) -> None:
        """Work, and begin again when the store was lost, until the end."""
        while not self._stopped.is_set():
            try:
                work(self._connect())
            except Exception as error:  # torch raises many kinds for one thing: the store does not answer
                self.is_connected = False
                self.traffic.failures += 1
                if self.traffic.failures in (1, 10, 100):
                    logger.warning("digests over %s: %s", self.endpoint, " ".join(str(error).split())[:200])
            self._stopped.wait(AGAIN_S)

    def _connect(self) -> Any:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost store is a line of ours, not pages of torch's
        from torch.distributed import TCPStore

        host, port = self._address
        with socket.create_connection(self._address, STORE_S):
            pass  # torch's own attempts take their whole timeout, and a process that ends in one aborts
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=STORE_S))

    def _answer(self, store: Any) -> None:
        Answering(store, self.node, self._clock).run(self._stopped)

    def _talk(self, store: Any) -> None:
        asking = Asking(store, self._others) if self.node == LEADER else None
        self.is_connected = True
        while True:
            is_last = self._stopped.is_set()
            self._send(store)
            if asking is None:
                self._read_verdict(store)
            elif not is_last:
                self._gather(store)
                asking.ask_some()
                self.offsets_ns, self.errors_ns = asking.offsets_ns, asking.errors_ns
            self._answered_s = time.monotonic()
            if is_last:
                return
            self._wake.wait(PERIOD_S)
            self._wake.clear()

    def _send(self, store: Any) -> None:
        outgoing, self._outgoing = self._outgoing, None
        if outgoing is not None and self.node != LEADER:
            store.set(_key(self.node), outgoing)
            self.traffic.sent += 1
            self.traffic.sent_bytes += len(outgoing)
        told, self._told = self._told, None
        if told is not None:
            store.set(_VERDICT, told)

    def _gather(self, store: Any) -> None:
        """All that were there before in one question; one for each node that has not been seen yet."""
        self._known |= {node for node in self._others if node not in self._known and store.check([_key(node)])}
        known = sorted(self._known)
        for node, data in zip(known, store.multi_get([_key(node) for node in known]) if known else [], strict=True):
            self.traffic.received_bytes += len(data)
            try:
                digest = decode(bytes(data))
                if digest.node != node:
                    raise DigestError(f"it says that it is of node {digest.node}")
            except DigestError as error:
                self.traffic.refused[node] = str(error)
                continue
            before = self._received.get(node)
            if before is None or digest.sent_ns != before.sent_ns:
                self.traffic.received += 1
                self._received[node] = replace(digest, received_ns=self._clock())

    def _read_verdict(self, store: Any) -> None:
        if not store.check([_VERDICT]):
            return
        try:
            said = json.loads(bytes(store.get(_VERDICT)))
            ranks = tuple(int(rank) for rank in said["ranks"])
            self.verdict = Verdict(attempt=int(said["attempt"]), ranks=ranks, summary=str(said["summary"]))
        except (ValueError, KeyError, TypeError):
            return


def _key(node: int) -> str:
    return f"rankscope/digest/{node}"
