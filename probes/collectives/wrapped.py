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

import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..fail_open import failing_open, probes_disabled, record_error
from ..recorder import Recorder
from ..tape import event_kinds
from ..tape_recorder import TapeRecorder
from .backward_wait import BackwardWait
from .call_records import Calls, GroupCalls
from .group_label import group_label
from .local_gradient import Unreduced
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
_monotonic_ns = time.monotonic_ns
_lock = threading.Lock()


class _Method(NamedTuple):
    """A method of `ProcessGroup`: what it does, where its input is, whether it reduces."""

    op: str
    input: int = 0  # index among the arguments; -1: none
    reduces: bool = False
    peer: int = -1  # index of the other end's group rank; -1: none


_METHODS = {
    "allreduce": _Method("all_reduce", reduces=True),
    "allreduce_coalesced": _Method("all_reduce", reduces=True),
    "reduce": _Method("reduce", reduces=True),
    "reduce_scatter": _Method("reduce_scatter", input=1, reduces=True),
    "broadcast": _Method("broadcast"),
    "allgather": _Method("all_gather", input=1),
    "allgather_coalesced": _Method("all_gather", input=1),
    "gather": _Method("gather", input=1),
    "scatter": _Method("scatter"),  # only the root has an input; all have an output
    "alltoall": _Method("all_to_all", input=1),
    "send": _Method("send", peer=1),
    "recv": _Method("recv", peer=1),
    "recv_anysource": _Method("recv"),
    "barrier": _Method("barrier", input=-1),
    "monitored_barrier": _Method("barrier", input=-1),
    # The same under their names up to 2.11 and from 2.13 on; a version has either or both.
    "_allgather_base": _Method("all_gather", input=1),
    "all_gather_single": _Method("all_gather", input=1),
    "allgather_into_tensor_coalesced": _Method("all_gather", input=1),
    "all_gather_single_coalesced": _Method("all_gather", input=1),
    "_reduce_scatter_base": _Method("reduce_scatter", input=1, reduces=True),
    "reduce_scatter_single": _Method("reduce_scatter", input=1, reduces=True),
    "reduce_scatter_tensor_coalesced": _Method("reduce_scatter", input=1, reduces=True),
    "reduce_scatter_single_coalesced": _Method("reduce_scatter", input=1, reduces=True),
    "alltoall_base": _Method("all_to_all", input=1),
    "all_to_all_single": _Method("all_to_all", input=1),
}
_METHODS = {name: method for name, method in _METHODS.items() if hasattr(_ProcessGroup, name)}
_NON_BLOCKING = ("isend", "irecv")
_BLOCKING = ("send", "recv")  # torch's own, which call the others and wait


def install(recorder: Recorder, *, check_nonfinite: bool = True) -> None:
    """Record every process group that is made from now on; nothing if the probes are off.

    With `check_nonfinite` each buffer gets one pass before it is reduced, since a reduction spreads a NaN to all.
    """
    global _probe
    if probes_disabled() or not isinstance(recorder, TapeRecorder):
        return
    with failing_open("collectives.install"), _lock:
        _probe = _Probe(recorder, check_nonfinite=check_nonfinite)
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


class _Probe:
    """State shared by the recorded groups of one recorder."""

    def __init__(self, recorder: TapeRecorder, *, check_nonfinite: bool) -> None:
        self.recorder = recorder
        self.calls = Calls(recorder, check_nonfinite=check_nonfinite)
        self.backward = BackwardWait(self.calls)
        self.unreduced = Unreduced()
        self._unlabelled: list[weakref.ref[RecordedGroup]] = []
        self._labels: dict[str, int] = {}
        self._made: list[weakref.ref[RecordedGroup]] = []

    def made(self, group: RecordedGroup) -> None:
        """Remember the order in which groups are made: it is the same on all their members."""
        self._unlabelled.append(weakref.ref(group))

    def holds(self, group: RecordedGroup) -> None:
        """Remember a group, to be released."""
        self._made.append(weakref.ref(group))

    def release(self) -> None:
        """No group records from here on."""
        for reference in self._made:
            if (group := reference()) is not None:
                group.pass_on()

    def label(self) -> None:
        """Give each group made so far its label, in the order in which they were made.

        Torch knows the members only when a group is ready, hence at the first call and not in the constructor.
        """
        waiting, self._unlabelled = self._unlabelled, []
        for reference in waiting:
            group = reference()
            if group is not None:
                with failing_open("collectives.label"):
                    self._label_one(group)

    def _label_one(self, group: RecordedGroup) -> None:
        members = _members(group)
        if members is None:
            self.made(group)
            return
        description = group.group_desc
        label = group_label(description, members)
        number = self._labels[label] = self._labels.get(label, 0) + 1
        if number > 1:
            label = f"{label}#{number}"
        group.calls.members = members
        kind = label.partition(":")[0]
        # A mesh of one dimension has the world's group: there only what the backward pass reduces is a gradient.
        group.calls.dimension = kind if kind.startswith("dp_") or kind == "world" else ""
        group.calls.label = self.recorder.name(label)
        self.recorder.event(
            event_kinds.PROCESS_GROUP,
            process_group=label,
            description=description,
            group_name=group.group_name,
            recorded_by="wrapper",
            members=members,
        )


