"""Spread of a NaN: which tensors of which ranks are not finite.

    taints.begin_step([(3, "grad2", False)], one_element=True)    # rank 3's gradient of block 2, before its reduction
    taints.work(lanes, reads=("act0.1",), writes=("act0.2",))
    taints.reduce(groups, "grad2", "all_reduce")
    taints.of("grad2")                                            # by rank, or None if no rank's

Work passes a taint from what it reads to what it writes, a reduction to all members. Gradients and losses add up over
microbatches; weights stay tainted from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .layout import Ints

__all__ = ["Mask", "Taints"]

Mask = npt.NDArray[np.bool_]
REDUCES = ("all_reduce", "reduce_scatter", "reduce")
_ADDS_UP = ("grad", "loss", "local_loss")


class Taints:
    """Marks by tensor and rank, and those that a fault is going to make."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._marks: dict[str, Mask] = {}
        self._planned: Sequence[tuple[int, str, bool]] = ()
        self.one_element = False
        """Whether only one element is tainted, which a reduce-scatter passes to one member only."""

    def begin_step(self, planned: Sequence[tuple[int, str, bool]], *, one_element: bool) -> None:
        """Forget all but weights. `planned`: (rank, tensor, only after its reduction) that become tainted now."""
        self._marks = {name: marks for name, marks in self._marks.items() if name.startswith("weight")}
        self._planned, self.one_element = planned, one_element

    def of(self, tensor: str) -> Mask | None:
        """Ranks whose tensor is tainted, None if it never was."""
        return self._marks.get(tensor)

    def any(self, tensor: str = "") -> bool:
        """Return True if any rank's tensor is tainted (without a name: any tensor at all)."""
        chosen = [self._marks[tensor]] if tensor in self._marks else [] if tensor else self._marks.values()
        return any(bool(marks.any()) for marks in chosen)

    def clear(self) -> None:
        """Forget all taints: a good state was restored."""
        self._marks = {}

    def poison_weights(self, blocks: int) -> None:
        """Taint all weights: the optimizer has taken a step with tainted gradients."""
        for block in range(blocks):
            self._marks[f"weight{block}"] = np.ones(self._num_ranks, dtype=bool)

    def work(self, lanes: Ints, reads: Sequence[str], writes: Sequence[str]) -> None:
        """Spread taints from `reads` to `writes`, which these ranks computed from them."""
        if not (self._marks or self._planned):
            return
        bad = np.zeros(self._num_ranks, dtype=bool)
        for name in reads:
            if name in self._marks:
                bad |= self._marks[name]
        for name in writes:
            hit, before = bad[lanes], self._marks.get(name)
            if name.startswith(_ADDS_UP) and before is not None:
                hit = hit | before[lanes]
            new = [rank for rank, tensor, after in self._planned if tensor == name and not after]
            if new:
                hit = hit | np.isin(lanes, new)
            if hit.any() or before is not None:
                self._mark(name)[lanes] = hit

    def reduce(self, groups: Ints, tensor: str, op: str, inputs: Mask | None = None) -> None:
        """Spread taints over the members of each group that reduced a tensor (`inputs`: its taints at the calls)."""
        if op not in REDUCES or not (self._marks or self._planned):
            return
        before = self._marks.get(tensor) if inputs is None else inputs
        nobody = np.zeros(self._num_ranks, dtype=bool)
        hit: Mask = np.any((nobody if before is None else before)[groups], axis=1)
        new = [rank for rank, name, after in self._planned if after and name == tensor]
        if new:
            hit = hit | np.isin(groups, new).any(axis=1)
        marks = self._mark(tensor)
        marks[groups] = hit[:, None]
        if self.one_element and op == "reduce_scatter":
            marks[groups[:, 1:]] = False  # the element lies in the first member's shard

    def receive(self, lanes: Ints, tensor: str, sent: Mask) -> None:
        """Spread taints of sent tensors to the ranks that received them."""
        if sent.any() or tensor in self._marks:
            self._mark(tensor)[lanes] = sent[lanes]

    def _mark(self, name: str) -> Mask:
        return self._marks.setdefault(name, np.zeros(self._num_ranks, dtype=bool))
