"""The handle of a call in flight: torch's own, plus a note of when somebody waited for it and how long.

A handle that is waited for completes its record there. One whose future is taken instead (DDP's reducer waits for
futures in C++) is followed through the future. gloo's reduce-scatter, send and recv have no future. A handle that is
dropped is looked at once more.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..fail_open import record_error
from .backward_wait import BackwardWait
from .call_records import Call, Calls

__all__ = ["RecordedWork"]

_monotonic_ns = time.monotonic_ns


class RecordedWork(dist.Work):
    """Wraps `real`; completes `call` and those that were `coalesced` with it."""

    def __init__(
        self, real: dist.Work, call: Call, calls: Calls, backward: BackwardWait, coalesced: tuple[Call, ...] = ()
    ) -> None:
        super().__init__()
        self._real = real
        self._call = call
        self._calls = calls
        self._backward = backward
        self._coalesced = coalesced
        self._followed = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait as torch does, and count for how long."""
        if self._call.start is not None and not self._followed:
            return self._wait_on_device(timeout)
        start = _monotonic_ns()
        done = self._real.wait() if not timeout else self._real.wait(timeout)
        try:
            end = _monotonic_ns()
            self._calls.add_wait(end - start)
            call = self._call
            if not call.finished:
                self._calls.finish(call, call.end_ns or end, end - start)
                for other in self._coalesced:
                    self._calls.finish(other, end, 0)
        except Exception as error:
            record_error("collectives.wait", error)
        return done

    def _wait_on_device(self, timeout: timedelta | None) -> bool:
        """The stream waits, not this thread: events before and after tell how long."""
        self._followed = True
        device, before = self._calls.device, None
        try:
            before = device.mark()
        except Exception as error:
            record_error("collectives.wait", error)
        done = self._real.wait() if not timeout else self._real.wait(timeout)
        try:
            if before is not None:
                after, shared = device.mark(), bool(self._coalesced)
                device.passed(self._call, before, after, shared=shared)
                for other in self._coalesced:
                    device.passed(other, after, after, shared=True)
        except Exception as error:
            record_error("collectives.wait", error)
        return done

    def get_future(self) -> Any:
        """Torch's own future; the record is completed when it is."""
        future = self._real.get_future()
        if not self._followed and not self._call.finished:
            try:
                self._followed = self._backward.follow(self._call, future)
            except Exception as error:
                record_error("collectives.get_future", error)
        return future

    def boxed(self) -> Any:
        return self._real.boxed()

    def __del__(self) -> None:
        try:
            if not self._followed and not self._call.finished:
                self._calls.dropped(self._call, self._real)
                for other in self._coalesced:
                    self._calls.dropped(other, self._real)
        except Exception as error:  # an interpreter on its way down has half of its modules
            record_error("collectives.dropped", error)


def _delegate(name: str) -> Any:
    def method(self: RecordedWork, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._real, name)(*args, **kwargs)

    method.__name__ = name
    return method


# Whatever else this version of torch offers on a handle, answered by the real one.
_OWN = {*vars(RecordedWork), "unbox", "_pybind11_conduit_v1_"}
for _name, _value in vars(dist.Work).items():
    if _name not in _OWN and not _name.startswith("__") and callable(_value):
        setattr(RecordedWork, _name, _delegate(_name))
