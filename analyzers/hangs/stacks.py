"""Python stacks of a hung job: read the ranks' stack files, group equal stacks, and find processes that differ.

    read_stack(run.stacks, attempt=0, rank=3)       # ["trainer/rank/loop.py:120 train_step", ...]
    groups = group([Stack(pid=11, rank=0, frames=("a.py:3 wait", "b.py:9 main")), ...])
    odd = outlying_stacks(groups)                          # processes outside of the majority, () if there is none
    StacksAtHang(run.stacks, roles_of(source, attempt=0)).of(view, culprits)     # groups for a finding's evidence

faulthandler writes the files. They are not trusted: sizes are bounded, links are not followed, and reports escape text.
The stack that most ranks share shows where they wait. A different stack is a hint, not a proof, because stacks hold no
sequence numbers. Ranks are compared within their own stage, because the stages of a pipeline wait in different places.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analyzers.hangs.waiting_calls import MAX_LISTED
from analyzers.run.calls.snapshot import AttemptView, RankView
from analyzers.run.ends.exceptions import Frame, is_ours
from analyzers.source import Source, missing_tables
from analyzers.wording import number_ranges
from probes.tape.files.safe_open import folder_problem, open_plain

__all__ = [
    "Role",
    "Stack",
    "StackGroup",
    "StacksAtHang",
    "group",
    "is_library",
    "outlying_stacks",
    "parse_stack",
    "read_stack",
    "roles_of",
]

MAX_BYTES = 256 << 10
MAX_FRAMES = 6
MAX_GROUPS = 8
MAX_READ = 8192
"""Maximum number of stack files that are read."""
_FRAME = re.compile(r'^\s*File "([^"]{1,500})", line (\d{1,9}) in (.{1,200})$')
_BLOCK = re.compile(r"^(Current thread|Thread|Stack) ", re.MULTILINE)
_LIBRARY = re.compile(
    r"/(site|dist)-packages/torch/|(^|/)torch/(_|autograd|cuda|distributed|nn|optim|utils)|/threading\.py$|/selectors\.py$"
)
"""Files of torch, installed or built from source, and of Python's own waits."""
_SHORTENED = re.compile(r"^(distributed/distributed_c10d|autograd/graph|[\w.]+/(threading|selectors))\.py:")
"""Matches frames in which torch or Python waits, with the path shortened to its last folder by `parse_stack`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The stack of one process's main thread. `frames`: innermost first, each as `file:line function`.

    `rank` is None if unknown. `os_state` is the letter of the process's state in /proc. `problem` is the reason why
    there are no frames.
    """

    pid: int
    rank: int | None = None
    frames: tuple[str, ...] = ()
    os_state: str = ""
    problem: str = ""

    @property
    def is_stopped(self) -> bool:
        """True if the process is stopped by a signal or a debugger, and so makes no progress, whatever its stack."""
        return self.os_state in ("T", "t")

    @property
    def name(self) -> str:
        """Text that names the rank. If the rank is unknown, it names the process."""
        return f"pid {self.pid}" if self.rank is None else f"rank {self.rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackGroup:
    """Processes with the same frames."""

    frames: tuple[str, ...]
    members: tuple[Stack, ...]