_probe: _Probe | None = None


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
                for name, method in _METHODS.items():
                    self.__dict__[name] = _recorded(probe, self.calls, getattr(self._plain, name), method)

    def pass_on(self) -> None:
        """Record nothing any more."""
        for name in _METHODS:
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


def _recorded(probe: _Probe, group: GroupCalls, real: Callable[..., Any], method: _Method) -> Callable[..., Any]:
    """`real`, with its call on the tape."""
    calls, backward, recorder, unreduced = probe.calls, probe.backward, probe.recorder, probe.unreduced
    input_index, reduces, peer_index = method.input, method.reduces, method.peer
    op = recorder.name(method.op)
    open_record, complete, is_training = calls.open, calls.complete, calls.is_training

    def recorded(*args: Any, **kwargs: Any) -> Any:
        call = None
        try:
            if not group.label:
                probe.label()
            peer = -1
            if peer_index >= 0:
                is_async = _is_async_p2p(sys._getframe(1))
                sync = False  # also a blocking one waits by itself
                peer = group.members[args[peer_index]] if group.members else args[peer_index]
            else:
                options = kwargs["opts"] if "opts" in kwargs else args[-1] if args else None
                is_async = getattr(options, "asyncOp", True)
                sync = not is_async and group.coalesced is None
            tensors: Sequence[torch.Tensor] = ()
            if 0 <= input_index < len(args):
                tensors = args[input_index]
                if type(tensors) is not list or len(tensors) != 1 or type(tensors[0]) is list:
                    tensors = _tensors(tensors)
            if reduces and unreduced.is_on:
                options = kwargs["opts"] if "opts" in kwargs else args[-1] if args else None
                unreduced.add(method.op, tensors, getattr(options, "reduceOp", None), len(group.members))
            slot, issue_ns = open_record(group, op, tensors, peer, is_async, reduces)
            if not sync or (tensors and tensors[0].is_cuda):
                call = calls.track(slot, issue_ns, tensors, reduces)
        except Exception as error:
            record_error("collectives.issue", error)
            return real(*args, **kwargs)
        work = real(*args, **kwargs)
        if sync and work is not None:
            work.wait()  # what the caller would do next
            work = None
        try:
            if call is not None and group.coalesced is not None:
                group.coalesced.append(call)
            elif call is not None and work is not None:
                return RecordedWork(work, call, calls, backward)
            elif call is not None and call.start is not None:
                calls.device.passed(call, call.start, calls.device.mark())
            else:
                end = _monotonic_ns()
                complete(slot, end, end - issue_ns)
                if is_training():
                    recorder.wait_ns += end - issue_ns
        except Exception as error:
            record_error("collectives.complete", error)
        return work

    return recorded


def _passed_on(real: Callable[..., Any]) -> Callable[..., Any]:
    """`real` as a function of Python: C++ remembers of a whole class that a built-in one stands for no method."""
    return lambda *args, **kwargs: real(*args, **kwargs)


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


def _members(group: Any) -> list[int] | None:
    """Global ranks of the members in the order of their group ranks; None while torch doesn't know them."""
    ranks = c10d._world.pg_group_ranks.get(group)
    return None if ranks is None else sorted(ranks, key=ranks.__getitem__)


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
