"""Record every collective and point-to-point call of a rank, in the process group that all of them go through.

    install(recorder)                               # before the first process group is made
    dist.init_process_group("gloo")                 # backends keep their names
    ...
    uninstall()                                     # all groups are torch's own again

After `install`, torch's own function that makes process groups returns a `RecordedGroup`: a `ProcessGroup` over the
same backends. Its collective methods write a record and then call the group that torch has made. DDP's reducer, FSDP2,
DTensor, pipelines, checkpoints and object collectives hold this group like any other. The record is on the tape
before the real call, because on gloo a mismatch of sizes ends the process without an error.

For a blocking call, the wrapper waits and returns no handle, which torch treats as "already waited for". Returning
torch's own handle would cost a second wait, in which gloo's reduce-scatter copies its output again.

**Groups of NCCL stay torch's own** (`is_recorded_here`): the profiler plugin records them below Python. The end of a
call on a GPU is not visible from Python. The host enqueues the call and continues, so a record would stay open until
something queries the device, and an open record is evidence of a hang. `batch_isend_irecv` coalesces calls only if
`type(group) is ProcessGroup`, and NCCL may deadlock without coalescing. Symmetric memory needs a store that a Python
subclass of the group cannot have. Each call would take the GIL.

A separate backend name was rejected: `dist.get_backend()` would return it to code that compares with "nccl", and the
device bound at initialisation would be lost.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..fail_open import failing_open, probes_disabled, record_error
from ..recorder import Recorder
from ..tape_recorder import TapeRecorder
from ..torch_compat import group_world
from .call_records import GroupCalls
from .done_callbacks import DoneCallbacks
from .gradients.local_gradient import UnreducedNorm
from .group_probe import GroupProbe
from .groups.group_tables import alive_groups, exchange, replace_new
from .methods import METHODS
from .recorded_method import recorded_method

__all__ = [
    "RecordedGroup",
    "announce",
    "install",
    "is_recorded_here",
    "recorded_over",
    "take_gradient_peaks",
    "training_is_here",
    "uninstall",
    "unreduced_gradients",
]

_ProcessGroup: Any = dist.ProcessGroup
_lock = threading.Lock()


def install(recorder: Recorder, *, check_nonfinite: bool = True, has_plugin: bool = False) -> None:
    """Record every process group that is made from now on; nothing if the probes are off.

    With `check_nonfinite` each buffer gets one pass before it is reduced, since a reduction spreads a NaN to all.
    `has_plugin`: NCCL loads the profiler plugin, so its groups are recorded, too.
    """
    global _probe
    if probes_disabled() or not isinstance(recorder, TapeRecorder):
        return
    with failing_open("collectives.install"), _lock:
        _probe = GroupProbe(recorder, check_nonfinite=check_nonfinite, has_plugin=has_plugin)
        for name, replacement in _MAKERS.items():
            if name not in _originals and hasattr(c10d, name):
                _originals[name] = real = getattr(c10d, name)
                setattr(c10d, name, replacement(real))


def uninstall() -> None:
    """Restore torch's process groups, also those that were recorded.

    Groups still referenced from C++ or local variables keep working, unrecorded.
    """
    global _probe
    with _lock:
        probe, _probe = _probe, None
        for name, real in _originals.items():
            setattr(c10d, name, real)
        _originals.clear()
    if probe is not None:
        probe.release()
        with failing_open("collectives.uninstall"):
            probe.calls.callbacks.wait()
            exchange([(group, group.plain) for group in alive_groups() if type(group) is RecordedGroup])


def unreduced_gradients() -> UnreducedNorm | None:
    """Return the meter of this rank's gradients before reduction; None if nothing is recorded."""
    return None if _probe is None else _probe.unreduced


def training_is_here() -> None:
    """Mark the calling thread as the training thread. Collective waits of other Python threads are not the rank's."""
    if _probe is not None:
        _probe.calls.training_thread = threading.get_ident()


def take_gradient_peaks() -> dict[str, float]:
    """Return and reset the largest absolute value of this rank's unreduced gradients, by mesh dimension; NaN if one was
    not finite. The time starts with the first call."""
    if _probe is None:
        return {}
    _probe.calls.measures_peaks = True
    taken, _probe.calls.gradient_peaks = _probe.calls.gradient_peaks, {}
    return taken


@atexit.register
def _wait_for_callbacks() -> None:
    if _probe is not None:
        with failing_open("collectives.callbacks"):
            _probe.calls.callbacks.wait()


def _forked() -> None:
    """Record nothing in a forked child: the tape is its parent's, and so are the collectives in flight."""
    global _probe
    probe, _probe = _probe, None
    if probe is not None:
        with failing_open("collectives.forked"):
            probe.release()


os.register_at_fork(after_in_child=_forked)

_probe: GroupProbe | None = None
_originals: dict[str, Any] = {}


def is_recorded_here(group: Any) -> bool:
    """Return True if `group` may be replaced by the wrapper: all its backends run on the host.

    A backend that batches point-to-point calls launches them on a device; see the module's docstring.
    """
    return not any(_batches(group._get_backend(device)) for device in group._device_types)


