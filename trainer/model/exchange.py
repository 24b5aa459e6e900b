"""Exchange token rows with the ranks that hold their experts.

    route = Route.make(expert, num_experts, group)      # collective: counts rows from and to each rank
    rows = exchange(rows, route, group)                 # sorted by expert -> sorted by the receiving rank's experts
    rows = exchange(rows, route.back, group)

The number of rows per rank is known only after routing, and the host needs it to split the buffers. So the host waits
for the device once per layer, as in every uneven all-to-all. Without a group, no rows are sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Route", "exchange", "scaled_gradient"]


@dataclass(frozen=True, kw_only=True)
class Route:
    """Numbers of rows that are sent to each rank of the group and received from it, and the order of the rows."""

    num_sent: int
    """Rows to send: rows of this rank that are routed to an expert."""
    counts: list[int]
    """Rows of each expert of this rank, after the exchange."""
    sends: list[int]
    receives: list[int]
    before: Tensor | None = None
    """Permutation of the rows before sending; None if they stay in order."""
    after: Tensor | None = None
    """Permutation of the rows after receiving; None if they stay in order."""

    @classmethod
    def make(cls, expert: Tensor, num_experts: int, group: dist.ProcessGroup | None) -> Route:
        """Create the route. `expert`: the expert of each row, shape (rows,), or `num_experts` for a row that no expert
        gets."""
        counts = torch.bincount(expert, minlength=num_experts + 1)[:num_experts]
        if group is None:
            own = counts.tolist()
            return cls(num_sent=sum(own), counts=own, sends=[], receives=[])
        size = group.size()
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=group)
        going, came = torch.stack((counts, coming)).view(2, size, -1).tolist()  # the host waits here
        sends, receives = [sum(row) for row in going], [sum(row) for row in came]
        # Received rows are sorted by rank, then expert; sort them by expert.
        number = torch.arange(num_experts // size, device=expert.device).repeat(size)
        after = number.repeat_interleave(coming, output_size=sum(receives)).argsort(stable=True)
        own = [sum(column) for column in zip(*came, strict=True)]
        return cls(num_sent=sum(sends), counts=own, sends=sends, receives=receives, after=after)

    @property
    def back(self) -> Route:
        before = None if self.after is None else self.after.argsort()
        return Route(num_sent=0, counts=[], sends=self.receives, receives=self.sends, before=before)


def exchange(rows: Tensor, route: Route, group: dist.ProcessGroup | None) -> Tensor:
    """Send rows (n, dim) along a route; backward sends the gradients back. Collective over the group."""
    if group is None:
        return rows
    if route.before is not None:
        rows = rows[route.before]
    rows = _AllToAll.apply(rows, route.sends, route.receives, group)  # type: ignore[no-untyped-call]  # torch: no types
    return rows if route.after is None else rows[route.after]


def scaled_gradient(tensor: Tensor, scale: float) -> Tensor:
    """Return the tensor unchanged, but multiply its gradient by `scale` in backward. Each rank of a group computes the
    mean loss of its sequences. An expert's gradient is the sum over all these ranks, and must be divided as in the
    reduction of other parameters.
    """
    if scale == 1.0:
        return tensor
    scaled: Tensor = _ScaledGradient.apply(tensor, scale)  # type: ignore[no-untyped-call]  # torch: no types
    return scaled


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.route = sends, receives, group
        return _sent(rows, sends, receives, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sends, receives, group = ctx.route
        return _sent(grads[0], receives, sends, group), None, None, None


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.scale, None


def _sent(rows: Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> Tensor:
    came = rows.new_empty(sum(receives), *rows.shape[1:])
    dist.all_to_all_single(came, rows.contiguous(), receives, sends, group=group)
    return came
