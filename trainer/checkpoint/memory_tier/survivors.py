"""Copies in memory that outlived their processes: choose a state for all ranks, and give each rank its part.

    found = newest_survivor(folder, mesh, peers, ledger, newer_than=40)     # all ranks; None if there is none
    found.copy, found.note                                                  # this rank's, its hash compared

1. Every node lists the copies in its shared memory: those of its own ranks, and those that it keeps for others.
2. A state is usable if every rank's part is on some node, healthy steps followed it, and it includes no batch that was
   skipped since. The newest is tried first.
3. A rank whose node lacks its part (a different node, or lost memory) receives it from a node that has it.
4. If a hash differs on any rank, the next location and then the next state is tried. A rank may have another number
   than before and thus another part, so its part is looked up, not assumed. One state is known by its step and its
   origin, the attempt and the number of rollbacks that this attempt had made when the copy was taken: a copy of a step
   that was rolled back must not be mixed with copies of the same step reached again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
"""(step, attempt, rollbacks): what copies of one state have in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """This rank's part of a state, in memory of this process."""

    copy: HostCopy
    note: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Left:
    """A copy that lies somewhere, by its note."""

    node: int
    keeper: int
    """Rank that listed it, and would send it."""
    owner: int
    state: State
    name: str
    vetted: bool
    stale: bool


def state_of(note: Mapping[str, Any]) -> State:
    """State of the copy that a note belongs to. Raises KeyError, TypeError or ValueError for another note."""
    attempt, rewinds = note["origin"]
    return int(note["values"]["position"]["step"]), int(attempt), int(rewinds)


def newest_survivor(
    folder: Path | None, mesh: Mapping[str, Any], rank: int, world_size: int, peers: PeerCopies | None, ledger: Ledger,
    *, newer_than: int,
) -> Survivor | None:  # fmt: skip
    """This rank's part of the newest usable state whose step is at least `newer_than`. All ranks; collective.

    `mesh` is what must be the same for a copy to fit; its "rank" is left out.
    """
    listed = [] if folder is None else [_plain(left) for left in _list(folder, mesh, rank, ledger)]
    left = [_Left(**each | {"state": tuple(each["state"])}) for part in gather_from_all(listed) for each in part]
    for state in _usable(left, world_size):
        if state[0] < newer_than:
            break
        found = _collect([each for each in left if each.state == state], folder, rank, world_size, peers)
        if found is not None:
            return found
    return None


def _list(folder: Path, mesh: Mapping[str, Any], rank: int, ledger: Ledger) -> Iterable[_Left]:
    """The usable copies on this node. Its ranks share the work: each reads some owners' copies."""
    local_rank, count = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    for place in sorted(folder.glob("rank-*")):
        for slot in Slot.all_in(place):
            with contextlib.suppress(CheckpointError, KeyError, TypeError, ValueError):
                owner, note = int(place.name.removeprefix("rank-")), slot.note()
                if owner % count != local_rank % count or note["mesh"] != {**mesh, "rank": owner}:
                    continue
                position = Values.from_json(note["values"]).position
                stale = ledger.gave_up_since(Ledger.from_json(note["extra"]["ledger"]), position.batch_index)
                yield _Left(
                    node=this_node(),
                    keeper=rank,
                    owner=owner,
                    state=state_of(note),
                    name=slot.path.name,
                    vetted=slot.vetted,
                    stale=stale,
                )


def _usable(left: list[_Left], world_size: int) -> list[State]:
    """States that every rank has somewhere, newest first."""
    usable = []
    for state in {each.state for each in left}:
        parts = [each for each in left if each.state == state]
        # Healthy steps are those of the whole run: one rank that came to vetting a copy speaks for all.
        is_vetted, is_stale = any(each.vetted for each in parts), any(each.stale for each in parts)
        if is_vetted and not is_stale and {each.owner for each in parts} >= set(range(world_size)):
            usable.append(state)
    return sorted(usable, reverse=True)


def _collect(
    parts: list[_Left], folder: Path | None, rank: int, world_size: int, peers: PeerCopies | None
) -> Survivor | None:
    """Every rank's part of a state from wherever it is whole; None on all ranks if one cannot be had."""
    nodes = gather_from_all(this_node())
    places: dict[int, list[_Left]] = {}
    for owner in range(world_size):
        at = {(each.node, each.name): each for each in parts if each.owner == owner}
        own = [place for place in sorted(at) if place[0] == nodes[owner]]
        places[owner] = [at[place] for place in (*own, *sorted(at.keys() - {*own}))]
    found: Survivor | None = None
    missing = set(range(world_size))
    while missing:
        if any(not places[owner] for owner in missing):
            return None
        tried = {owner: places[owner].pop(0) for owner in sorted(missing)}
        arrived = {owner: left.name if left.node == nodes[owner] else _arrival(left) for owner, left in tried.items()}
        for owner, left in tried.items():
            if left.node != nodes[owner] and left.keeper == rank and peers is not None and folder is not None:
                with contextlib.suppress(OSError, CheckpointError):  # the owner sees that nothing came
                    slot = Slot(rank_folder(folder, owner) / left.name)
                    peers.send(slot, owner=owner, to=owner, name=arrived[owner])
        gather_from_all(None)  # what was sent is there
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


def _arrival(left: _Left) -> str:
    """The name under which a copy from another node lies on its owner's."""
    return f"slot-from-{left.node}-in-{fence.held_attempt()}-{left.name.removeprefix('slot-')}"


def remove_unused(folder: Path | None, peers: PeerCopies | None, rank: int) -> None:
    """Remove memory on each node of ranks that are gone or no longer keep copies there. Collective; when it returns all
    removals are done, so new copies may be taken.
    """
    nodes = gather_from_all({"node": this_node(), "keeps": [rank, *(peers.hosted if peers is not None else ())]})
    here = [other for other, each in enumerate(nodes) if each["node"] == this_node()]
    if folder is not None and rank == here[0]:
        kept = {rank_folder(folder, owner) for other in here for owner in nodes[other]["keeps"]}
        for path in folder.glob("rank-*"):
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)
    gather_from_all(None)


def _plain(left: _Left) -> dict[str, Any]:
    return {name: getattr(left, name) for name in _Left.__slots__}
