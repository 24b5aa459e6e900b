"""Calls on a GPU: timed by CUDA events on the stream that makes and awaits them, read back when they have passed.

    call.start = device.mark()                  # after the input is ready, before the call
    ...
    device.passed(call, before, after)          # around the wait: the stream stood still in between
    device.collect()                            # a later call does this: writes what has passed, waits for nothing

The host does not wait for a collective on a GPU, so its clock says nothing about one. The duration in the record is the
device's: from the input being ready to the stream going on after it, and the wait is how long the stream stood still.
`end_ns` is `issue_ns` plus that duration: how far the host runs ahead is not part of it.

A handle's end is seen where it is awaited. To see it earlier one would have to wait for its future on a stream of one's
own, which ties its memory to that stream, or for the handle itself, which releases memory that it protects.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["DeviceCalls"]

MAX_PENDING = 1024  # calls whose end has not passed; a check for NaN has as many places


class _Passed(NamedTuple):
    call: Any
    before: Any
    after: Any
    shared: bool


def _new_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class DeviceCalls:
    """The calls of one rank that its GPU has yet to pass."""

    def __init__(
        self,
        finish: Callable[[Any, int, int], None],
        flag: Callable[[Any, bool], None],
        new_event: Callable[[], Any] = _new_event,
    ) -> None:
        self._finish = finish
        self._flag = flag
        self._new_event = new_event
        self.pending: deque[_Passed] = deque()
        self._pool: list[Any] = []
        self._ranges: torch.Tensor | None = None  # pinned, (MAX_PENDING, 2): smallest and largest value of an input
        self._free: list[int] = []

    def mark(self) -> Any:
        """An event on the current stream."""
        event = self._pool.pop() if self._pool else self._new_event()
        event.record()
        return event

    def check(self, tensors: Sequence[torch.Tensor]) -> int:
        """Start to look for NaN and Inf: the place where the range of the values will be, -1 for none.

        The next event on this stream comes after it.
        """
        floating = [t.detach() for t in tensors if t.is_floating_point() and t.layout is torch.strided and t.numel()]
        if not floating:
            return -1
        if self._ranges is None:
            self._ranges = torch.empty((MAX_PENDING, 2), pin_memory=True)
            self._free = list(range(MAX_PENDING))
        if not self._free:
            return -1
        place = self._free.pop()
        ranges = [torch.stack(torch.aminmax(tensor)).float() for tensor in floating]
        # NaN in one is NaN in the sum, and Inf is Inf or NaN; a sum of a few extremes overflows no sooner than they do.
        whole = ranges[0] if len(ranges) == 1 else torch.stack(ranges).sum(dim=0)
        self._ranges[place].copy_(whole, non_blocking=True)
        return place

    def passed(self, call: Any, before: Any, after: Any, *, shared: bool = False) -> None:
        """`call` is complete once the stream has passed `after`; the stream stood still from `before` on.

        `shared`: the two events are those of other calls as well.
        """
        self.pending.append(_Passed(call, before, after, shared))
        if len(self.pending) > MAX_PENDING:
            self._release(self.pending.popleft())  # its record stays open: better than memory without bound

    def collect(self) -> None:
        """Write the records of the calls that the device has passed."""
        while self.pending and self.pending[0].after.query():
            passed = self.pending.popleft()
            call, start = passed.call, passed.call.start
            if call.place >= 0 and self._ranges is not None:
                low, high = self._ranges[call.place].tolist()
                self._flag(call, not (math.isfinite(low) and math.isfinite(high)))
            duration_ns = int(start.elapsed_time(passed.after) * 1e6)
            waited_ns = int(passed.before.elapsed_time(passed.after) * 1e6)
            self._finish(call, call.issue_ns + duration_ns, waited_ns)
            self._release(passed)

    def _release(self, passed: _Passed) -> None:
        call = passed.call
        if call.place >= 0:
            self._free.append(call.place)
            call.place = -1
        self._pool.append(call.start)
        if not passed.shared:
            self._pool.append(passed.after)
            if passed.before is not call.start:
                self._pool.append(passed.before)
