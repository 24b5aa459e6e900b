"""A kind of fault: what happens, the finding that must follow, and the recovery that must follow.

    Kind(fault_id="F1", what="a rank is killed", expected=(Expected(("rank_lost",), ("signal",)),), recovery="restarts")

The kinds themselves are in `trainer.faults.catalogue`. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Expected", "Kind", "Recovery", "Whose"]

Whose = Literal["rank", "tensor_group", "among", "none"]
"""Ranks that a correct finding names. rank: only the struck rank. tensor_group: the tensor-parallel group of the struck
rank, because it shares the same activations. among: the struck rank and others, because the records do not show which
of them is the cause. none: no single rank, because all ranks are affected alike (by a batch, a rate).
"""
Recovery = Literal["goes_on", "skips", "restarts", "stops"]
"""Required response. goes_on: training continues; skips: the step is refused and rolled back; restarts: a new attempt;
stops: the run ends with a report."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected finding: one of `kinds`, with one of `causes`."""

    kinds: tuple[str, ...]
    causes: tuple[str, ...]
    rank: Whose = "rank"

    @property
    def text(self) -> str:
        """Text for a table: `hang (stopped), its rank`."""
        whose = {
            "rank": "its rank",
            "tensor_group": "its rank or tensor-parallel group",
            "among": "its rank among others",
            "none": "no single rank",
        }
        return f"{' or '.join(self.kinds)} ({', '.join(self.causes)}), {whose[self.rank]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of fault. `expected` is empty if no finding is right."""

    fault_id: str
    what: str
    expected: tuple[Expected, ...] = ()
    recovery: Recovery = "goes_on"
    keys: tuple[str, ...] = ("step", "rank")
    all_ranks: bool = False
    """True if the fault is injected in every rank unless a rank is given."""
    armed_everywhere: bool = False
    """True if other ranks take part in the fault."""
    needs: Literal["", "ranks", "data ranks", "groups", "pipeline"] = ""
    """Layouts in which the fault is visible: several ranks, several data ranks, several groups with the same work, or a
    pipeline."""
    drilled_rank: int = -1
    """Rank that a drill strikes; -1 = any, chosen by seed."""
    settings: tuple[str, ...] = ()
    """Settings that a drill changes for it."""
    parameters: str = ""
    """Options that a drill adds to the fault: `factor=3`."""
    allowed: tuple[str, ...] = ()
    """Kinds of further findings that may be true, and are not false alarms."""
    required_event: tuple[str, str] = ("", "")
    """Event that must be recorded: (kind, `state` or empty)."""
    first_step: int = 8
    """Earliest step for a drill, because some detectors need a history."""
    steps_after: int = 8
    """Number of steps that a drill trains after the fault."""

    @property
    def fault_ids(self) -> tuple[str, ...]:
        """The IDs in `fault_id`, which may be several: `F28, F30`."""
        return tuple(self.fault_id.split(", "))
