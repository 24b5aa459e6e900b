"""Make NCCL load the profiler plugin, by setting its variables before the process's first communicator.

    record_nccl(recorder, log_status=local_rank == 0)               # a rank with torch
    loading = load_plugin(directory, rank=3, attempt=0)          # any process
    loading.is_set, loading.reason            # False, "NCCL_PROFILER_PLUGIN names another plugin: ..."

NCCL reads `NCCL_PROFILER_PLUGIN` only when it creates the first communicator. Without a GPU nothing is done, silently.
RANKSCOPE_NCCL_EVENTS chooses what is recorded (docs/gpu.md); `none` turns it off.
"""

from __future__ import annotations

import glob
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...fail_open import failing_open
from ...tape import event_kinds
from .build import OVERRIDE, BuildError, library

if TYPE_CHECKING:
    from ...tape_recorder import TapeRecorder

__all__ = ["FIRST_NCCL", "Loading", "gpu_is_present", "load_plugin", "record_nccl"]

logger = logging.getLogger("rankscope.probes")
FIRST_NCCL = (2, 23)
"""The first NCCL with the profiler plugin interface."""
MAX_PATH_BYTES = 250  # NCCL copies the variable into 255 bytes
VARIABLE = "NCCL_PROFILER_PLUGIN"
EVENTS = "RANKSCOPE_NCCL_EVENTS"
_DIRECTORY = "RANKSCOPE_NCCL_DIR"
_LIBRARY_PREFIX = "libnccl-profiler-rankscope"

State = Literal["set", "off", "no_gpu", "other_plugin", "old_nccl", "too_late", "not_built"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """Result of loading the plugin. `reason`: one line why NCCL does not load it."""

    state: State
    reason: str = ""
    library: str = ""

    @property
    def is_set(self) -> bool:
        """True if the plugin loads with the first communicator."""
        return self.state == "set"

    @property
    def should_log(self) -> bool:
        """True if the user should know that something recordable is not recorded."""
        return self.state not in ("set", "off", "no_gpu")


def record_nccl(recorder: TapeRecorder, *, log_status: bool) -> bool:
    """Load the plugin for a rank, write the event with the result, and log one line on failure.

    Returns True if NCCL loads it. Call it before the process groups are made; `log_status`: on one rank of a node.
    """
    is_set = False
    with failing_open("nccl_plugin"):
        loading = load_plugin(recorder.directory, rank=recorder.rank, attempt=recorder.attempt)
        if loading.state != "no_gpu":
            recorder.event(event_kinds.NCCL_PLUGIN, state=loading.state, reason=loading.reason or None)
        if log_status and loading.should_log:
            logger.warning("rankscope does not record NCCL below Python: %s", loading.reason)
        is_set = loading.is_set
    return is_set


def load_plugin(directory: Path, *, rank: int, attempt: int, has_gpu: bool | None = None) -> Loading:
    """Set the variables of this process, and so of those that it starts; never raises.

    `directory` is the rank's folder of tapes.
    """
    loading = _check(gpu_is_present() if has_gpu is None else has_gpu)
    if loading.is_set:
        os.environ[VARIABLE] = loading.library
        os.environ[_DIRECTORY] = str(directory.resolve())
        os.environ["RANKSCOPE_NCCL_RANK"] = str(rank)
        os.environ["RANKSCOPE_NCCL_ATTEMPT"] = str(attempt)
    return loading


def gpu_is_present() -> bool:
    """Return True if this process may use a GPU of NVIDIA or AMD; the driver is not touched.

    A plugin named by RANKSCOPE_NCCL_PLUGIN is loaded on any machine.
    """
    if os.environ.get(OVERRIDE):
        return True
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if os.environ.get(variable, "unset") in ("", "-1"):
            return False
    return bool(glob.glob("/dev/nvidia[0-9]*")) or os.path.exists("/dev/kfd") or os.path.exists("/dev/dxg")


def _check(has_gpu: bool) -> Loading:
    if os.environ.get(EVENTS, "").strip().lower() in ("none", "off"):
        return Loading(state="off", reason=f"{EVENTS} turns it off")
    if not has_gpu:
        return Loading(state="no_gpu", reason="no GPU is visible")
    named = os.environ.get(VARIABLE, "")
    if named and not _is_ours(named):
        return Loading(state="other_plugin", reason=f"{VARIABLE} names another plugin, {named}; unset it")
    version = _nccl_version()
    if version is not None and version < FIRST_NCCL:
        text, first = ".".join(map(str, version)), ".".join(map(str, FIRST_NCCL))
        return Loading(state="old_nccl", reason=f"NCCL {text} has no profiler plugins; they came with NCCL {first}")
    if _has_communicator():
        return Loading(
            state="too_late",
            reason="NCCL has a communicator already; attach before the first collective, or use `rankscope run`",
        )
    try:
        path = str(library())
    except BuildError as error:
        return Loading(state="not_built", reason=str(error))
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        return Loading(state="not_built", reason=f"the plugin's path is longer than NCCL takes: {path}")
    return Loading(state="set", library=path)


def _is_ours(named: str) -> bool:
    return os.path.basename(named).startswith(_LIBRARY_PREFIX) or named == os.environ.get(OVERRIDE, "-")


def _torch() -> Any:
    """Return torch if this process has imported it; never imports it."""
    return sys.modules.get("torch")


def _nccl_version() -> tuple[int, ...] | None:
    """Version of the NCCL that torch is linked to; None if unknown."""
    torch = _torch()
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return None
    try:
        return tuple(torch.cuda.nccl.version()[:3])
    except Exception:  # the library that torch asks may be missing or from another build
        return None


def _has_communicator() -> bool:
    """Return True if a process group of torch has a communicator of NCCL, which it makes at its first call."""
    torch = _torch()
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    for group in list(torch.distributed.distributed_c10d._world.pg_map):
        for device in getattr(group, "_device_types", ()):
            try:
                backend = group._get_backend(device)
                if backend.name() == "nccl" and backend._is_initialized():
                    return True
            except Exception:  # a custom backend, or one that is gone
                continue
    return False
