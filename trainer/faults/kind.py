"""A kind of fault: what happens, the finding that must follow, and the recovery that must follow.

    Kind(fault_id="F1", what="a rank is killed", expected=(Expected(("rank_lost",), ("signal",)),), recovery="restarts")

The kinds themselves are in `trainer.faults.catalogue`. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Expected", "Kind", "Recovery", "Whose"]

Whose = Literal["rank", "tensor_group", "among", "none"]
"""Ranks of a right finding: the fault's rank alone; or its tensor-parallel group, whose members hold parts of the same
activations; it among others, where records cannot separate the cause from its victims; no rank alone, where all
have the same (a batch, a rate)."""
Recovery = Literal["goes_on", "skips", "restarts", "stops"]
"""Required response: training goes on; a refused step and a rollback; a new attempt; an end with a report."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The right answer: a finding of one of `kinds` with one of `causes`."""

    kinds: tuple[str, ...]
    causes: tuple[str, ...]
    rank: Whose = "rank"

    @property
    def text(self) -> str:
        """For a table: `hang (stopped), its rank`."""
        whose = {
            "rank": "its rank",
            "tensor_group": "its rank or tensor-parallel group",
            "among": "its rank among others",
            "none": "no single rank",
        }
        return f"{' or '.join(self.kinds)} ({', '.join(self.causes)}), {whose[self.rank]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of fault. `expected` is empty where the right answer is silence."""

    fault_id: str
    what: str
    expected: tuple[Expected, ...] = ()
    recovery: Recovery = "goes_on"
    keys: tuple[str, ...] = ("step", "rank")
    all_ranks: bool = False
    """It strikes every rank unless one is given."""
    armed_everywhere: bool = False
    """Ranks besides the one that it strikes have a part in it."""
    needs: Literal["", "ranks", "data ranks", "groups", "pipeline"] = ""
    """Where it shows: with more than one rank, with more than one data rank, where several groups do the
    same in parallel, in a pipeline."""
    drilled_rank: int = -1
    """The rank that a drill strikes; -1 = any, by seed."""
    settings: tuple[str, ...] = ()
    """Settings that a drill changes for it."""
    parameters: str = ""
    """Options that a drill adds to the fault: `factor=3`."""
    allowed: tuple[str, ...] = ()
    """Kinds of findings that may be true of it too, and are then no false alarms."""
    required_event: tuple[str, str] = ("", "")
    """An event that must be on record afterwards, as (its kind, its `state`, or empty)."""
    first_step: int = 8
    """Earliest step for a drill: detectors that compare with a history need one."""
    steps_after: int = 8
    """Steps that a drill still trains after the fault."""

    @property
    def fault_ids(self) -> tuple[str, ...]:
        """`fault_id` may be several: `F28, F30`."""
        return tuple(self.fault_id.split(", "))
