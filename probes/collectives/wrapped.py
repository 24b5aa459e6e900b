"""Every collective and point-to-point call of a rank, recorded where all of them pass: in the process group.

    install(recorder)                               # before the first process group is made
    dist.init_process_group("gloo")                 # backends keep their names
    ...
    uninstall()                                     # groups made from here on are torch's own again

From `install` on, torch's own function that makes process groups builds a `RecordedGroup`: a `ProcessGroup` with the
real backends registered on it, whose collective methods write a record and then call a second, plain `ProcessGroup`
over the same backends. DDP's reducer, FSDP2, DTensor, pipelines, checkpoints and object collectives hold it like any
other. The record is on the tape before the real call: on gloo, a mismatch of sizes ends the process without an error.

A call that its caller waits for at once is waited for here, and no handle is returned: torch takes that for "waited for
already". To hand it torch's own would cost a second wait, in which gloo's reduce-scatter copies its output again.

Why not a backend of our own name: `dist.get_backend()` would then answer with that name, to code that asks it for
"nccl"; the device bound at initialisation would be lost; and `batch_isend_irecv` groups its calls, without which NCCL
may block for ever, only where `type(group) is ProcessGroup`, a name of torch's module that is ours to set.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..fail_open import failing_open, probes_disabled, record_error
from ..recorder import Recorder
from ..tape_recorder import TapeRecorder
from .call_records import GroupCalls
from .group_probe import GroupProbe
from .local_gradient import Unreduced
from .methods import METHODS
from .recorded_method import recorded_method
from .work_handle import RecordedWork

__all__ = [
    "RecordedGroup",
    "install",
    "recorded_over",
    "take_gradient_peaks",
    "uninstall",
    "unreduced_gradients",
]

_ProcessGroup: Any = dist.ProcessGroup
_lock = threading.Lock()


def install(recorder: Recorder, *, check_nonfinite: bool = True) -> None:
    """Record every process group that is made from now on; nothing if the probes are off.

    With `check_nonfinite` each buffer gets one pass before it is reduced, since a reduction spreads a NaN to all.
    """
    global _probe
    if probes_disabled() or not isinstance(recorder, TapeRecorder):
        return
    with failing_open("collectives.install"), _lock:
        _probe = GroupProbe(recorder, check_nonfinite=check_nonfinite)
        c10d.ProcessGroup = RecordedGroup  # type: ignore[misc]


def uninstall() -> None:
    """Process groups that are made from now on are torch's own; those that were recorded pass their calls on."""
    global _probe
    with _lock:
        if _probe is not None:
            _probe.release()
        _probe = None
        c10d.ProcessGroup = _ProcessGroup  # type: ignore[misc]


def unreduced_gradients() -> Unreduced | None:
    """Return the meter of this rank's gradients before reduction; None if nothing is recorded."""
    return None if _probe is None else _probe.unreduced


def take_gradient_peaks() -> dict[str, float]:
    """Largest absolute value of this rank's gradients before they were reduced, by mesh dimension, since the last call;
    NaN where one was not finite."""
    if _probe is None:
        return {}
    taken, _probe.calls.gradient_peaks = _probe.calls.gradient_peaks, {}
    return taken


_probe: GroupProbe | None = None


class _SameAsProcessGroup(type(_ProcessGroup)):  # type: ignore[misc]
    """Torch's module asks `isinstance(x, ProcessGroup)` by the name that is now ours: any process group is one."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _ProcessGroup)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _ProcessGroup)


class RecordedGroup(_ProcessGroup, metaclass=_SameAsProcessGroup):  # type: ignore[misc]
    """A process group that records its calls."""

    def __init__(self, store: Any, rank: int, size: int, *args: Any) -> None:
        super().__init__(rank, size)  # a subclass in Python may not hand over a store
        self._plain = _ProcessGroup(store, rank, size, *args)
        self.calls = GroupCalls()
        if (probe := _probe) is not None:
            with failing_open("collectives.group"):
                probe.made(self)
                probe.holds(self)
                # On the instance: one look-up, and no bound method for each call. They don't refer back to it.
                for name, method in METHODS.items():
                    self.__dict__[name] = recorded_method(probe, self.calls, getattr(self._plain, name), method)

    def pass_on(self) -> None:
        """Record nothing any more."""
        for name in METHODS:
            if name in self.__dict__:
                self.__dict__[name] = _passed_on(getattr(self._plain, name))

    # What is set on the one must be known to the other.

    def get_group_store(self) -> Any:
        return self._plain.get_group_store()

    def _register_backend(self, device: Any, backend_type: Any, backend: Any) -> None:
        super()._register_backend(device, backend_type, backend)
        self._plain._register_backend(device, backend_type, backend)

    def _set_default_backend(self, backend_type: Any) -> None:
        super()._set_default_backend(backend_type)
        self._plain._set_default_backend(backend_type)

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)
        self._plain._set_group_name(name)

    def _set_group_desc(self, desc: str) -> None:
        super()._set_group_desc(desc)
        self._plain._set_group_desc(desc)

    @property
    def bound_device_id(self) -> torch.device | None:
        return _ProcessGroup.bound_device_id.__get__(self)  # type: ignore[no-any-return]

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        _ProcessGroup.bound_device_id.__set__(self, device)
        self._plain.bound_device_id = device

    # Groups made from this one.

    def split_group(self, *args: Any, **kwargs: Any) -> Any:
        return recorded_over(super().split_group(*args, **kwargs))

    def merge_remote_group(self, *args: Any, **kwargs: Any) -> Any:
        return recorded_over(super().merge_remote_group(*args, **kwargs))

    # Calls that NCCL launches as one: their records are completed by the handle of the whole.

    def _start_coalescing(self, device: torch.device) -> None:
        self.calls.coalesced = []
        super()._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        work = super()._end_coalescing(device)
        coalesced, self.calls.coalesced = self.calls.coalesced, None
        if not coalesced or work is None or _probe is None:
            return work
        try:
            return RecordedWork(work, coalesced[0], _probe.calls, _probe.backward, tuple(coalesced[1:]))
        except Exception as error:
            record_error("collectives.coalesced", error)
            return work


def _passed_on(real: Callable[..., Any]) -> Callable[..., Any]:
    """`real` as a function of Python: C++ remembers of a whole class that a built-in one stands for no method."""
    return lambda *args, **kwargs: real(*args, **kwargs)


def recorded_over(made: Any) -> Any:
    """A recorded group over the backends of `made`, a plain group; `made` itself where nothing is recorded."""
    if made is None or _probe is None or type(made) is RecordedGroup:
        return made
    try:
        group = RecordedGroup(made.get_group_store(), made.rank(), made.size())
        kinds = _ProcessGroup.BackendType
        default = getattr(kinds, made.name().upper(), kinds.CUSTOM)
        for device in made._device_types:
            backend = made._get_backend(device)
            group._register_backend(device, getattr(kinds, backend.name().upper(), kinds.CUSTOM), backend)
        group._set_default_backend(default)
        group._set_group_name(made.group_name)
        group._set_group_desc(made.group_desc)
        if made.bound_device_id is not None:
            group.bound_device_id = made.bound_device_id
        return group
    except Exception as error:
        record_error("collectives.split", error)
        return made
