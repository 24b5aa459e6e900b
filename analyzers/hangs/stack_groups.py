"""Python stacks of many processes by what they do: who does something else than the others.

    groups = group([Stack(pid=11, rank=0, frames=("a.py:3 wait", "b.py:9 main")), ...])
    odd = odd_ones(groups)              # the processes outside of the majority, () if there is none

For a job that hangs and was never recorded. The same stack on most ranks is where they wait; whoever is elsewhere is
looked at first. That is a hint and no proof: a stack says nothing of sequence numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Stack", "StackGroup", "group", "odd_ones"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The main thread of one process, innermost frame first, each as `file:line function`. `rank` None: not known.

    `os_state` is the letter of /proc; `problem` says why there are no frames.
    """

    pid: int
    rank: int | None = None
    frames: tuple[str, ...] = ()
    os_state: str = ""
    problem: str = ""

    @property
    def is_stopped(self) -> bool:
        """Stopped by a signal or a debugger: it does nothing, whatever its stack says."""
        return self.os_state in ("T", "t")

    @property
    def name(self) -> str:
        """The rank if it is known, else the process."""
        return f"pid {self.pid}" if self.rank is None else f"rank {self.rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackGroup:
    """Processes with the same frames."""

    frames: tuple[str, ...]
    members: tuple[Stack, ...]


def group(stacks: Sequence[Stack]) -> list[StackGroup]:
    """The largest group first. Stopped processes, and those without frames, are groups of their own kind."""
    found: dict[tuple[object, ...], list[Stack]] = {}
    for stack in stacks:
        found.setdefault((stack.is_stopped, stack.problem, *stack.frames), []).append(stack)
    ordered = sorted(found.values(), key=lambda members: (-len(members), members[0].pid))
    return [StackGroup(frames=members[0].frames, members=tuple(sorted(members, key=_order))) for members in ordered]


def odd_ones(groups: Sequence[StackGroup]) -> tuple[Stack, ...]:
    """Stopped processes; else those outside of the group that more than half are in. Without such a group, nobody."""
    everybody = [stack for group_ in groups for stack in group_.members]
    if stopped := [stack for stack in everybody if stack.is_stopped]:
        return tuple(stopped)
    if not groups or 2 * len(groups[0].members) <= len(everybody):
        return ()
    return tuple(stack for group_ in groups[1:] for stack in group_.members)


def _order(stack: Stack) -> tuple[int, int]:
    return (-1 if stack.rank is None else stack.rank, stack.pid)
