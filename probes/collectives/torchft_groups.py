"""Groups of torchft, which bypass `torch.distributed` and are created again for each quorum.

    groups = TorchftGroups(rank=0, world_size=2)
    groups.record()                     # after the first step: by then its quorum has a group
    groups.release()

A torchft wrapper holds the group in use, so the group inside the wrapper is recorded, now and after each new quorum.
Such a group spans replicas, and torchft derives a global rank from the digits at the end of a replica's id. So its
ranks can be identified only if one launch holds all replicas. Otherwise nothing is recorded, because rank 1 of another
launch is not a rank of this run.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ..fail_open import failing_open
from .wrapped import RecordedGroup, recorded_over

__all__ = ["TorchftGroups"]

_MODULE = "torchft.process_group"
_WRAPPER = "ProcessGroupWrapper"


class TorchftGroups:
    """The groups of one rank; does nothing if torchft is not imported."""

    def __init__(self, *, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._undo: list[Callable[[], object]] = []

    def record(self) -> None:
        """Record the groups that the wrappers hold now and later."""
        base = getattr(sys.modules.get(_MODULE), _WRAPPER, None)
        if base is None or self._undo:
            return
        for kind in _subclasses(base):
            if "_create_pg" in vars(kind):
                self._wrap(kind)
        for wrapper in _wrappers(base):
            with failing_open("collectives.torchft"):
                wrapper._pg = self._recorded(wrapper, wrapper._pg)

    def release(self) -> None:
        """Let every wrapper hold torch's own group again."""
        while self._undo:
            self._undo.pop()()
        base = getattr(sys.modules.get(_MODULE), _WRAPPER, None)
        for wrapper in _wrappers(base) if base is not None else ():
            if type(wrapper._pg) is RecordedGroup:
                wrapper._pg = wrapper._pg.plain

    def _wrap(self, kind: Any) -> None:
        real = kind._create_pg

        @functools.wraps(real)
        def create(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
            made = real(wrapper, *args, **kwargs)
            with failing_open("collectives.torchft"):
                return self._recorded(wrapper, made)
            return made

        kind._create_pg = create
        self._undo.append(lambda: setattr(kind, "_create_pg", real))

    def _recorded(self, wrapper: Any, made: Any) -> Any:
        members: Any = getattr(wrapper, "_global_ranks", None)
        if made is None or type(made) is RecordedGroup or not self._are_ours(members, made):
            return made
        group = recorded_over(made)
        if type(group) is RecordedGroup:
            group.members = list(members)
            # All members get the same label, and a new one after each change of the quorum.
            group._set_group_desc(f"torchft_{_number_of(wrapper) & 0xFFFF:x}")
        return group

    def _are_ours(self, members: Any, made: Any) -> bool:
        """Return True if these are different ranks of this run, in the order of the group's ranks."""
        return (
            isinstance(members, list)
            and len(set(members)) == len(members) == made.size()
            and members[made.rank()] == self._rank
            and all(0 <= member < self._world_size for member in members)
        )


def _number_of(wrapper: Any) -> int:
    """The communicator's number; in torchft up to 0.2, the quorum's number."""
    return getattr(wrapper, "_uuid", None) or getattr(wrapper, "_quorum_id", None) or 0


def _subclasses(base: Any) -> Iterator[Any]:
    for kind in base.__subclasses__():
        yield kind
        yield from _subclasses(kind)


def _wrappers(base: Any) -> list[Any]:
    return [found for found in gc.get_objects() if issubclass(type(found), base)]
