"""A process that has imported torch and waits: ranks are forked from it in milliseconds, without an import of seconds.

    zygote = Zygote(log)                     # the launcher, as early as it can: the import goes on meanwhile
    pid = zygote.fork(arguments=[...], environment={...}, stdout=path, stderr=path)

A rank forked from it becomes a child of the launcher, which is made the reaper of its descendants: the launcher waits
for it as for any child of its own, and ranks don't notice when the zygote dies. Forking is safe because nothing has
begun: one thread, no CUDA context, no process group (the zygote looks before it says that it is ready). Whatever goes
wrong here is a ZygoteError, and the caller starts the rank as a new interpreter instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["PROJECT", "Zygote", "ZygoteError"]

PROJECT = Path(__file__).resolve().parents[2]
IMPORT_TIMEOUT_S = 120.0
"""A cold file system on a node of many processes; without an answer by then, ranks import for themselves."""
FORK_TIMEOUT_S = 10.0
MAX_MESSAGE_BYTES = 1 << 20
_PR_SET_CHILD_SUBREAPER = 36


class ZygoteError(RuntimeError):
    """No rank can be forked; one line that says why."""


class Zygote:
    """The launcher's end."""

    def __init__(self, log: Path) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = ours
        self._ready = False
        path = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
        with theirs, log.open("ab") as file:
            self._process = subprocess.Popen(
                # -P: a folder `trainer` of the user's own, where he stands, is not ours
                [sys.executable, "-P", "-u", "-m", "trainer.recovery.zygote", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,  # Ctrl-C is for the launcher
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": path},
            )

    def fork(self, *, arguments: Sequence[str], environment: Mapping[str, str], stdout: Path, stderr: Path) -> int:
        """Start `trainer.worker` with these arguments and exactly this environment; returns its pid."""
        try:
            self._await_ready()
            request = {"arguments": [*arguments], "environment": {**environment}, "logs": [str(stdout), str(stderr)]}
            # No signal may come between the fork and the moment when we know whom we have to look after.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
            try:
                return int(self._exchange(request, FORK_TIMEOUT_S)["pid"])
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ZygoteError(f"no rank can be forked: {type(error).__name__}: {error}") from None

    def close(self) -> None:
        """End it; ranks that were forked from it live on. Harmless to call twice."""
        self._channel.close()
        self._process.kill()
        self._process.wait()

    def _await_ready(self) -> None:
        if self._ready:
            return
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise ZygoteError("the kernel makes this process no reaper of its descendants")
        self._channel.settimeout(IMPORT_TIMEOUT_S)
        problem = json.loads(self._channel.recv(MAX_MESSAGE_BYTES) or b'{"problem": "the zygote died"}')["problem"]
        if problem:
            raise ZygoteError(problem)
        self._ready = True

    def _exchange(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        self._channel.settimeout(timeout_s)
        self._channel.send(json.dumps(request).encode())
        answer: dict[str, Any] = json.loads(self._channel.recv(MAX_MESSAGE_BYTES))
        return answer


def _serve(channel: socket.socket) -> None:
    """Import, say whether forking is safe, fork until the launcher is gone."""
    import trainer.worker  # noqa: F401  (its import is what this process is for)

    gc.collect()
    gc.freeze()  # a collection in a rank would touch, and so copy, every page that is shared
    channel.send(json.dumps({"problem": _unsafe()}).encode())
    while blob := channel.recv(MAX_MESSAGE_BYTES):
        request = json.loads(blob)
        reader, writer = os.pipe()
        middle = os.fork()
        if middle == 0:
            rank = os.fork()
            if rank == 0:
                channel.close()
                os.close(reader)
                os.close(writer)
                _become_rank(request)
            os.write(writer, str(rank).encode())
            os._exit(0)  # the rank's parent is now the launcher
        os.close(writer)
        os.waitpid(middle, 0)
        pid = int(os.read(reader, 32))
        os.close(reader)
        channel.send(json.dumps({"pid": pid}).encode())


def _unsafe() -> str:
    """Why this process must not be forked; empty if it may."""
    import torch

    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return f"{threads} threads after the import of torch"
    if torch.cuda.is_initialized():
        return "the import has begun to use CUDA"
    return ""


def _become_rank(request: Mapping[str, Any]) -> NoReturn:
    code = 1
    try:
        os.setsid()  # as a process group of its own it is stopped together with its data workers
        for path, fd in zip(request["logs"], (1, 2), strict=True):
            log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(log, fd)
            os.close(log)
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = ["trainer.worker", *request["arguments"]]
        from trainer.worker import run_and_leave

        run_and_leave()
    except BaseException as error:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"rankscope: the rank could not be started: {type(error).__name__}: {error}\n")
    os._exit(code)


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError, BrokenPipeError):
        _serve(socket.socket(fileno=int(sys.argv[1])))
