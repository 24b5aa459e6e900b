"""Restore from in-memory copies that outlived their processes: choose one state for all ranks, and give each rank its
part.

    found = newest_survivor(folder, mesh, rank, world_size, peers, ledger, min_step=40)     # all ranks; or None
    found.copy, found.note              # this rank's part, with its hash verified

1. Every node lists the copies in its shared memory: copies of its own ranks, and copies kept for others.
2. A state is usable if every rank's part is on some node, healthy steps followed, and none of its batches was skipped
   later. The newest usable state is tried first.
3. If a rank's node lacks the rank's part (it is a different node, or has lost its memory), the rank receives the part
   from a node that has it.
4. If a part has a wrong hash, its rank tries the next location. After the last location, all ranks try the next state.

A restarted process may have a different rank and thus a different part, so parts are looked up by rank. A state is
identified by its step and origin: the attempt, and its number of rollbacks when the copy was taken. So a copy of a
rolled-back step is not mixed with copies of the same step reached again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from probes.guard.ledger import Ledger
from probes.tape.files.shared_memory import this_node
from trainer.checkpoint import attempt_fence as fence
from trainer.checkpoint.agreement import gather_from_all
from trainer.checkpoint.disk_tier.manifest import CheckpointError
from trainer.checkpoint.memory_tier.host_copy import HostCopy
from trainer.checkpoint.memory_tier.peers import PeerCopies, rank_folder
from trainer.checkpoint.memory_tier.slots import Slot
from trainer.checkpoint.state import Values

__all__ = ["Survivor", "newest_survivor", "remove_unused", "state_of"]

State = tuple[int, int, int]
"""(step, attempt, rollbacks): identifies copies of one state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """This rank's part of a state, in memory private to this process."""

    copy: HostCopy
    note: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredCopy:
    """One copy on one node, as its note describes it."""

    node: int
    keeper: int
    """Rank that listed this copy and can send it."""
    owner: int
    state: State
    name: str
    vetted: bool
    stale: bool


def state_of(note: Mapping[str, Any]) -> State:
    """State of the copy that a note describes. Raises KeyError, TypeError or ValueError for a malformed note."""
    attempt, num_rollbacks = note["origin"]
    return int(note["values"]["position"]["step"]), int(attempt), int(num_rollbacks)


def newest_survivor(
    folder: Path | None, mesh: Mapping[str, Any], rank: int, world_size: int, peers: PeerCopies | None, ledger: Ledger,
    *, min_step: int,
) -> Survivor | None:  # fmt: skip
    """Return this rank's part of the newest usable state of step `min_step` or later. All ranks; collective.

    `mesh`: the layout. A copy fits if its layout is the same; only the value "rank" may differ.
    """
    listed = [] if folder is None else [asdict(stored) for stored in _list(folder, mesh, rank, ledger)]
    stored = [
        _StoredCopy(**each | {"state": tuple(each["state"])}) for part in gather_from_all(listed) for each in part
    ]
    for state in _usable(stored, world_size):
        if state[0] < min_step:
            break
        found = _collect([each for each in stored if each.state == state], folder, rank, world_size, peers)
        if found is not None:
            return found
    return None


def _list(folder: Path, mesh: Mapping[str, Any], rank: int, ledger: Ledger) -> Iterable[_StoredCopy]:
    """List the copies on this node that fit the layout. The node's ranks share the work: each reads the copies of some
    owners."""
    local_rank, count = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    for place in sorted(folder.glob("rank-*")):
        for slot in Slot.all_in(place):
            with contextlib.suppress(CheckpointError, KeyError, TypeError, ValueError):
                owner, note = int(place.name.removeprefix("rank-")), slot.note()
                if owner % count != local_rank % count or note["mesh"] != {**mesh, "rank": owner}:
                    continue
                position = Values.from_json(note["values"]).position
                stale = ledger.trained_on_skipped(Ledger.from_json(note["extra"]["ledger"]), position.batch_index)
                yield _StoredCopy(
                    node=this_node(),
                    keeper=rank,
                    owner=owner,
                    state=state_of(note),
                    name=slot.path.name,
                    vetted=slot.vetted,
                    stale=stale,
                )


