"""The votes of a step: named numbers of each rank, summed over all ranks in the step's one small reduction.

    own = recovery.votes(stop=False)         # this rank's votes
    row = own.to_row()                       # as a row of numbers, to be summed over all ranks
    sums = StepVotes.from_row(summed)        # the sums under the same names
    sums.save.failed                         # number of ranks on which the background save failed

Only this module knows at which position of the row a vote is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from trainer.checkpoint.disk_tier.saving import SaveVote
from trainer.guard.integrity import IntegrityVote

__all__ = ["StepVotes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVotes:
    """The votes of one rank, or their sums over all ranks. Rows have the same length on all ranks."""

    stop: float
    """Number of ranks that were asked to stop."""
    integrity: IntegrityVote
    save: SaveVote
    gradient_peaks: tuple[float, ...] = ()
    """Largest local gradient by rank; empty if gradients are not checked for outliers."""

    def to_row(self) -> list[float]:
        return [self.stop, *self.integrity, *self.save, *self.gradient_peaks]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> StepVotes:
        """Build the votes from a row that `to_row` made, or from a sum of such rows."""
        values = iter(row)
        return cls(
            stop=next(values),
            integrity=IntegrityVote(*islice(values, len(IntegrityVote._fields))),
            save=SaveVote(*islice(values, len(SaveVote._fields))),
            gradient_peaks=tuple(values),
        )
