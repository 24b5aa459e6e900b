"""Python processes for tests, forked from a server that has imported torch and the project, as with `Popen`.

    process = ForkedPython(["-m", "trainer.rank.worker", str(config)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    done = run_python(["-m", "rankscope", "compare", a, b])    # as subprocess.run with its output captured as text

Most of the time of a short process is its imports: 2 to 4 CPU-seconds for torch and the trainer. A fork has its own
pid, environment, folder, session, signals, output and `__main__`, and ends as an interpreter does. A test
about imports, about variables that are read at import, or about a parent process starts an interpreter instead.

`forks=True` is for a process that forks others itself: it is given a channel to the same server. With
`forks_python=True` the watch and the ranks of scripts that a launcher starts are forks, too (`tests.local_forks`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.forking_server import CHANNEL, MAX_MESSAGE_BYTES

ROOT = Path(__file__).parent.parent
_INHERITED_CHANNEL = os.environ.pop(CHANNEL, "")
_SERVER_GONE = 255
"""Exit code of a fork if the server died before it."""
_ended_cpu_s: list[float] = []


class ForkedPython(subprocess.Popen[Any]):
    """`arguments` are those of the interpreter: `-c code ...`, `-m module ...` or `script ...`."""

    _status = -1

    def __init__(
        self, arguments: Sequence[str], *, forks: bool = False, forks_python: bool = False, **options: Any
    ) -> None:
        self._forks, self._forks_python = forks, forks_python
        super().__init__([str(argument) for argument in arguments], **options)

    def _execute_child(self, *values: Any) -> None:
        bound = inspect.signature(subprocess.Popen._execute_child).bind(self, *values).arguments  # type: ignore[attr-defined]
        assert not bound["pass_fds"], "not implemented"
        pipes = [bound[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        files = [fd if fd >= 0 else default for default, fd in enumerate(pipes[i] for i in (0, 3, 5))]
        request = {
            "arguments": bound["args"],
            "cwd": str(bound["cwd"] or Path.cwd()),
            "environment": dict(os.environ if bound["env"] is None else bound["env"]),
            "forks": self._forks,
            "forks_python": self._forks_python,
        }
        status, status_end = os.pipe()
        try:
            socket.send_fds(_server(), [json.dumps(request).encode()], [*files, status_end])
        finally:
            os.close(status_end)
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self._child_created = True
        self._status = status
        self.pid = int(_line(status))

    def fileno(self) -> int:
        """For `select`: readable once the process has ended."""
        return self._status

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            self._ended(0.0)
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """For Popen.wait and Popen.communicate: (pid, status), (0, 0) while it runs."""
        status = self._ended(0.0 if wait_flags & os.WNOHANG else None)
        return (0, 0) if status is None else (self.pid, status)

    def _ended(self, timeout_s: float | None) -> int | None:
        if not select.select([self._status], [], [], timeout_s)[0]:
            return None
        status_text, _, cpu_s = _line(self._status).decode().partition(" ")
        status = int(status_text or _SERVER_GONE << 8)
        _ended_cpu_s.append(float(cpu_s or 0.0))
        os.close(self._status)
        self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return status


def forks_cpu_s() -> float:
    """CPU seconds of the ended forks, which are the server's children: getrusage here does not count them."""
    return sum(_ended_cpu_s)


def run_python(
    arguments: Sequence[str],
    *,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    timeout_s: float = 100.0,
    forks_python: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run to the end, whatever the exit code; output as text. Raises TimeoutExpired after `timeout_s`, and kills it."""
    pipe = subprocess.PIPE
    with ForkedPython(
        arguments, forks_python=forks_python, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe,
        text=True,
    ) as process:  # fmt: skip
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


@functools.cache
def _server() -> socket.socket:
    """The inherited channel, or one to a new server that ends with this process."""
    pid, _, number = _INHERITED_CHANNEL.partition(" ")
    if pid == str(os.getpid()):
        return socket.socket(fileno=int(number))
    channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.forking_server", str(theirs.fileno())],
            cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], process_group=0,
        )  # fmt: skip

    def end() -> None:
        channel.close()
        server.wait(60)

    atexit.register(end)
    problem = json.loads(channel.recv(MAX_MESSAGE_BYTES))["problem"]
    assert not problem, problem
    return channel


def _line(fd: int) -> bytes:
    """Read up to a newline or the end, byte by byte, so that nothing of the next line is consumed."""
    found = b""
    with contextlib.suppress(InterruptedError):
        while (byte := os.read(fd, 1)) not in (b"", b"\n"):
            found += byte
    return found
