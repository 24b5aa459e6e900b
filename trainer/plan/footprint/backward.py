"""Peak memory of a rank's backward pass, block by block: activations, gradients and gathered parameters.

    backward_peak([Block(kept=..., backward_extra=..., units=(unit,), ...), ...], root)          # bytes

FSDP2 handles each unit as follows. Experts that are divided among ranks are a unit inside their block's unit.

1. It gathers the unit into one buffer and copies the parameters out. Parameters that are sharded along another
   dimension than the first, such as experts, are copied twice. Then it starts to gather the next unit.
2. Whole gradients appear while activations are freed.
3. It frees the parameters and copies the gradients (reordered if they are sharded along another dimension) into a
   buffer that is reduced. The gradients are freed at once, the buffer when the next unit's buffer is created.

A unit inside a recomputed block is gathered as in forward: its buffer exists until the next such unit is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Block", "UnitBytes", "backward_peak"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBytes:
    """Bytes of parameters that are gathered and reduced together. If nothing is sharded, a unit is a block."""

    gathered: int = 0
    """Bytes of the whole parameters, if backward gathers and frees them."""
    buffer: int = 0
    """Bytes of the gather buffer from which the parameters are copied; 0 if they are not sharded over several ranks."""
    gradient: int
    """Bytes of the whole gradients before their reduction."""
    sent: int = 0
    """Bytes of the buffer that is reduced."""
    own: int
    """Bytes of this rank's part of the gradients."""
    largest: int
    """Gradient bytes of the largest parameter."""
    first: int
    """Gradient bytes of the largest matrix, the first to be computed."""
    before: int = 0
    """Bytes of the gradients accumulated by earlier microbatches: none, this rank's part, or the whole gradients."""
    is_added_at_once: bool = False
    """True if each new gradient of a matrix is added to the accumulated gradient as soon as it is computed."""
    is_split_inside: bool = False
    """True if the parameters are sharded along a dimension other than the first."""
    is_copied: bool = False
    """True if the backend gathers and reduces in a copy of the buffer, as gloo does."""

    @property
    def gathering(self) -> int:
        """Bytes while the gathered parameters are copied out."""
        return self.buffer + self.gathered * (1 + self.is_split_inside)

    @property
    def all_gradients(self) -> int:
        """Additional bytes when all gradients of the unit exist. Stacked gradients are computed in parts and joined."""
        stacking = self.largest if self.first < self.largest else 0
        return stacking + (self.largest if self.is_added_at_once else self.gradient)

    @property
    def copying(self) -> int:
        """Additional bytes while the unit's gradients are copied into the buffer, or while the buffer is reduced. Whole
        gradients left by earlier microbatches are the source of the copy, and are freed before the reduction.
        """
        new = 0 if self.is_added_at_once or self.before > self.own else self.gradient
        if not self.sent:
            return new
        left = self.before if self.before > self.own else 0
        reducing = self.sent * (1 + self.is_copied) + self.own - left
        return max(new + self.sent + self.largest * self.is_split_inside, reducing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Bytes of a block's activations and units. Units are in the order of forward: the outer unit, then the inner unit,
    if any."""

    kept: int
    """Activations kept by forward."""
    backward_extra: int
    """Additional activations during its backward: recomputed ones, and gradients of activations."""
    at_inner: int
    """Bytes of the block's activations in use when the inner unit is gathered."""
    around_inner: int
    """Bytes of the block's activations in use after backward of the inner unit."""
    is_recomputed: bool
    units: tuple[UnitBytes, ...]


def backward_peak(blocks: Sequence[Block], root: UnitBytes, *, ahead: int) -> int:
    """Peak bytes during backward. `ahead`: number of blocks gathered in advance. The root's parameters are not counted:
    they stay gathered throughout, because backward starts with the head and ends with the embedding."""
    return max(_points(blocks, root, ahead))


def _points(blocks: Sequence[Block], root: UnitBytes, ahead: int) -> Iterator[int]:
    """Bytes at each point of backward that can be the peak, in chronological order."""
    buffers = [block.units[0].buffer for block in blocks]
    gradients = root.before + sum(unit.before for block in blocks for unit in block.units)
    kept = sum(block.kept for block in blocks)
    # At the backward of the head, all activations still exist.
    yield kept + sum(buffers[-ahead:]) + gradients + root.largest
    if not root.is_added_at_once:  # the head's gradient stays until the root is reduced at the end
        gradients += root.largest
    reduced = 0
    for number, block in reversed(list(enumerate(blocks))):
        kept -= block.kept
        prefetched = sum(buffers[max(0, number - ahead) : number])
        for in_block in _of_block(block, reduced, prefetched):
            yield kept + gradients + in_block
        gradients += sum(unit.own - unit.before for unit in block.units)
        reduced = block.units[0].sent
    # The root is reduced after all blocks.
    yield sum(unit.own for block in blocks for unit in block.units) + root.gradient + root.sent


def _of_block(block: Block, reduced: int, prefetched: int) -> Iterator[int]:
    """Bytes at each point of one block's backward, without the bytes that other blocks hold. `reduced`: bytes of the
    last reduction's buffer; `prefetched`: bytes of the buffers of blocks gathered in advance.
    """
    outer, *within = block.units
    yield reduced + block.kept + max(outer.gathering, outer.gathered + prefetched * (1 + outer.is_copied))
    if not within:
        yield reduced + block.kept + block.backward_extra + outer.gathered + prefetched + outer.first
        yield prefetched + outer.copying
        return
    (inner,) = within
    yield reduced + block.at_inner + outer.gathered + inner.gathering
    rest = outer.gathered + prefetched + (inner.buffer if block.is_recomputed else 0)
    yield reduced + block.kept + block.backward_extra + rest + inner.gathered + inner.first
    yield reduced + block.around_inner + rest + inner.gathered + inner.all_gradients
    yield block.around_inner + rest + inner.copying
    gradient = inner.own - inner.before
    yield inner.sent + block.around_inner + rest + gradient + outer.first
    yield rest - outer.gathered + gradient + outer.copying
