"""Dispatch modes of the played device (`device`), its streams and its events. Imports torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.played.device import Counts

__all__ = ["CountingMode", "PlayedMode", "played_streams"]

_NO_KERNEL = ("prim::", "profiler::", "aten::detach", "aten::lift_fresh", "aten::empty", "aten::new_empty")


class PlayedMode(FakeTensorMode):
    """FakeTensorMode as on a machine without a device, although `torch.cuda` reports one."""

    @property
    def avoid_device_init(self) -> bool:
        return True


class CountingMode(TorchDispatchMode):
    """Counts what is launched on the device. Operators on host tensors are executed."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name, dict(kwargs or {})
        tensors = _tensors((args, kwargs))
        if any(isinstance(tensor, DTensor) for tensor in tensors):
            return func(*args, **kwargs)  # called again with the local tensors
        if name == "aten::_local_scalar_dense" and isinstance(args[0], FakeTensor):
            self._counts.copies += 1
            self._counts.syncs += 1
            return 1.0 if args[0].dtype.is_floating_point else 1
        if _is_on_host(tensors, kwargs):
            kwargs.pop("pin_memory", None)
            with unset_fake_temporarily():
                result = func(*args, **kwargs)
                return result.zero_() if name == "aten::empty" else result  # uninitialised memory would be read back
        result = func(*args, **kwargs)
        self._count(func, name, args, kwargs)
        return result

    def _count(self, func: Any, name: str, args: Any, kwargs: Any) -> None:
        if func.is_view or name.startswith(_NO_KERNEL):
            return
        if name.startswith("c10d::"):
            self._counts.collectives += 1
        elif (
            name == "aten::_to_copy"
            and torch.device(kwargs.get("device") or args[0].device).type != args[0].device.type
        ):
            self._counts.copies += 1
            self._counts.syncs += not kwargs.get("non_blocking")
        elif name == "aten::copy_" and args[0].is_cpu != args[1].is_cpu:
            self._counts.copies += 1
            self._counts.syncs += not (kwargs.get("non_blocking") or args[2:3] == (True,))
        else:
            self._counts.operators[name] += 1


def _is_on_host(tensors: list[Tensor], kwargs: dict[str, Any]) -> bool:
    is_cpu = torch.device(kwargs.get("device") or "cpu").type == "cpu"
    return is_cpu and not any(isinstance(tensor, FakeTensor) for tensor in tensors)


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return []
    return [tensor for value in values for tensor in _tensors(value)]


def played_streams(counts: Counts) -> tuple[type, type]:
    """Classes for `torch.cuda.Event` and `torch.cuda.Stream` that count."""

    class PlayedEvent:
        def __init__(self, enable_timing: bool = False, **_: Any) -> None:
            self._is_stamp = enable_timing

        def record(self, *_: Any) -> None:
            counts.events += 1
            counts.stamps += self._is_stamp

        def query(self) -> bool:
            return True

        def wait(self, *_: Any) -> None: ...

        def synchronize(self) -> None:
            counts.syncs += 1

        def elapsed_time(self, other: Any) -> float:
            return 50.0  # so that a step is long enough to be stamped each time

    class PlayedStream:
        device = torch.device("cuda", 0)
        device_index = device_type = stream_id = cuda_stream = 0

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def wait_event(self, event: Any) -> None:
            event.wait(self)  # as torch's does

        def wait_stream(self, stream: Any) -> None:
            self.wait_event(stream.record_event())

        def record_event(self, event: Any = None) -> Any:
            event = event or PlayedEvent()
            event.record()
            return event

        def synchronize(self) -> None:
            counts.syncs += 1

    return PlayedEvent, PlayedStream
