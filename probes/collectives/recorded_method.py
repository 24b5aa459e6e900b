"""A method of a process group that records its calls.

group.allreduce = recorded_method(probe, group.calls, plain.allreduce, METHODS["allreduce"])

Up to torch 2.7 the options of a call do not show whether it is asynchronous. So this is read from a local variable of
torch's function, because that function waits for any handle that it gets. A handle loses its Python methods when it
passes to C++. So C++ callers get torch's own handle, and the handle's future completes the record.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..fail_open import record_error
from .call_records import Call, GroupCalls
from .group_probe import GroupProbe
from .methods import Method
from .work_handle import RecordedWork, follow

__all__ = ["recorded_method"]

_monotonic_ns = time.monotonic_ns
_HAS_ASYNC_OPTION = hasattr(dist.AllreduceOptions, "asyncOp")
_NON_BLOCKING = ("isend", "irecv")
_BLOCKING = ("send", "recv")  # torch's blocking functions, which call the asynchronous ones and wait


def recorded_method(
    probe: GroupProbe, group: GroupCalls, real: Callable[..., Any], method: Method
) -> Callable[..., Any]:
    """Wrap `real` so that each call is recorded on the tape before it is made."""
    calls, backward, recorder, unreduced = probe.calls, probe.backward, probe.recorder, probe.unreduced
    input_index, reduces, spreads, peer_index = method.input, method.reduces, method.spreads, method.peer
    op = recorder.name(method.op)
    open_record, complete, is_training = calls.open, calls.complete, calls.is_training

    def recorded(*args: Any, **kwargs: Any) -> Any:
        call = None
        try:
            if not group.label:
                probe.label_new()
            peer = -1
            if peer_index >= 0:
                is_async = _is_async_p2p(sys._getframe(1))
                sync = False  # do not wait here: torch's `send` and `recv` wait for the returned handle
                peer = group.members[args[peer_index]] if group.members else args[peer_index]
            else:
                options = kwargs["opts"] if "opts" in kwargs else args[-1] if args else None
                is_async = getattr(options, "asyncOp", True) if _HAS_ASYNC_OPTION else _is_async_call(method.op)
                sync = not is_async
            tensors: Sequence[torch.Tensor] = ()
            if 0 <= input_index < len(args):
                tensors = args[input_index]
                if type(tensors) is not list or len(tensors) != 1 or type(tensors[0]) is list:
                    tensors = _tensors(tensors)
                if tensors and not tensors[0].is_cpu and tensors[0].device.type not in group.host_timed:
                    return real(*args, **kwargs)  # the host knows only when a call was enqueued, so none is recorded
            if reduces and unreduced.is_on:
                options = kwargs["opts"] if "opts" in kwargs else args[-1] if args else None
                unreduced.add(method.op, tensors, getattr(options, "reduceOp", None), len(group.members))
            slot, issue_ns = open_record(group, op, tensors, peer, is_async, reduces, spreads)
            if not sync:
                call = Call(slot, issue_ns)
        except Exception as error:
            record_error("collectives.issue", error)
            return real(*args, **kwargs)
        work = real(*args, **kwargs)
        if sync and work is not None:
            work.wait()  # waiting here changes nothing, because the caller would wait next
            if _HAS_ASYNC_OPTION:
                work = None
        try:
            if call is not None and work is not None:
                if _HAS_ASYNC_OPTION or _caller() is not None:
                    return RecordedWork(work, call, calls, backward)
                follow(work, call, calls, backward)
            else:
                end = _monotonic_ns()
                complete(slot, end, end - issue_ns)
                if is_training():
                    recorder.wait_ns += end - issue_ns
        except Exception as error:
            record_error("collectives.complete", error)
        return work

    return recorded


def _caller(distance: int = 2) -> FrameType | None:
    """The function of torch that called the method; None if C++ called it."""
    try:
        frame = sys._getframe(distance)
    except ValueError:  # no Python caller: a thread of autograd
        return None
    return frame if frame.f_code.co_filename == c10d.__file__ else None


def _is_async_call(op: str) -> bool:
    caller = _caller(3)
    if caller is None:
        return op != "broadcast"  # C++ called. It waits only for broadcasts, with which DDP sends its buffers
    return bool(caller.f_locals.get("async_op", False))


def _is_async_p2p(caller: FrameType) -> bool:
    """Return True if `send` or `recv` was called by `isend` or `irecv`: the arguments do not show it."""
    outer = caller.f_back
    return caller.f_code.co_name in _NON_BLOCKING and (outer is None or outer.f_code.co_name not in _BLOCKING)


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    """The tensors of an argument: one, a list, or a list of lists."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if value and not isinstance(value[0], torch.Tensor):
        return [tensor for part in value for tensor in part]
    return value  # type: ignore[no-any-return]