def _usable(stored: list[_StoredCopy], world_size: int) -> list[State]:
    """States that were vetted, contain no skipped batch, and have every rank's part on some node; newest first."""
    usable = []
    for state in {each.state for each in stored}:
        parts = [each for each in stored if each.state == state]
        # A step is healthy on all ranks or on none, so a copy vetted by one rank counts as vetted on all.
        is_vetted, is_stale = any(each.vetted for each in parts), any(each.stale for each in parts)
        if is_vetted and not is_stale and {each.owner for each in parts} >= set(range(world_size)):
            usable.append(state)
    return sorted(usable, reverse=True)


def _collect(
    parts: list[_StoredCopy], folder: Path | None, rank: int, world_size: int, peers: PeerCopies | None
) -> Survivor | None:
    """Fetch every rank's part of a state from a location with an intact copy. Returns this rank's part; None on all
    ranks if any part is lost."""
    nodes = gather_from_all(this_node())
    at = {(each.owner, each.node, each.name): each for each in parts if each.owner < world_size}
    places: dict[int, list[_StoredCopy]] = {owner: [] for owner in range(world_size)}
    # Copies on the owner's node come first.
    for owner, node, name in sorted(at, key=lambda key: (key[1] != nodes[key[0]], key)):
        places[owner].append(at[owner, node, name])
    found: Survivor | None = None
    missing = set(range(world_size))
    while missing:
        if any(not places[owner] for owner in missing):
            return None
        tried = {owner: places[owner].pop(0) for owner in sorted(missing)}
        arrived = {
            owner: stored.name if stored.node == nodes[owner] else _arrival(stored) for owner, stored in tried.items()
        }
        for owner, stored in tried.items():
            if stored.node != nodes[owner] and stored.keeper == rank and peers is not None and folder is not None:
                with contextlib.suppress(OSError, CheckpointError):  # if sending fails, the owner sees no copy arrive
                    slot = Slot(rank_folder(folder, owner) / stored.name)
                    peers.send(slot, owner=owner, to=owner, name=arrived[owner])
        gather_from_all(None)  # this is a barrier: after it, everything that was sent has arrived
        if rank in missing and folder is not None:
            found = _open(rank_folder(folder, rank) / arrived[rank], tried[rank].state)
        has_it = gather_from_all(rank not in missing or found is not None)
        missing = {owner for owner in missing if not has_it[owner]}
    return found


def _open(path: Path, state: State) -> Survivor | None:
    try:
        note, tensors, rng = Slot(path).open()
        if state_of(note) != state:
            return None
        copy = HostCopy()
        copy.values, copy.tensors, copy.rng = Values.from_json(note["values"]), tensors, rng
    except (CheckpointError, KeyError, TypeError, ValueError):
        return None
    return Survivor(copy=copy, note=note)


def _arrival(stored: _StoredCopy) -> str:
    """Name that a copy from another node gets on its owner's node."""
    return f"slot-from-{stored.node}-in-{fence.held_attempt()}-{stored.name.removeprefix('slot-')}"


def remove_unused(folder: Path | None, peers: PeerCopies | None, rank: int) -> None:
    """Delete on each node the copies of ranks that are gone or no longer keep copies there. Collective; all removals
    are done when it returns, so new copies may be taken.
    """
    nodes = gather_from_all({"node": this_node(), "keeps": [rank, *(peers.hosted if peers is not None else ())]})
    here = [other for other, each in enumerate(nodes) if each["node"] == this_node()]
    if folder is not None and rank == here[0]:
        kept = {rank_folder(folder, owner) for other in here for owner in nodes[other]["keeps"]}
        for path in folder.glob("rank-*"):
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)
    gather_from_all(None)
