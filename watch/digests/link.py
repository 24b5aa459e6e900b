"""Exchange digests between the watches of the nodes, through the rendezvous store.

    with DigestLink("node-0:29500", node=1, num_nodes=4, secret=job_secret(run)) as link:
        link.publish(digest)                     # returns immediately; only the newest is sent
        link.received(), link.clocks             # on the leader (node 0): newest digests and clocks of the others
        link.publish_verdict(Verdict(...)); link.verdict     # the leader's verdict, for the node of the blamed rank

Each message is signed (`watch.digests.signed_messages`). Forged and replayed messages are ignored and counted
(`take_refusals`).

All communication happens in threads of this object, so that a lost node, or a store lost with the leader's machine,
does not delay a tick. Digests that cannot be sent are counted and dropped; the records remain in the node's store. Only
this module of `watch` imports torch, and only in its thread, so the watch of a single-node run never loads it.
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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from analyzers.finding import Finding, evidence_of
from analyzers.run.live.digest import Digest, DigestError, decode, encode
from watch.digests.clock_offsets import ClockClient, ClockOffset, ClockServer
from watch.digests.signed_messages import NO_SESSION, Inbox, MessageRefused, Signer

if TYPE_CHECKING:
    from probes.torch_compat import TCPStore

__all__ = ["ALL", "LEADER_KEY", "DigestLink", "Refusal", "Traffic", "Verdict", "digest_key", "verdict_key"]

logger = logging.getLogger("rankscope.watch")
LEADER = 0
ALL = -1
"""Receiver number for messages to all nodes."""
PERIOD_S = 0.5
"""Seconds between two polls; a new digest is sent immediately."""
STORE_S = 5.0
RECONNECT_S = 2.0
CLOSE_S = 3.0
ANSWERS_S = 3.0
"""Seconds without an answer after which the store counts as lost. It is polled twice a second."""
MAX_SUMMARY = 4000
MAX_REFUSALS = 1000
"""Maximum distinct refusals kept until they are collected."""
LEADER_KEY = "rankscope/leader"
"""Key of the message with which node 0 announces its session to all nodes. The message has no body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The leader's verdict: the ranks that the job waits for."""

    attempt: int
    ranks: tuple[int, ...]
    summary: str

    @classmethod
    def of(cls, hangs: Sequence[Finding], attempt: int) -> Verdict:
        """Verdict that blames the ranks of these findings and the awaited ranks that no watch has seen."""
        ranks = {rank for hang in hangs for rank in (*hang.ranks, *evidence_of(hang).get("unseen_ranks", ()))}
        return cls(attempt=attempt, ranks=tuple(sorted(ranks)), summary=hangs[0].summary)


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Totals since the link was opened."""

    received_bytes: int = 0
    sent: int = 0
    received: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why messages were ignored. `node`: their claimed sender."""

    node: int
    purpose: str
    reason: str


