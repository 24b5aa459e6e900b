"""Copies of this rank's shard in host memory: the first thing to roll back to, and the source of saves to disk.

    copies = MemoryCopies(training, healthy_steps=3, interval=10)
    copies.take(values, vetted=True)
    copies.promote(step)                    # steps up to here were healthy
    values = copies.restore(before_step=40)  # newest vetted copy taken before step 40; None if there is none
    copy = copies.lend(values)              # of the state as it is now, for a save in the background

Each rank keeps its own copies, and all ranks take, promote and restore them at the same steps, so nothing has to be
agreed upon. A copy is vetted once `healthy_steps` steps after it were healthy; there are just enough copies that one
is always vetted, and one more while a save reads an old one.
"""

from __future__ import annotations

from trainer.checkpoint.host_copy import HostCopy
from trainer.checkpoint.state import Values
from trainer.training import Training

__all__ = ["MemoryCopies"]


class MemoryCopies:
    """The copies of one rank, oldest first."""

    def __init__(self, training: Training, *, healthy_steps: int, interval: int) -> None:
        self.training = training
        self.healthy_steps = healthy_steps
        self._limit = 1 + -(-healthy_steps // max(1, interval))
        self._copies: list[HostCopy] = []
        self._spare: list[HostCopy] = []

    @property
    def steps(self) -> list[int]:
        """Steps of the copies that there are, oldest first."""
        return [copy.step for copy in self._copies]

    def take(self, values: Values, *, vetted: bool = False) -> int:
        """Copy the state as it is now; returns the size in bytes."""
        if len(self._copies) >= self._limit:
            self._spare.append(self._copies.pop(0))
        copy = self._free()
        copy.fill(self.training, values, vetted=vetted)
        self._copies.append(copy)
        return copy.nbytes

    def lend(self, values: Values) -> HostCopy:
        """A copy of the state as it is now, which nobody writes to until `give_back`; taken if there is none."""
        if self._copies and self._copies[-1].step == values.position.step:
            copy = self._copies[-1]
        else:
            copy = self._free()
            copy.fill(self.training, values)
            self._spare.append(copy)
        copy.borrowers += 1
        return copy

    @staticmethod
    def give_back(copy: HostCopy) -> None:
        """What was lent is no longer read."""
        copy.borrowers -= 1

    def promote(self, step: int) -> list[int]:
        """Vet the copies that `healthy_steps` steps up to `step` have followed; returns their steps."""
        fresh = [copy for copy in self._copies if not copy.vetted and copy.step + self.healthy_steps <= step]
        for copy in fresh:
            copy.vetted = True
        return [copy.step for copy in fresh]

    def forget_from(self, step: int) -> list[int]:
        """Drop the copies that hold the update of `step` or a later one; returns their steps."""
        gone = [copy for copy in self._copies if copy.step >= step]
        self._copies = [copy for copy in self._copies if copy.step < step]
        self._spare += gone
        return [copy.step for copy in gone]

    def restore(self, before_step: int) -> Values | None:
        """Put back the newest vetted copy that lacks the update of `before_step`, and forget the later ones."""
        candidates = [copy for copy in self._copies if copy.vetted and copy.step < before_step]
        if not candidates:
            return None
        copy = candidates[-1]
        self.forget_from(copy.step + 1)
        return copy.restore(self.training)

    def _free(self) -> HostCopy:
        """Buffers that nobody reads."""
        for copy in self._spare:
            if not copy.borrowers:
                self._spare.remove(copy)
                return copy
        return HostCopy()
