"""The parent's side of a process that serves requests under resource limits.

    process = LimitedProcess("store.sql.child", max_answer_bytes=1 << 20)
    answer = process.ask(question, limit_s=20)      # bytes; after EOFError or TimeoutError, kill it
    process.kill()

Requests and responses are frames (`frames`). The process sets its own limits (`limits`).
"""

from __future__ import annotations

import subprocess
import time

from probes.attach.launch.own_process import own_process
from store.limited.frames import read_frame, write_frame

__all__ = ["LimitedProcess"]

START_S = 60.0
MARGIN_S = 2.0
"""Seconds after the time limit within which the response may still arrive."""


class LimitedProcess:
    """One process; it serves one request at a time."""

    def __init__(self, module: str, *, max_answer_bytes: int) -> None:
        command, environment = own_process(module)
        # Each malloc arena reserves address space, which counts towards the limit.
        environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
            start_new_session=True,
        )  # fmt: skip
        self._max_answer_bytes = max_answer_bytes
        self._is_ready = False

    def ask(self, question: bytes, limit_s: float) -> bytes:
        """Send a request and return the response. After an EOFError, OSError or TimeoutError, the process can only be
        killed.
        """
        if not self._is_ready:
            self._read(time.monotonic() + START_S)
            self._is_ready = True
        assert self.process.stdin is not None
        deadline_s = time.monotonic() + limit_s + MARGIN_S
        write_frame(self.process.stdin.fileno(), question, deadline_s)
        return self._read(deadline_s)

    def kill(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def _read(self, deadline_s: float) -> bytes:
        assert self.process.stdout is not None
        try:
            return read_frame(self.process.stdout.fileno(), deadline_s, max_bytes=self._max_answer_bytes)
        except ValueError:  # the answer is longer than allowed
            raise EOFError from None
