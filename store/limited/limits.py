"""Resource limits of a process that serves requests, and its side of the protocol with `process.LimitedProcess`.

    serve(answer)            # answer(request: bytes) -> bytes, until the input ends

The kernel enforces the limits: RLIMIT_AS for memory, and SIGALRM, which kills the process, for time.
"""

from __future__ import annotations

import math
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from store.limited.frames import read_frame, write_frame

__all__ = ["limit_memory", "serve", "status_bytes", "time_limit"]

MAX_KEPT_BYTES = 300 << 20
"""Memory that the process may keep between requests; if it keeps more, it exits."""


def serve(answer: Callable[[bytes], bytes], warm_up: Callable[[], None] = lambda: None) -> None:
    """Read requests from standard input and write responses to standard output."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.dup(1)
    os.dup2(2, 1)  # send what a library prints to standard error, so that it does not mix with the responses
    warm_up()
    write_frame(answers, b"ready", math.inf)
    with suppress(EOFError):
        while True:
            write_frame(answers, answer(read_frame(0, math.inf, max_bytes=1 << 40)), math.inf)
            if status_bytes("VmRSS") > MAX_KEPT_BYTES:
                return


@contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """Kill this process if the block takes longer than `limit_s` seconds."""
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def limit_memory(memory_bytes: int | None) -> None:
    """Limit this process to `memory_bytes` more than it has mapped now; None: no limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = hard if memory_bytes is None else status_bytes("VmSize") + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def status_bytes(name: str) -> int:
    """A size field of `/proc/self/status`, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name + ":"))