def read_stack(stacks_dir: Path, attempt: int, rank: int) -> list[str]:
    """The newest stack of a rank's main thread, innermost first; empty if there is none."""
    path = stacks_dir / f"attempt-{attempt}-rank-{rank:05d}.txt"
    try:
        if folder_problem(stacks_dir):
            return []
        with open(open_plain(path), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_BYTES))
            text = file.read(MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    return parse_stack(text)


def parse_stack(text: str) -> list[str]:
    """Frames of the current thread in the last dump. Frames of torch and Rankscope are left out, unless there are no
    others."""
    starts = [match for match in _BLOCK.finditer(text) if match[1] != "Thread"]
    if not starts:
        return []
    block = text[starts[-1].start() :]
    following = _BLOCK.search(block, 1)
    block = block[: following.start()] if following else block
    frames = [match for line in block.splitlines() if (match := _FRAME.match(line))]
    relevant = [frame for frame in frames if not _LIBRARY.search(frame[1]) and not is_ours(frame[1])] or frames
    users = (frame for frame in relevant if not Frame(path=frame[1], line=0, function="").is_library)
    shown = relevant[:MAX_FRAMES]
    if (user := next(users, None)) is not None and user not in shown:
        shown = [*shown[:-1], user]  # the user's frame is below many frames of a library that it called
    return [f"{'/'.join(frame[1].split('/')[-2:])}:{frame[2]} {frame[3]}" for frame in shown]


def is_library(frame: str) -> bool:
    """Return True if a frame of `parse_stack` is not user code: torch or Python waits there."""
    return bool(_SHORTENED.match(frame))


def group(stacks: Sequence[Stack]) -> list[StackGroup]:
    """The largest group first. Stopped processes, and those without frames, form separate groups."""
    found: dict[tuple[object, ...], list[Stack]] = {}
    for stack in stacks:
        found.setdefault((stack.is_stopped, stack.problem, *stack.frames), []).append(stack)
    ordered = sorted(found.values(), key=lambda members: (-len(members), members[0].pid))
    return [StackGroup(frames=members[0].frames, members=tuple(sorted(members, key=_order))) for members in ordered]


def outlying_stacks(groups: Sequence[StackGroup]) -> tuple[Stack, ...]:
    """Return the stopped processes. If none is stopped and one group has more than half of all processes, return the
    processes outside this group; otherwise none.
    """
    stacks = [stack for group_ in groups for stack in group_.members]
    if stopped := [stack for stack in stacks if stack.is_stopped]:
        return tuple(stopped)
    if not groups or 2 * len(groups[0].members) <= len(stacks):
        return ()
    return tuple(stack for group_ in groups[1:] for stack in group_.members)


def _order(stack: Stack) -> tuple[int, int]:
    return (-1 if stack.rank is None else stack.rank, stack.pid)


@dataclass(frozen=True, slots=True, order=True)
class Role:
    """A rank's coordinates in the dimensions that give ranks different work; -1 for a dimension that the job lacks."""

    stage: int = -1
    tp: int = -1


def roles_of(source: Source, attempt: int) -> dict[int, Role]:
    """Each rank's role in an attempt; only dimensions with more than one coordinate count."""
    if missing_tables(source, "ranks"):
        return {}
    rows = source.rows(
        """
        SELECT rank, arg_max(pp, wall_ns), arg_max(tp, wall_ns) FROM ranks WHERE attempt = ? AND rank >= 0 GROUP BY rank
        """,
        [attempt],
    )
    stages, places = {row[1] for row in rows} - {None}, {row[2] for row in rows} - {None}
    return {
        rank: Role(
            stage=stage if stage is not None and len(stages) > 1 else -1,
            tp=place if place is not None and len(places) > 1 else -1,
        )
        for rank, stage, place in rows
    }


@dataclass(frozen=True, slots=True)
class StacksAtHang:
    """The folder of a run's stacks, and the role of each of its ranks."""

    folder: Path
    roles: Mapping[int, Role]

    def of(self, view: AttemptView, culprits: Sequence[int]) -> list[dict[str, Any]]:
        """Groups for a finding's evidence; empty if no rank wrote a stack.

        Groups with a culprit come first, then groups with a rank that differs from its peers, then the largest; the
        rest is counted.
        """
        alive = [rank for rank, state in sorted(view.ranks.items()) if not state.closed][:MAX_READ]
        stacks = [self._stack(view.ranks[rank], view.attempt) for rank in alive]
        if not any(stack.frames for stack in stacks):
            return []
        odd = self._odd(stacks)
        blamed = set(culprits)
        found: dict[tuple[str, tuple[str, ...], bool], list[int]] = {}
        for stack in stacks:
            rank = _rank(stack)
            found.setdefault((_doing(view.ranks[rank]), stack.frames, rank in odd), []).append(rank)
        ordered = sorted(
            found.items(),
            key=lambda item: (blamed.isdisjoint(item[1]), not item[0][2], -len(item[1]), item[1][0]),
        )
        listed = [
            {
                "ranks": ranks[:MAX_LISTED],
                "num_ranks": len(ranks),
                "role": self._role(ranks),
                "doing": doing,
                "is_odd": is_odd,
                "frames": list(frames),
            }
            for (doing, frames, is_odd), ranks in ordered[:MAX_GROUPS]
        ]
        rest = [rank for _, ranks in ordered[MAX_GROUPS:] for rank in ranks]
        return [*listed, {"num_ranks": len(rest), "is_rest": True}] if rest else listed

    def _stack(self, state: RankView, attempt: int) -> Stack:
        frames = tuple(read_stack(self.folder, attempt, state.rank))
        return Stack(pid=state.rank, rank=state.rank, frames=frames, os_state="T" if state.state == "stopped" else "")

    def _odd(self, stacks: Sequence[Stack]) -> set[int]:
        """Return the stopped ranks. A stage without a stopped rank contributes the ranks that differ from more than
        half of the stage. This is possible only with three ranks or more."""
        by_stage: dict[int, list[Stack]] = {}
        for stack in stacks:
            by_stage.setdefault(self.roles.get(_rank(stack), Role()).stage, []).append(stack)
        return {_rank(stack) for peers in by_stage.values() for stack in outlying_stacks(group(peers))}

    def _role(self, ranks: Sequence[int]) -> str:
        roles = [self.roles.get(rank, Role()) for rank in ranks]
        stages = Counter(role.stage for role in roles if role.stage >= 0)
        places = Counter(role.tp for role in roles if role.tp >= 0)
        texts = [f"stage{'s' * (len(stages) > 1)} {_few(stages)}"] if stages else []
        return ", ".join([*texts, *([f"tp rank{'s' * (len(places) > 1)} {_few(places)}"] if places else [])])


def _doing(state: RankView) -> str:
    """Phase and operation of a rank, without the group's name and the call's number, which differ between ranks with
    the same activity."""
    if state.state == "stopped":
        return "stopped"
    call = min(state.calls, key=lambda call: call.issue_ns, default=None)
    if call is None:
        return state.doing
    phase = call.phase or (state.phases[-1] if state.phases else "")
    return f"in {phase}, {call.op}" if phase not in ("", call.op) else f"in {call.op}"


def _few(counts: Mapping[int, int]) -> str:
    return number_ranges(sorted(counts))


def _rank(stack: Stack) -> int:
    assert stack.rank is not None
    return stack.rank
