"""Match NCCL communicators with process groups.

    for communicator, label, members, is_from_plugin in groups_of_communicators(communicators, groups):
        ...

Torch names communicators only in some versions, and creates them with the group or at its first call. For these reasons
a communicator is matched as follows:

1. Candidates are the groups of the communicator's rank that have as many members as the communicator. Every rank that
   reports the communicator's hash must have the same index in the group as in the communicator.
2. A candidate with the communicator's name is the match.
3. Otherwise, candidates and communicators with equal members are paired in order of creation.
4. Without a candidate (a program without torch, a communicator of a library) the label is composed of the
   communicator's name, size and hash, which are equal on all its ranks and do not change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Communicator", "Group", "groups_of_communicators"]


@dataclass(frozen=True, slots=True)
class Communicator:
    """A row of table `nccl_communicators`."""

    attempt: int
    rank: int
    communicator: int
    comm_hash: int | None
    comm_name: str | None
    num_ranks: int | None
    comm_rank: int | None
    created_ns: int | None
    is_alive: bool


@dataclass(frozen=True, slots=True)
class Group:
    """A row of table `process_groups`."""

    attempt: int
    rank: int
    label: str
    description: str | None
    group_name: str | None
    members: tuple[int, ...]
    is_from_plugin: bool
    """True if only NCCL's profiler plugin records its calls."""

    def holds(self, places: dict[int, int]) -> bool:
        """Return True if the group has these ranks at these indices."""
        return all(place < len(self.members) and self.members[place] == rank for place, rank in places.items())


def groups_of_communicators(
    communicators: Sequence[Communicator], groups: Sequence[Group]
) -> Iterator[tuple[Communicator, str, tuple[int, ...], bool]]:
    """Yield (communicator, label of its group, members, True if only the plugin records its calls). The members are ()
    if they are unknown.

    Both arguments are in order of creation.
    """
    places: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for comm in communicators:
        if comm.comm_hash is not None and comm.comm_rank is not None:
            places[comm.attempt, comm.comm_hash][comm.comm_rank] = comm.rank
    by_rank: dict[tuple[int, int], list[Group]] = defaultdict(list)
    for group in groups:
        if group not in by_rank[group.attempt, group.rank]:
            by_rank[group.attempt, group.rank].append(group)
    taken: set[tuple[int, int, str]] = set()
    for comm in communicators:
        known = places[comm.attempt, comm.comm_hash] if comm.comm_hash is not None else {}
        candidates = [
            group
            for group in by_rank[comm.attempt, comm.rank]
            if comm.num_ranks in (None, len(group.members)) and group.holds(known)
        ]
        named = [
            group for group in candidates if comm.comm_name and comm.comm_name in (group.group_name, group.description)
        ]
        free = [group for group in candidates if (comm.attempt, comm.rank, group.label) not in taken]
        chosen = next(iter(named if len(named) == 1 else free), None)
        if chosen is None:
            members = tuple(known[place] for place in sorted(known)) if len(known) == comm.num_ranks else ()
            yield comm, _label(comm), members, True
            continue
        taken.add((comm.attempt, comm.rank, chosen.label))
        yield comm, chosen.label, chosen.members, chosen.is_from_plugin


def _label(comm: Communicator) -> str:
    mark = f"{(comm.comm_hash or 0) % 2**64:016x}"[:6]
    return f"{(comm.comm_name or 'nccl').replace(':', '_')}:n={comm.num_ranks or '?'}@{mark}"
