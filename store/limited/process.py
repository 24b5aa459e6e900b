"""A process that answers questions under limits, as its parent sees it.

    process = LimitedProcess("store.sql.child")
    answer = process.ask(question, limit_s=20)      # bytes each; EOFError or TimeoutError: it is of no more use
    process.kill()

Questions and answers are eight bytes of length and a text. The process sets its limits itself (`limits`).
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import subprocess
import time

from probes.attach.launch.own_process import own_process

__all__ = ["LimitedProcess"]

START_S = 60.0
MARGIN_S = 2.0
"""After the limit: for the answer to arrive."""


class LimitedProcess:
    """One process; answers one question at a time."""

    def __init__(self, module: str, *, max_answer_bytes: int) -> None:
        command, environment = own_process(module)
        # Each arena of malloc reserves address space, which the limit would count.
        environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
            start_new_session=True,
        )  # fmt: skip
        self._max_answer_bytes = max_answer_bytes
        self._is_ready = False

    def ask(self, question: bytes, limit_s: float) -> bytes:
        """The answer. The process is of no use after an EOFError, an OSError or a TimeoutError."""
        if not self._is_ready:
            self._read(time.monotonic() + START_S)
            self._is_ready = True
        assert self.process.stdin is not None
        self.process.stdin.write(struct.pack(">Q", len(question)) + question)
        self.process.stdin.flush()
        return self._read(time.monotonic() + limit_s + MARGIN_S)

    def kill(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # a question that was never read
                    stream.close()

    def _read(self, deadline_s: float) -> bytes:
        (size,) = struct.unpack(">Q", self._exactly(8, deadline_s))
        if size > self._max_answer_bytes:
            raise EOFError
        return self._exactly(size, deadline_s)

    def _exactly(self, num_bytes: int, deadline_s: float) -> bytes:
        assert self.process.stdout is not None
        found, fd = bytearray(), self.process.stdout.fileno()
        while len(found) < num_bytes:
            if not select.select([fd], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                raise TimeoutError
            if not (part := os.read(fd, min(1 << 20, num_bytes - len(found)))):
                raise EOFError
            found += part
        return bytes(found)