class DigestLink:
    """One node's side of the exchange."""

    def __init__(
        self,
        endpoint: str,
        *,
        node: int,
        num_nodes: int,
        secret: bytes = b"",
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        host, _, port = endpoint.rpartition(":")
        self.endpoint = endpoint
        self.node = node
        self.traffic = Traffic()
        self.clocks: dict[int, ClockOffset] = {}
        self.verdict: Verdict | None = None
        self.is_connected = False
        self._answered_s = -math.inf
        self._address = host, int(port)
        self._clock = clock
        self._others = [other for other in range(num_nodes) if other != node]
        self._senders: set[int] = set()  # nodes that have sent a digest
        self._received: dict[int, Digest] = {}
        self._refusals: dict[Refusal, int] = {}
        self._signer = Signer(secret, node=node)
        self._inboxes = {other: Inbox(self._signer, "digest", sender=other) for other in self._others}
        self._verdicts = Inbox(self._signer, "verdict", sender=LEADER)
        self._leader = NO_SESSION
        self._outgoing: bytes | None = None
        self._sent = b"", NO_SESSION
        self._own_verdict: Verdict | None = None
        self._sent_verdicts: dict[int, tuple[bytes, Verdict]] = {}
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

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._wake.set()
        for thread in self._threads:
            # Let the thread send the last digest. If the process exits while torch waits in the thread, it aborts.
            thread.join(CLOSE_S)

    def publish(self, digest: Digest) -> None:
        """Send a digest as soon as possible. It replaces a digest that has not been sent yet."""
        self._outgoing = encode(digest)
        self._wake.set()

    def publish_verdict(self, verdict: Verdict) -> None:
        """Send the leader's verdict to all nodes."""
        self._own_verdict = replace(verdict, summary=verdict.summary[:MAX_SUMMARY])
        self._wake.set()

    @property
    def answers(self) -> bool:
        """True while the store, and therefore the leader's node, answers."""
        return self.is_connected and time.monotonic() - self._answered_s < ANSWERS_S

    def received(self) -> list[Digest]:
        """Newest digest of each other node. `received_ns` is by this node's clock."""
        return list(self._received.values())

    @property
    def is_signed(self) -> bool:
        """True if the messages are signed with a secret."""
        return self._signer.is_signed

    @property
    def others(self) -> frozenset[int]:
        """The other nodes of the job."""
        return frozenset(self._others)

    def take_refusals(self) -> dict[Refusal, int]:
        """Messages refused since the last call, counted by reason."""
        found, self._refusals = self._refusals, {}
        return found

    def _refuse(self, node: int, purpose: str, reason: str) -> None:
        refusal = Refusal(node=node, purpose=purpose, reason=reason)
        if refusal in self._refusals or len(self._refusals) < MAX_REFUSALS:
            self._refusals[refusal] = self._refusals.get(refusal, 0) + 1

    def _serve(self, work: Callable[[TCPStore], None]) -> None:
        """Run `work` on a connection until the link is closed; reconnect if the store is lost."""
        while not self._stopped.is_set():
            try:
                work(self._connect())
            except Exception as error:  # torch raises various types if the store does not answer
                self.is_connected = False
                self.traffic.failures += 1
                if self.traffic.failures in (1, 10, 100):
                    logger.warning("Digests over %s failed: %s", self.endpoint, " ".join(str(error).split())[:200])
            self._stopped.wait(RECONNECT_S)

    def _connect(self) -> TCPStore:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # log one line for a lost store, instead of torch's pages
        distributed: Any = importlib.import_module("torch.distributed")  # exports no name for type checkers

        host, port = self._address
        with socket.create_connection(self._address, STORE_S):
            # Connect first, to fail at once if nothing listens. torch would retry until the timeout, and the process
            # would abort if it exits during a retry.
            pass
        store: TCPStore = distributed.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=STORE_S)
        )
        return store

    def _answer_clock(self, store: TCPStore) -> None:
        ClockServer(store, self._signer, self._clock).run(self._stopped)

    def _exchange(self, store: Any) -> None:  # torch's stub of `set` lacks bytes
        clocks = None
        if self.node == LEADER:
            clocks = ClockClient(store, self._others, self._signer, self._clock, self._refuse)
        self._sent, self._sent_verdicts = (b"", NO_SESSION), {}  # a restarted store has lost what was sent: send again
        self.is_connected = True
        while True:
            is_last = self._stopped.is_set()
            if clocks is None:
                self._read_leader(store)
                self._send(store)
            else:
                store.set(LEADER_KEY, self._signer.seal("leader", b"", to=ALL, echo=NO_SESSION))
                if not is_last:
                    self._gather(store)
                self._send_verdict(store)
                if not is_last:
                    clocks.poll_some()
                self.clocks = clocks.offsets()
            self._answered_s = time.monotonic()
            if is_last:
                return
            self._wake.wait(PERIOD_S)
            self._wake.clear()

    def _send(self, store: Any) -> None:
        """Send a new digest, or repeat the newest one if the leader's watch was restarted."""
        outgoing = self._outgoing
        if outgoing is None or self._leader == NO_SESSION or self._sent == (outgoing, self._leader):
            return
        self._sent = outgoing, self._leader
        data = self._signer.seal("digest", outgoing, to=LEADER, echo=self._leader)
        store.set(digest_key(self.node), data)
        self.traffic.sent += 1

    def _gather(self, store: TCPStore) -> None:
        """Read the digests of all known senders in one request. Looking for a first digest takes one per other node."""
        self._senders |= {node for node in self.others - self._senders if store.check([digest_key(node)])}
        senders = sorted(self._senders)
        digests = store.multi_get([digest_key(node) for node in senders]) if senders else []
        for node, data in zip(senders, digests, strict=True):
            self.traffic.received_bytes += len(data)
            try:
                message = self._inboxes[node].open(bytes(data))
                if message is None:
                    continue
                digest = decode(message.body)
                if digest.node != node:
                    raise DigestError(f"it names node {digest.node} as its sender")
            except (MessageRefused, DigestError) as error:
                self._refuse(node, "digest", str(error))
                continue
            self.traffic.received += 1
            self._received[node] = replace(digest, received_ns=self._clock())

    def _send_verdict(self, store: Any) -> None:
        """Send the verdict to each node that does not have it, including nodes with a restarted watch."""
        verdict = self._own_verdict
        if verdict is None:
            return
        body = json.dumps(asdict(verdict)).encode()
        for node in self._senders:
            session = self._inboxes[node].session
            if session != NO_SESSION and self._sent_verdicts.get(node) != (session, verdict):
                store.set(verdict_key(node), self._signer.seal("verdict", body, to=node, echo=session))
                self._sent_verdicts[node] = session, verdict

    def _read_leader(self, store: TCPStore) -> None:
        """Read the leader's session and its verdict for this node."""
        try:
            if store.check([LEADER_KEY]):
                data = bytes(store.get(LEADER_KEY))
                self._leader = self._signer.open("leader", data, sender=LEADER, to=ALL).session
        except MessageRefused as error:
            self._refuse(LEADER, "leader", str(error))
        if not store.check([verdict_key(self.node)]):
            return
        try:
            message = self._verdicts.open(bytes(store.get(verdict_key(self.node))))
            if message is None:
                return
            fields = json.loads(message.body)
            ranks = tuple(int(rank) for rank in fields["ranks"])
            self.verdict = Verdict(attempt=int(fields["attempt"]), ranks=ranks, summary=str(fields["summary"]))
        except MessageRefused as error:
            self._refuse(LEADER, "verdict", str(error))
        except (ValueError, KeyError, TypeError) as error:
            self._refuse(LEADER, "verdict", f"it cannot be read: {type(error).__name__}")


def digest_key(node: int) -> str:
    """Key of a node's newest digest in the store."""
    return f"rankscope/digest/{node}"


def verdict_key(node: int) -> str:
    """Key of the leader's verdict for a node in the store."""
    return f"rankscope/verdict/{node}"
