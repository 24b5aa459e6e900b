"""The handle of a call in flight: torch's own, plus the time for which it was waited for.

A handle that is waited for completes its record there, and one that is asked whether it is complete when it is. One
whose future is taken instead (DDP's reducer waits for futures in C++), or that is dropped, is followed through the
future. gloo's reduce-scatter, send and recv have no future: dropped, they are polled with each later call.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..fail_open import record_error
from .backward_wait import BackwardWait
from .call_records import Call, Calls

__all__ = ["RecordedWork", "follow"]

_monotonic_ns = time.monotonic_ns


class RecordedWork(dist.Work):
    """Wraps `real` and completes `call`."""

    __slots__ = ("_backward", "_call", "_calls", "_followed", "_real")

    def __init__(self, real: dist.Work, call: Call, calls: Calls, backward: BackwardWait) -> None:
        super().__init__()
        self._real = real
        self._call = call
        self._calls = calls
        self._backward = backward
        self._followed = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait as torch does, and count for how long."""
        start = _monotonic_ns()
        done = self._real.wait() if not timeout else self._real.wait(timeout)
        try:
            end = _monotonic_ns()
            self._calls.add_wait(end - start)
            call = self._call
            if not call.finished:
                self._calls.finish(call, call.end_ns or end, end - start)
        except Exception as error:
            record_error("collectives.wait", error)
        return done

    def is_completed(self) -> bool:
        """Torch's own answer; once it is yes, the record is complete."""
        done = self._real.is_completed()
        if done and not self._followed and not self._call.finished:
            try:
                self._calls.finish(self._call, _monotonic_ns(), 0)
            except Exception as error:
                record_error("collectives.is_completed", error)
        return done

    def get_future(self) -> Any:
        """Torch's own future; the record is completed when it is."""
        future = self._real.get_future()
        if not self._followed and not self._call.finished:
            try:
                self._backward.follow(self._call, future)
                self._followed = True
            except Exception as error:
                record_error("collectives.get_future", error)
        return future

    def boxed(self) -> Any:
        return self._real.boxed()

    def __del__(self) -> None:
        try:
            if not self._followed and not self._call.finished:
                self._calls.dropped(self._call, self._real)
        except Exception as error:  # an interpreter on its way down has half of its modules
            record_error("collectives.dropped", error)


def follow(work: Any, call: Call, calls: Calls, backward: BackwardWait) -> None:
    """Complete the record of `call`, whose caller holds torch's own handle."""
    try:
        future = work.get_future()
    except RuntimeError:  # this kind of call has none
        calls.dropped(call, work)
    else:
        backward.follow(call, future)


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
