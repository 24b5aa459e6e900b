"""Tensors that a loss depends on, for loops without a module: `a -= rate * a.grad` as in a first lesson on autograd.

leaves = Leaves()
leaves.find(loss)             # after its backward pass
leaves.parameters()           # as a module has them
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

__all__ = ["Leaves"]

MAX_NODES = 5000
"""Nodes of the graph that are looked at."""


class Leaves:
    """The tensors that the newest backward pass gave gradients."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []

    def parameters(self) -> Iterator[Tensor]:
        """Iterate over the tensors."""
        return iter(self._tensors)

    def find(self, root: Any) -> None:
        """Find them in the graph of `root`."""
        nodes = [getattr(root, "grad_fn", None)]
        seen = set(nodes)
        for node in nodes:
            if node is not None and len(nodes) < MAX_NODES:
                inputs = {one for one, _ in node.next_functions} - seen
                seen |= inputs
                nodes.extend(inputs)
        found = [getattr(node, "variable", None) for node in nodes]
        self._tensors = [tensor for tensor in found if isinstance(tensor, Tensor)]
