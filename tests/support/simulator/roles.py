"""Ranks that run the same program, how far they are in it, and what they wait for.

role = Role(lanes=np.arange(8), ops=program, steps=[1])
other = role.split(stay)          # those that need not wait go on as a separate role
awaited(other)                    # [(key of a call, its record), ...]
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .layout import Ints
from .program import Op
from .records import CollectiveRow, SpanRow, StepRow

__all__ = ["Role", "Stop", "awaited", "positions_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A rank that never finishes a piece of work. `dies`: its process ends, so it writes nothing more."""

    rank: int
    step: int
    what: str
    microbatch: int = -1
    block: int = -1
    fraction: float = 0.5
    dies: bool = False


@dataclass(slots=True)
class Role:
    """Ranks that do the same, from `pc` on; `steps` are the numbers of the steps in their program."""

    lanes: Ints
    ops: list[Op]
    steps: list[int]
    pc: int = 0
    step: int = 0
    begun: int = 0
    waiting: tuple[str, object] | None = None
    handles: dict[str, list[tuple[object, CollectiveRow]]] = field(default_factory=dict)
    spans: list[SpanRow] = field(default_factory=list)
    step_row: StepRow | None = None

    @property
    def phase(self) -> int:
        """Name number of the current span; 0 outside of spans."""
        return self.spans[-1].constants[3] if self.spans else 0

    def split(self, stay: npt.NDArray[np.bool_]) -> Role:
        """Move the lanes that need not stay to a new role."""
        other = Role(
            self.lanes[~stay], self.ops, self.steps, self.pc, self.step, self.begun, self.waiting,
            {handle: list(parts) for handle, parts in self.handles.items()}, list(self.spans), self.step_row,
        )  # fmt: skip
        self.lanes = self.lanes[stay]
        return other


def awaited(role: Role) -> list[tuple[object, CollectiveRow]]:
    """The calls that a role waits for: (pending, its record)."""
    assert role.waiting is not None
    kind, what = role.waiting
    if kind == "handles":
        return [part for handle in what for part in role.handles.get(handle, [])]  # type: ignore[attr-defined]
    return [what]  # type: ignore[list-item]


def positions_of(row: CollectiveRow | SpanRow | StepRow, lanes: Ints) -> Ints | slice:
    """Positions of these ranks in a row that was written before their role was split."""
    return slice(None) if len(row.lanes) == len(lanes) else np.searchsorted(row.lanes, lanes)
