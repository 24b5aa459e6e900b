"""Handle of a call in flight: wraps torch's handle, and measures the time spent waiting for it.

A record is completed by `wait`, or by `is_completed` once that returns True. If the caller takes the future instead (as
DDP's reducer does in C++) or drops the handle, the future completes the record. gloo's reduce-scatter, send and recv
have no future: if dropped, they are polled at each later call.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..fail_open import record_error
from .call_records import Call, Calls
from .gradients.backward_wait import BackwardWait

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
        """Wait as torch does, and add the time to the record."""
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
        """Return torch's own answer; True also completes the record."""
        done = self._real.is_completed()
        if done and not self._followed and not self._call.finished:
            try:
                self._calls.finish(self._call, _monotonic_ns(), 0)
            except Exception as error:
                record_error("collectives.is_completed", error)
        return done

    def get_future(self) -> Any:
        """Return torch's own future; its completion completes the record."""
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
        except Exception as error:  # at interpreter shutdown half of the modules are gone
            record_error("collectives.dropped", error)


def follow(work: Any, call: Call, calls: Calls, backward: BackwardWait) -> None:
    """Complete the record of `call` when `work` is done, for callers that hold torch's own handle."""
    try:
        future = work.get_future()
    except RuntimeError:  # this kind of call has no future
        calls.dropped(call, work)
    else:
        backward.follow(call, future)


def _delegate(name: str) -> Any:
    def method(self: RecordedWork, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._real, name)(*args, **kwargs)

    method.__name__ = name
    return method


# Delegate all other attributes that this version of torch has on a handle.
_OWN = {*vars(RecordedWork), "unbox", "_pybind11_conduit_v1_"}
for _name, _value in vars(dist.Work).items():
    if _name not in _OWN and not _name.startswith("__") and callable(_value):
        setattr(RecordedWork, _name, _delegate(_name))
