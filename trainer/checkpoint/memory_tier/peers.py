"""Copies of this rank's shard in another node's memory, which survive the loss of a node.

    peers = PeerCopies(shared_folder(run.path), rank=3)
    peers.connect()                          # all ranks; collective: exchange addresses, choose partners
    peers.offer(slot)                        # in the background, after sealing; at most one at a time
    peers.send(slot, owner=3, to=5)          # after a restart: blocks; raises OSError
    peers.state_changes()                    # results, for the training thread to record

Rank i of a node sends to rank i of the next node. The receiver writes to slots in its node's shared memory, in a folder
named after the sender's rank. Bytes go from shared memory to shared memory through a socket, in pieces, so neither side
needs another copy or holds the GIL. The receiver verifies the hash before it writes the note, the file with the copy's
metadata.

The socket is separate from the process groups, so a dead peer causes an error in a background thread and blocks no
collective. A rank listens only if there are several nodes, at the address from which this node reaches the rendezvous
store. It drops connections that do not start with the secret that the ranks have exchanged.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import os
import secrets
import shutil
import socket
import struct
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from probes.tape.files.shared_memory import PID_NAME, this_node
from trainer.checkpoint import attempt_fence as fence
from trainer.checkpoint.agreement import gather_from_all
from trainer.checkpoint.disk_tier.manifest import CheckpointError
from trainer.checkpoint.memory_tier.slots import Slot, remove_others

__all__ = ["PeerCopies", "rank_folder"]

TIMEOUT_S = 20.0
"""Seconds without data after which the connection is closed."""
MAX_HEADER_BYTES = 64 << 20
_PIECE_BYTES = 4 << 20
_SECRET_BYTES = 32
_LENGTHS = struct.Struct("!IQ")  # bytes of the header, bytes of the tensors


def rank_folder(node_folder: Path, rank: int) -> Path:
    """Folder on a node with the copies of one rank. The rank may run on this node or on another."""
    return node_folder / f"rank-{rank:05d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """Network address of a rank."""

    node: int
    host: str
    port: int
    secret: str


class PeerCopies:
    """One rank's sender and receiver."""

    def __init__(self, folder: Path, *, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self.partner: int | None = None
        """Rank that keeps this rank's copies; None before `connect`, or with a single node."""
        self.hosted: set[int] = set()
        """Ranks that send their copies to this rank."""
        self._ranks: list[_Rank] = []
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._slots: dict[Path, Slot] = {}
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="rankscope-peer")
        self._sending: Future[None] | None = None
        self._outcomes: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._reported_state = ""
        self._over = threading.Event()

    # Called on all ranks.

    def connect(self) -> None:
        """Listen, and exchange addresses. Collective. A wrong address is noticed only when it is first used."""
        host, port = "", 0
        try:
            listener, host = _listen()
            port = listener.getsockname()[1]
            threading.Thread(target=self._serve, args=(listener,), name="rankscope-peer-in", daemon=True).start()
        except OSError as error:
            self._outcomes.put({"state": "failed", "step": -1, "reason": f"cannot listen: {error}"})
        addresses = gather_from_all({"node": this_node(), "host": host, "port": port, "secret": self._secret.hex()})
        self._ranks = [_Rank(**each) for each in addresses]
        partners = _partners([each.node for each in self._ranks])
        self.partner = partners[self.rank]
        self.hosted = {other for other, partner in enumerate(partners) if partner == self.rank}

    # Called in the training thread.

    def offer(self, slot: Slot) -> Future[None] | None:
        """Send a sealed copy to the partner in the background. If there is no partner, or the previous copy is still
        being sent, the copy is skipped and None returned, so that sending uses at most one buffer.
        """
        if self.partner is None:
            return None
        if self._sending is not None and not self._sending.done():
            self._outcomes.put(
                {"state": "delayed", "step": slot.step, "reason": "the previous copy is still being sent"}
            )
            return None
        self._sending = self._sender.submit(self._offer, slot, self.partner)
        return self._sending

    def state_changes(self) -> list[dict[str, Any]]:
        """State changes since the last call, as fields of `peer_copy` events: the first copy sent, then each change
        between complete, delayed and failed.
        """
        changes: list[dict[str, Any]] = []
        while True:
            try:
                outcome = self._outcomes.get_nowait()
            except Empty:
                return changes
            if outcome["state"] != self._reported_state:
                self._reported_state = outcome["state"]
                where = None if self.partner is None else self._ranks[self.partner].node
                changes.append({"peer_rank": self.partner, "peer_node": where, **outcome})

    def node_of(self, rank: int) -> int:
        return self._ranks[rank].node

    def remove(self, *, at_end: bool) -> None:
        """Free the memory that holds copies of other ranks. `at_end`: also reject all copies from now on, because other
        ranks may still send some.
        """
        if at_end:
            self._over.set()
        self._slots.clear()
        for owner in self.hosted:
            shutil.rmtree(rank_folder(self.folder, owner), ignore_errors=True)

    # Sending.

    def _offer(self, slot: Slot, to: int) -> None:
        start, step = time.monotonic_ns(), slot.step
        if step < 0:
            return  # a rollback has emptied the slot in the meantime
        try:
            size = self.send(slot, owner=self.rank, to=to)
        except (OSError, CheckpointError) as error:
            self._outcomes.put({"state": "failed", "step": step, "reason": str(error)})
        else:
            took = time.monotonic_ns() - start
            self._outcomes.put({"state": "complete", "step": step, "bytes": size, "duration_ns": took})

    def send(self, slot: Slot, *, owner: int, to: int, name: str = "") -> int:
        """Send a sealed copy of rank `owner` to rank `to`, which keeps it under `name` (default: the slot's name).
        Returns its size in bytes.

        Raises OSError or CheckpointError with the receiver's reason, one line.
        """
        peer = self._ranks[to]
        header = json.dumps(
            {
                "owner": owner,
                "name": name or slot.path.name,
                "attempt": fence.held_attempt(),
                "vetted": slot.vetted,
                "note": slot.note_path.read_text(encoding="utf-8"),
            }
        ).encode()
        with (
            slot.path.open("rb") as file,
            socket.create_connection((peer.host, peer.port), timeout=TIMEOUT_S) as connection,
        ):
            size = os.fstat(file.fileno()).st_size
            connection.sendall(bytes.fromhex(peer.secret) + _LENGTHS.pack(len(header), size) + header)
            connection.sendfile(file)
            connection.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda: connection.recv(4096), b"")).decode()
        if answer != "kept":
            reason = answer or "it closed the connection"
            raise OSError(f"rank {to} on node {peer.node} did not keep the copy: {reason}")
        return size

    # Receiving.

    def _serve(self, listener: socket.socket) -> None:
        """Serve one connection at a time. This suffices, because usually only one rank sends, and after a restart only
        a few do."""
        while True:
            connection, _ = listener.accept()
            with connection:
                try:
                    connection.settimeout(TIMEOUT_S)
                    if not hmac.compare_digest(_receive(connection, _SECRET_BYTES), self._secret):
                        continue
                    self._keep(connection)
                    connection.sendall(b"kept")
                except (OSError, ValueError, KeyError, TypeError, fence.Fenced) as error:
                    self._refuse(connection, str(error))

    def _refuse(self, connection: socket.socket, reason: str) -> None:
        with contextlib.suppress(OSError):  # the sender may have exited
            connection.sendall(" ".join(reason.split()).encode()[:500] or b"unknown")
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(_PIECE_BYTES):
                pass  # read to the end: closing a socket with unread bytes would reset it, and the answer would be lost

    def _keep(self, connection: socket.socket) -> None:
        """Write a received copy to a slot. Raises OSError, or ValueError for anything that is not a copy."""
        header_size, size = _LENGTHS.unpack(_receive(connection, _LENGTHS.size))
        if header_size > MAX_HEADER_BYTES:
            raise CheckpointError("the header is too long")
        header = json.loads(_receive(connection, header_size))
        if header["attempt"] != fence.held_attempt():
            raise CheckpointError(f"it comes from attempt {header['attempt']}, not {fence.held_attempt()}")
        name = str(header["name"])
        if Path(name).name != name or not name.startswith("slot-"):
            raise CheckpointError("not the name of a slot")
        if self._over.is_set():
            raise CheckpointError("its run has ended")
        folder = rank_folder(self.folder, int(header["owner"]))
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / PID_NAME).write_text(str(os.getpid()))
        slot = self._slots.setdefault(folder / name, Slot(folder / name))
        slot.receive(size, lambda view: _fill(connection, view), header["note"])
        if self._over.is_set():  # `remove` was called while the copy arrived
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.folder.rmdir()  # succeeds when the last copy has been removed
            raise CheckpointError("its run has ended")
        if header["vetted"]:
            slot.vet()
            own = f"slot-a{fence.held_attempt()}-"
            # the sender is in this attempt, so its copies from former attempts are no longer needed
            if name.startswith(own):
                remove_others(folder, own)


