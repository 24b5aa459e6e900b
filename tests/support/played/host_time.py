"""The virtual clock of a played run: for the plugin in C, and for the recorder in Python.

library = build(folder); clock = PlayedClock(folder)
with played_time(clock):
    clock.set(1_000_000)               # 1 ms after the run's start, for all readers
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from probes import step_clock, tape_recorder
from probes.collectives.nccl_plugin.build import BuildError, compile_plugin
from probes.device import memory, phase_events
from probes.device.cpu_time import CoreUse
from probes.tape import events

__all__ = ["PlayedClock", "build", "played_time"]

_SOURCE = Path(__file__).with_name("clock.c")
_CLOCK = "libplayed-clock.so"
_PLUGIN = "libplayed-plugin.so"


def build(folder: Path) -> Path:
    """Compile the clock and the plugin that reads it; returns the plugin. Raises BuildError."""
    clock, plugin = folder / _CLOCK, folder / _PLUGIN
    if not plugin.is_file():
        compile_plugin(plugin, flags=["-Dclock_gettime=played_clock_gettime"])
        words = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O2", str(_SOURCE), "-o", str(clock)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(done.stderr)
    return plugin


class PlayedClock:
    """Time of a played run, shared with every plugin that is loaded after it."""

    def __init__(self, folder: Path) -> None:
        library = ctypes.CDLL(str(folder / _CLOCK), mode=ctypes.RTLD_GLOBAL)
        self._mono = ctypes.c_int64.in_dll(library, "played_mono_ns")
        self.begin_ns = time.monotonic_ns() + 1_000_000_000
        self.wall_minus_mono_ns = time.time_ns() - time.monotonic_ns()
        ctypes.c_int64.in_dll(library, "played_wall_minus_mono_ns").value = self.wall_minus_mono_ns
        self.set(0)

    def set(self, ns: int) -> None:
        """Set the time, nanoseconds since the run's begin."""
        self._mono.value = self.begin_ns + ns

    def mono_ns(self) -> int:
        """The monotonic clock."""
        return self._mono.value

    def wall_ns(self, ns: int) -> int:
        """Epoch time of a time since the run's begin."""
        return self.begin_ns + ns + self.wall_minus_mono_ns

    @contextmanager
    def environment(self, **variables: str) -> Iterator[None]:
        """Variables that a plugin reads when its first communicator is made."""
        fixed = {"RANKSCOPE_NCCL_ATTEMPT": "0", "RANKSCOPE_NCCL_EVENTS": "calls,kernels,links,steps"}
        with mock.patch.dict(os.environ, fixed | variables):
            yield


class _PlayedCoreTime:
    """CPU time of the host, which spins while it waits for its device."""

    clock: PlayedClock

    def begin(self) -> None:
        self._begin_ns = self.clock.mono_ns()

    def end(self) -> CoreUse:
        return CoreUse(self.clock.mono_ns() - self._begin_ns, 0, 0)

    def close(self) -> None:
        pass


def _memory_stats() -> dict[str, int]:
    return {"allocated_bytes.all.current": 40 << 30, "allocated_bytes.all.peak": 50 << 30, "num_alloc_retries": 0}


@contextmanager
def played_time(clock: PlayedClock) -> Iterator[None]:
    """Let the recorder read the played clock, and no real one."""
    core = type("PlayedCoreTime", (_PlayedCoreTime,), {"clock": clock})
    event_time = SimpleNamespace(time_ns=lambda: clock.mono_ns() + clock.wall_minus_mono_ns, monotonic_ns=clock.mono_ns)
    with (
        mock.patch.object(events, "time", event_time),
        mock.patch.object(memory, "_reader", return_value=_memory_stats),
        mock.patch.object(tape_recorder, "device_uuid", return_value=""),
        mock.patch.object(tape_recorder, "_monotonic_ns", clock.mono_ns),
        mock.patch.object(step_clock, "_monotonic_ns", clock.mono_ns),
        mock.patch.object(phase_events, "_monotonic_ns", clock.mono_ns),
        mock.patch.object(step_clock, "CoreTime", core),
    ):
        yield
