"""Copies in memory on another node: a whole node is lost with its shared memory, and the run goes on from the tier.

Two nodes of two ranks on one machine, with folders of shared memory of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from probes.tape.events import read_events
from probes.tape.files.shared_memory import SHARED_MEMORY, remove_shared, shared_folder
from probes.tape.rundir import RunDir
from tests.fakes import ProcessEnd
from tests.processes import run_ranks
from tests.trainer.training_runs import assert_same_bits, run_loop, small, with_steps
from trainer.checkpoint import attempt_fence as fence
from trainer.checkpoint.disk_tier.manifest import CheckpointError
from trainer.checkpoint.memory_tier.peers import _LENGTHS, PeerCopies, _partners, rank_folder
from trainer.checkpoint.memory_tier.slots import Slot
from trainer.checkpoint.state import Position
from trainer.config.config import Config
from trainer.rank.loop import Session

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs /dev/shm")
STEPS = 16
ONE_LAYER = {"num_layers": 1}
LAST = 15
"""Killed after this step: the copy of step 12 has just been vetted, the disk has step 8."""


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path) -> Any:
    yield
    for node in (0, 1):
        for folder in (tmp_path, *(path for path in tmp_path.iterdir() if path.is_dir())):
            remove_shared(folder, node)


def _config(**sections: Any) -> Config:
    sections["checkpoint"] = {"interval": 8, "asynchronous": False, **sections.get("checkpoint", {})}
    return with_steps(small(model=ONE_LAYER, parallel={"dp_shard": 4}, **sections), STEPS)


def _stand_on_node(node: int, local_rank: int) -> None:
    os.environ.update(
        RANKSCOPE_NODE_RANK=str(node), GROUP_WORLD_SIZE="2", LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
    )  # fmt: skip


def _copies_arrive(session: Session) -> None:
    """Wait after each step until the copies are with the other node: one that is on its way delays the next."""
    taken = session.recovery.taken

    def taking(position: Position, batch_index: int) -> Position:
        after = taken(position, batch_index)
        for copy in session.recovery.copies.memory._copies:
            if copy.sealing is not None:
                copy.sealing.result(30)  # which sets `sending`
            if copy.sending is not None:
                copy.sending.result(30)
        return after

    session.recovery.taken = taking  # type: ignore[method-assign]


def _dies(session: Session) -> None:
    _copies_arrive(session)
    taken = session.recovery.taken

    def taking(position: Position, batch_index: int) -> Position:
        after = taken(position, batch_index)
        if position.step + 1 == LAST:
            raise ProcessEnd
        return after

    session.recovery.taken = taking  # type: ignore[method-assign]


def _events(folder: Path, attempt: int, rank: int, kind: str) -> list[dict[str, Any]]:
    events, _, _ = read_events(RunDir(folder).rank_dir(attempt, rank) / "events.jsonl")
    return [event for event in events if event["kind"] == kind]


CASES = {"lost": 13, "numbered anew": 13, "damaged": 9}
"""What happens to node 1, and the first step that is trained again."""


def _a_node_is_lost(rank: int, world_size: int, folder: Path) -> dict[str, dict[str, Any]]:
    """In each case: train until all die, lose a node's memory, train on. What was seen on this rank."""
    found = {}
    for case in CASES:
        place = folder / case
        _stand_on_node(rank // 2, rank % 2)
        with pytest.raises(ProcessEnd):
            run_loop(_config(), place, rank=rank, world_size=world_size, change=_dies)
        own = shared_folder(place)
        kept = sorted(int(path.name.removeprefix("rank-")) for path in own.glob("rank-*"))
        dist.barrier()
        if case == "numbered anew":
            _stand_on_node(1 - rank // 2, rank % 2)  # the node that came back first has the first ranks now
        elif rank == 2:
            shutil.rmtree(own)
        elif case == "damaged" and rank == 0:
            for slot in Slot.all_in(rank_folder(own, 3)):
                blob = bytearray(slot.path.read_bytes())
                blob[len(blob) // 2] ^= 8
                slot.path.write_bytes(blob)
        dist.barrier()
        again = run_loop(_config(), place, rank=rank, world_size=world_size, attempt=1)
        found[case] = {"kept": kept, "again": again, "left": shared_folder(place).exists()}
    whole = run_loop(_config(), folder / "whole", rank=rank, world_size=world_size)
    for seen in found.values():
        again = seen.pop("again")
        seen["first"] = min(again.losses)
        assert_same_bits(again, whole, steps=range(seen["first"], STEPS + 1))
    return found


def test_after_the_loss_of_a_node_the_memory_tier_is_gone_on_from(tmp_path: Path) -> None:
    """Bit for bit; also when the ranks are numbered anew; with a bit flipped in the only copy, from the disk."""
    by_rank = run_ranks(_a_node_is_lost, world_size=4, args=(tmp_path,))
    for case, first in CASES.items():
        found = [seen[case] for seen in by_rank]
        assert [each["kept"] for each in found] == [[0, 1, 2, 3]] * 4, "each node has its own copies and the other's"
        assert [each["first"] for each in found] == [first] * 4, case
        assert not any(each["left"] for each in found), "the end of a run gives the memory back on each node"
        loaded = [event for event in _events(tmp_path / case, 1, 0, "checkpoint") if event["state"] == "loaded"]
        tier = "memory" if first == 13 else "disk"
        assert [(event["tier"], event["step"]) for event in loaded] == [(tier, first - 1)]
        for rank in range(4):
            (told,) = _events(tmp_path / case, 0, rank, "peer_copy")
            assert (told["state"], told["peer_rank"], told["peer_node"]) == ("complete", (rank + 2) % 4, 1 - rank // 2)
            assert told["bytes"] > 10_000


def _without_peers(rank: int, world_size: int, folder: Path) -> None:
    """With `checkpoint.memory_on_peer` = false a rank of several nodes keeps its copies, and no other's."""
    config = with_steps(small(parallel={"dp_shard": 2}, checkpoint={"memory_on_peer": False, "memory_interval": 1}), 6)
    seen: set[int] = set()

    def looked_at(session: Session) -> None:
        copies = session.recovery.copies
        taken = session.recovery.taken

        def taking(position: Position, batch_index: int) -> Position:
            after = taken(position, batch_index)
            seen.update(int(path.name.removeprefix("rank-")) for path in shared_folder(folder).glob("rank-*"))
            return after

        assert copies.memory.peers is None
        session.recovery.taken = taking  # type: ignore[method-assign]

    run_loop(config, folder, rank=rank, world_size=world_size, change=looked_at)
    assert seen == {rank}, seen
    assert not _events(folder, 0, rank, "peer_copy")


def _a_peer_is_deaf(rank: int, world_size: int, folder: Path) -> list[str]:
    _stand_on_node(rank, 0)
    _without_peers(rank, world_size, folder / "without")
    config = with_steps(small(model=ONE_LAYER, parallel={"dp_shard": 2}), STEPS)

    def deaf(session: Session) -> None:
        _copies_arrive(session)
        peers = session.recovery.copies.memory.peers
        assert peers is not None
        if rank == 1:
            peers._keep = lambda connection: (_ for _ in ()).throw(OSError("no space"))  # type: ignore[method-assign]

    run_loop(config, folder, rank=rank, world_size=world_size, change=deaf)
    return [f"{event['state']}: {event.get('reason', '')}" for event in _events(folder, 0, rank, "peer_copy")]


def test_a_peer_that_refuses_copies_is_reported_once(tmp_path: Path) -> None:
    first, second = run_ranks(_a_peer_is_deaf, world_size=2, args=(tmp_path,))
    assert first == ["failed: rank 1 on node 1 did not keep the copy: no space"]
    assert second == ["complete: "]


def test_partners_are_on_another_node_and_share_the_work() -> None:
    assert _partners([0, 0, 1, 1]) == [2, 3, 0, 1]
    assert _partners([0, 0, 0, 2]) == [3, 3, 3, 0]
    assert _partners([0, 0]) == [None, None]
    assert _partners([0, 1, 2]) == [1, 2, 0]
    assert _partners([5, 0, 5, 0]) == [1, 0, 3, 2]


def test_partners_of_many_ranks_are_found_in_one_pass() -> None:
    """Every rank finds those of all ranks at the start of each attempt: 4,096 took nine seconds."""
    nodes = [rank // 8 for rank in range(4096)]
    start = time.thread_time()
    assert _partners(nodes)[4095] == 7
    assert time.thread_time() - start < 0.5


def test_bytes_that_changed_on_their_way_are_no_copy(tmp_path: Path) -> None:
    live = {"w": torch.arange(1000.0)}
    sent = Slot(tmp_path / "sent")
    sent.allocate(live)["w"].copy_(live["w"])
    sent.seal({"values": {"position": {"step": 12}}}, {})
    content, note = sent.path.read_bytes(), sent.note_path.read_text()
    kept = Slot(tmp_path / "kept")

    def arrives(content: bytes) -> Callable[[memoryview], None]:
        return lambda region: region.__setitem__(slice(None), content)

    kept.receive(len(content), arrives(content), note)
    assert torch.equal(kept.open()[1]["w"], live["w"])
    kept.vet()
    flipped = content[:2000] + bytes([content[2000] ^ 1]) + content[2001:]
    with pytest.raises(CheckpointError, match="does not have the hash that it was sent with"):
        kept.receive(len(content), arrives(flipped), note)
    assert (kept.step, kept.vetted) == (-1, False), "neither what came nor what was there before is a copy"


@pytest.mark.parametrize("ends", ["before it comes", "while it comes"])
def test_a_copy_that_comes_after_the_end_leaves_no_memory_behind(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = PeerCopies(tmp_path / "node", rank=0)
    peers.hosted = {1}
    (tmp_path / "node").mkdir()
    header = {"owner": 1, "name": "slot-a0-0", "attempt": fence.held_attempt(), "vetted": False, "note": "{}"}
    if ends == "before it comes":
        peers.remove(at_end=True)
    else:
        monkeypatch.setattr(Slot, "receive", lambda slot, *_: (slot.path.write_bytes(b"x"), peers.remove(at_end=True)))
    here, there = socket.socketpair()
    with here, there:
        blob = json.dumps(header).encode()
        there.sendall(_LENGTHS.pack(len(blob), 0) + blob)
        with pytest.raises(CheckpointError, match="has ended"):
            peers._keep(here)
    assert not list(tmp_path.glob("node/*"))


@pytest.mark.parametrize(
    "blob", [b"", b"x" * 100, b"\0" * 32 + b"\0" * 12, b"y" * 5000], ids=["nothing", "noise", "wrong secret", "long"]
)
def test_a_client_without_the_secret_writes_nothing(blob: bytes, tmp_path: Path) -> None:
    peers = PeerCopies(tmp_path, rank=0)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=peers._serve, args=(listener,), daemon=True).start()
    for _ in range(2):  # the first does not keep it from serving the second
        with socket.create_connection(listener.getsockname(), timeout=100) as connection:
            answer = b""
            with contextlib.suppress(OSError):  # it hangs up
                connection.sendall(blob)
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(100)
            assert answer in (b"", b"the connection was closed early")
    assert not list(tmp_path.iterdir())
