"""Faults of timing other than slow computing: a slow network, a pause, and extra work on rank 0.

ARM["slow_link"](trigger, training)
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import time
from collections.abc import Callable, Mapping

from torch import Tensor

from trainer.faults.trigger import FaultyLoader, Trigger
from trainer.training.rank_training import Training

__all__ = ["ARM"]

_SO_MAX_PACING_RATE = 47  # of Linux; Python's socket module does not name it
_UNLIMITED = -1
_GARBAGE = 20_000
_FLOOD_SPANS = 300


def _arm_slow_link(trigger: Trigger, training: Training) -> None:
    """Let the kernel limit the rate of this process's TCP connections, including gloo's."""
    paced = [False]

    class Slow(FaultyLoader):
        def before(self) -> None:
            if (slow := trigger.lasting()) != paced[0]:
                paced[0] = slow
                _pace(int((trigger.fault.rate_mb or 1.0) * 1e6) if slow else _UNLIMITED)

    Slow(training)


def _pace(bytes_per_second: int) -> int:
    """Limit every connected TCP socket of this process; returns how many there are."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername():
                    connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, bytes_per_second)
                    count += 1
    return count


def _arm_pause(trigger: Trigger, training: Training) -> None:
    class Pausing(FaultyLoader):
        def before(self) -> None:
            if trigger.due():
                until = time.monotonic() + (trigger.fault.seconds or 0.5)
                while time.monotonic() < until:
                    _leave_garbage()
                    gc.collect()

    Pausing(training)


def _leave_garbage() -> None:
    for _ in range(_GARBAGE):
        knot: list[object] = []
        knot.append(knot)


def _arm_slow_logging(trigger: Trigger, training: Training) -> None:
    """Sleep after the update and outside all phases, where a training script logs or evaluates."""
    take = training.step

    def step_and_sleep(step: int, *, leave_out: Tensor | None = None) -> float:
        rate = take(step, leave_out=leave_out)
        if trigger.lasting():
            time.sleep(trigger.fault.seconds or 0.03)
        return rate

    training.step = step_and_sleep  # type: ignore[method-assign]


def _arm_flood(trigger: Trigger, training: Training) -> None:
    """Write extra spans; a step of a small model has about thirty records."""

    class Flooding(FaultyLoader):
        def before(self) -> None:
            if trigger.lasting():
                for _ in range(_FLOOD_SPANS):
                    with trigger.recorder.span("data"):
                        pass

    Flooding(training)


ARM: Mapping[str, Callable[[Trigger, Training], None]] = {
    "slow_link": _arm_slow_link,
    "pause": _arm_pause,
    "slow_logging": _arm_slow_logging,
    "flood": _arm_flood,
}
