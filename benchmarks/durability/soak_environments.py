"""Disturb the environment of a running soak at intervals, for some seconds each.

    bad = BadEnvironments.under(folder, seed=0)     # before the soak starts: builds the shim, sets LD_PRELOAD
    bad.start(every_s=60)                    # a thread; the run is the newest of folder / "runs"
    bad.stop()                               # bad.log lists the disturbances

The environments are those of `benchmarks.durability.torture` that a run must survive without a restart: a wall clock
that is an hour off, a store that another process keeps open, a stopped watch, a hook that kills the watch, a checkpoint
that cannot be written. A fault of the soak may occur during any of them.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.durability.torture import ENVIRONMENTS, Stage, relieve
from probes.tape.rundir import RunError

NAMES = ("clock + 1 h", "clock - 1 h", "reader_open", "watch_stopped", "hook_kills_watch", "eio_save")
LASTS_S = 10.0
"""Longer than a tick of `watch`, shorter than the time after which a soak reports a run as wedged."""


class BadEnvironments:
    """Disturbs the environment in a thread."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.stage = Stage(folder=folder, control=folder / "control", server=None)
        self.log: list[dict[str, Any]] = []
        self._dice = random.Random(seed)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def under(cls, folder: Path, seed: int) -> BadEnvironments:
        """Build the shim for the processes of a soak in `folder`, which inherit LD_PRELOAD."""
        source = Path(__file__).with_name("torture_shim.c")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", folder / "shim.so", source, "-ldl"], check=True)
        (folder / "control").write_bytes(bytes(256))
        (folder / "hook.sh").write_text(f"[ -e {folder}/kill_watch ] && kill -9 $PPID\nexit 0\n")
        os.environ |= {"LD_PRELOAD": str(folder / "shim.so"), "RS_TORTURE": str(folder / "control")}
        return cls(folder, seed)

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings of the disturbed run."""
        return (f"alerts.command=sh {self.stage.folder}/hook.sh",)

    def start(self, every_s: float) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, args=(every_s,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and restore the environment."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(2 * LASTS_S)

    def _run(self, every_s: float) -> None:
        left: list[str] = []
        while not self._ended.wait(every_s * self._dice.uniform(0.6, 1.4)):
            left = left or self._dice.sample(NAMES, len(NAMES))
            with contextlib.suppress(OSError, RunError, IndexError):  # between two attempts, or two watches
                self._disturb(left[-1])
                left.pop()

    def _disturb(self, name: str) -> None:
        flag = self.stage.folder / "kill_watch"
        begin_s = time.monotonic()
        try:
            ENVIRONMENTS[name].apply(self.stage)
            if name == "hook_kills_watch":
                flag.touch()
            self.log.append({"environment": name, "wall_s": time.time()})
            self._ended.wait(LASTS_S)
        finally:
            relieve(self.stage)
            flag.unlink(missing_ok=True)
            print(f"{name}: {time.monotonic() - begin_s:.0f} s", flush=True)
