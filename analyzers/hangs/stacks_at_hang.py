"""The stacks of all ranks of a hang in groups: who does the same, and who does something else than its like.

    stacks = StacksAtHang(run.stacks, roles_of(source, attempt=0))
    stacks.of(view, blame.culprits)      # [{"ranks": [3], "role": "stage 1", "doing": "in data", "frames": [...], ...}]

1. Ranks with the same innermost frames in the same phase and operation are a group.
2. Odd is whoever differs from most ranks of its own stage: the stages of a pipeline wait in different places by right.
   Where no stack differs nobody is odd; who is to blame says `waitfor`, and not a stack.
3. Groups with a culprit come first, then those with an odd rank, then the largest. A few are told, the rest is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analyzers.hangs.stack_groups import Stack, group, odd_ones
from analyzers.hangs.stacks import read_stack
from analyzers.run.snapshot import AttemptView, RankView
from analyzers.source import Source, missing_tables

__all__ = ["Role", "StacksAtHang", "roles_of"]

MAX_GROUPS = 8
MAX_LISTED = 64
"""Ranks of a group that are told by number."""
MAX_READ = 8192
"""Files of stacks that are read."""


@dataclass(frozen=True, slots=True, order=True)
class Role:
    """A rank's place in the dimensions that give ranks different work; -1 where there is no such dimension."""

    stage: int = -1
    tp: int = -1


def roles_of(source: Source, attempt: int) -> dict[int, Role]:
    """Each rank's role in an attempt; only dimensions that are really there count."""
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
    """Where the stacks of a run are, and which role each of its ranks has."""

    folder: Path
    roles: Mapping[int, Role]

    def of(self, view: AttemptView, culprits: Sequence[int]) -> list[dict[str, Any]]:
        """The groups, for a finding's evidence; empty if no rank wrote a stack."""
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
        told = [
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
        return [*told, {"num_ranks": len(rest), "is_rest": True}] if rest else told

    def _stack(self, state: RankView, attempt: int) -> Stack:
        frames = tuple(read_stack(self.folder, attempt, state.rank))
        return Stack(pid=state.rank, rank=state.rank, frames=frames, os_state="T" if state.state == "stopped" else "")

    def _odd(self, stacks: Sequence[Stack]) -> set[int]:
        """Whoever differs from more than half of its own stage; of stages with one or two ranks nobody can tell."""
        by_stage: dict[int, list[Stack]] = {}
        for stack in stacks:
            by_stage.setdefault(self.roles.get(_rank(stack), Role()).stage, []).append(stack)
        return {_rank(stack) for alike in by_stage.values() for stack in odd_ones(group(alike))}

    def _role(self, ranks: Sequence[int]) -> str:
        roles = [self.roles.get(rank, Role()) for rank in ranks]
        stages = Counter(role.stage for role in roles if role.stage >= 0)
        places = Counter(role.tp for role in roles if role.tp >= 0)
        told = [f"stage{'s' * (len(stages) > 1)} {_few(stages)}"] if stages else []
        return ", ".join([*told, *([f"tp {_few(places)}"] if places else [])])


def _doing(state: RankView) -> str:
    """Phase and operation, without the group's name and number, which differ between ranks that do the same."""
    if state.state == "stopped":
        return "stopped"
    call = min(state.calls, key=lambda call: call.issue_ns, default=None)
    if call is None:
        return state.doing
    phase = call.phase or (state.phases[-1] if state.phases else "")
    return f"in {phase}, {call.op}" if phase else f"in {call.op}"


def _few(counts: Mapping[int, int]) -> str:
    values = sorted(counts)
    return ", ".join(map(str, values[:6])) + (", ..." if len(values) > 6 else "")


def _rank(stack: Stack) -> int:
    assert stack.rank is not None
    return stack.rank