def _partners(nodes: list[int]) -> list[int | None]:
    """Return each rank's partner: the rank with the same index on the next node. If that node has fewer ranks, several
    ranks share a partner. All are None with a single node. `nodes`: the node of each rank.
    """
    partners: list[int | None] = [None] * len(nodes)
    by_node: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    present = sorted(by_node)
    if len(present) < 2:
        return partners
    for node, following in zip(present, [*present[1:], present[0]], strict=True):
        for index, rank in enumerate(by_node[node]):
            partners[rank] = by_node[following][index % len(by_node[following])]
    return partners


def _listen() -> tuple[socket.socket, str]:
    """A listening socket, and the address at which other nodes reach it. Raises OSError."""
    store_host, store_port = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", 1))
    family, _, _, _, address = socket.getaddrinfo(store_host, store_port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # a UDP connect sends nothing; it only selects the local address for this endpoint
        own = probe.getsockname()[0]
    if own != address[0]:
        return socket.create_server((own, 0), family=family), own
    # This node hosts the store. Others reach it by the name `store_host`, which may resolve to loopback here.
    bound = own if ipaddress.ip_address(own).is_loopback else ""
    return socket.create_server((bound, 0), family=family), store_host


def _receive(connection: socket.socket, size: int) -> bytes:
    blob = bytearray(size)
    with memoryview(blob) as view:
        _fill(connection, view)
    return bytes(blob)


def _fill(connection: socket.socket, view: memoryview) -> None:
    """Read until the view is full. Raises OSError if the connection closes first."""
    done = 0
    while done < len(view):
        count = connection.recv_into(view[done : done + _PIECE_BYTES])
        if not count:
            raise ConnectionError("the connection was closed early")
        done += count