def _batches(backend: Any) -> bool:
    # torch 2.6 lacks `supports_coalescing`
    return bool(getattr(backend, "supports_coalescing", backend.name() != "gloo"))


class RecordedGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group that records its calls and passes them on to `plain`, torch's own over the same backends."""

    _callbacks: DoneCallbacks | None = None

    def __init__(self, plain: Any) -> None:
        super().__init__(plain.rank(), plain.size())  # the constructor with a store is not open to Python subclasses
        self.plain = plain
        self.members: list[int] | None = None
        """Global ranks of the members, if torch's tables lack them."""
        self.calls = GroupCalls()
        if (probe := _probe) is not None:
            with failing_open("collectives.group"):
                probe.register(self)
                self._callbacks = probe.calls.callbacks
                # The wrappers are set on the instance, so that a call takes one look-up and creates no bound method.
                # They hold no reference to the group.
                for name, method in METHODS.items():
                    self.__dict__[name] = recorded_method(probe, self.calls, getattr(plain, name), method)

    def __del__(self) -> None:
        if (callbacks := self._callbacks) is not None:
            with failing_open("collectives.callbacks"):
                callbacks.keep(self.plain)

    def pass_on(self) -> None:
        """Stop recording; calls still go to the plain group."""
        for name in METHODS:
            if name in self.__dict__:
                self.__dict__[name] = _passed_on(getattr(self.plain, name))

    # Attributes that torch sets on either group must be set on both.

    def get_group_store(self) -> Any:
        return self.plain.get_group_store()

    def _set_group_name(self, name: str) -> None:
        super()._set_group_name(name)
        self.plain._set_group_name(name)

    def _set_group_desc(self, desc: str) -> None:
        super()._set_group_desc(desc)
        self.plain._set_group_desc(desc)

    @property
    def bound_device_id(self) -> torch.device | None:
        return _ProcessGroup.bound_device_id.__get__(self)  # type: ignore[no-any-return]

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        _ProcessGroup.bound_device_id.__set__(self, device)
        self.plain.bound_device_id = device

    # If C++ makes a group from this one, it uses this group's store, which only the plain group has.

    def split_group(self, *args: Any, **kwargs: Any) -> Any:
        return recorded_over(self.plain.split_group(*args, **kwargs))

    def merge_remote_group(self, *args: Any, **kwargs: Any) -> Any:
        return recorded_over(self.plain.merge_remote_group(*args, **kwargs))


def _passed_on(real: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `real` in a Python function. With a built-in one pybind11 would decide, for the whole class, that the method
    is not overridden."""
    return lambda *args, **kwargs: real(*args, **kwargs)


def recorded_over(made: Any) -> Any:
    """Wrap `made`, a plain torch group, in a recorded one; return `made` itself if it is not recorded here."""
    if made is None or _probe is None or type(made) is RecordedGroup:
        return made
    try:
        if not is_recorded_here(made):
            return made
        group = RecordedGroup(made)
        kinds = _ProcessGroup.BackendType
        default = getattr(kinds, made.name().upper(), kinds.CUSTOM)
        for device in made._device_types:
            backend = made._get_backend(device)
            group._register_backend(device, getattr(kinds, backend.name().upper(), kinds.CUSTOM), backend)
            if backend.name() == "gloo":
                group.calls.host_timed.add(device.type)
        group._set_default_backend(default)
        group._set_group_name(made.group_name)
        group._set_group_desc(made.group_desc)
        if made.bound_device_id is not None:
            group.bound_device_id = made.bound_device_id
        return group
    except Exception as error:
        record_error("collectives.group", error)
        return made


def announce(group: Any, members: Sequence[int]) -> None:
    """Write the event that describes a plain torch group: its calls are recorded by the NCCL plugin, or not at all."""
    if (probe := _probe) is not None and type(group) is not RecordedGroup:
        with failing_open("collectives.announce"):
            probe.announce_plain(group, members)


def _new_group(real: Callable[..., Any]) -> Callable[..., Any]:
    """Replace torch's function that makes all groups except split ones."""

    @functools.wraps(real)
    def new_group(group_size: int, group_rank: int, members: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        known = len(group_world().pg_map)
        made, store = real(group_size, group_rank, members, *args, **kwargs)
        if store is None or len(group_world().pg_map) == known:  # this rank is no member, or the group existed already
            return made, store
        group = recorded_over(made)
        if group is made:
            announce(made, list(members) or range(group_size))
        else:
            replace_new(made, group)
        return group, store

    return new_group


def _registered(real: Callable[..., Any]) -> Callable[..., Any]:
    """Replace torch's function that registers a group; it receives the members of a split or merged group."""

    @functools.wraps(real)
    def register(group: Any, *args: Any, **kwargs: Any) -> Any:
        result = real(group, *args, **kwargs)
        if ranks := kwargs.get("rank_mapping"):
            announce(group, sorted(ranks, key=ranks.__getitem__))
        return result

    return register


_MAKERS = {"_new_process_group_helper": _new_group, "_register_pg_in_world": _registered}
"""{name of a torch function that makes groups, in the module that calls it: function that builds the replacement}."""
