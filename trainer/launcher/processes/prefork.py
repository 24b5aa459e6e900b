"""Start many `rankscope` commands, each forked from one process that has imported torch.

    server = PreforkServer()                                # starts to import torch, in another process
    process = server.start(["train", "my.toml"], cwd=folder)  # a separate process in a new session
    output, _ = process.communicate(timeout=60)             # as with subprocess.Popen
    server.close()                                          # started commands live on

This is for many short runs, as in a drill, where importing torch takes most of the time before the first step. The
forked process is like an interpreter after its imports, with one thread. It gets a separate environment, working
folder, signal handlers and output, and runs the command line. The parent of a command is an intermediate process, which
waits for the command and reports its exit code to the caller.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from probes.attach.launch.own_process import own_process
from trainer.launcher.processes.rank_processes import UNKNOWN_EXIT
from trainer.launcher.processes.zygote import (
    IMPORT_TIMEOUT_S,
    MAX_MESSAGE_BYTES,
    ZygoteError,
    import_trainer,
    reset_after_fork,
    unsafe_to_fork,
)

__all__ = ["PreforkServer", "StartedCommand"]

_COMMAND = "rankscope"


class StartedCommand:
    """A running command with the interface of `subprocess.Popen`; its output is in `stdout`, as text.

    The constructor raises ZygoteError if the command was not started.
    """

    def __init__(self, output: int, status: int) -> None:
        self.stdout: IO[str] = open(output, encoding="utf-8", errors="replace")  # noqa: SIM115  (closed by its reader)
        self._status = open(status, "rb", buffering=0)  # noqa: SIM115
        self.returncode: int | None = None
        pid = self._status.readline()
        if not pid:  # a signal to pid 0 would go to the whole group
            self.stdout.close()
            self._status.close()
            raise ZygoteError("the prefork server ended before it had started the command")
        self.pid = int(pid)

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.returncode = int(self._status.readline() or UNKNOWN_EXIT)
            self._status.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; returns the exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            select.select([self._status], [], [], timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(_COMMAND, timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Wait for the end; returns the remaining output, and None. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        blocks: list[bytes] = []
        while True:
            remaining_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self.stdout], [], [], remaining_s)[0]:
                raise subprocess.TimeoutExpired(_COMMAND, timeout or 0.0)
            block = os.read(self.stdout.fileno(), 1 << 16)
            if not block:
                break
            blocks.append(block)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        self.stdout.close()
        return b"".join(blocks).decode("utf-8", "replace"), None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class PreforkServer:
    """The caller's side of the server. Methods raise ZygoteError, one line, if no command can be forked."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ready = False
        command, environment = own_process("trainer.launcher.processes.prefork", str(theirs.fileno()))
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the caller
                pass_fds=[theirs.fileno()],
                env=environment,
            )

    def start(
        self, arguments: Sequence[str], *, cwd: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> StartedCommand:
        """Start `rankscope` with these arguments. Standard error of the forked command goes to the same pipe as its
        output."""
        request = {
            "arguments": [*arguments],
            "cwd": str(cwd or Path.cwd()),
            "environment": dict(os.environ if environment is None else environment),
        }
        try:
            self._await_ready()
            output, output_end = os.pipe()
            status, status_end = os.pipe()
            try:
                socket.send_fds(self._channel, [json.dumps(request).encode()], [output_end, status_end])
            finally:
                os.close(output_end)
                os.close(status_end)
        except (OSError, ValueError, KeyError) as error:
            raise ZygoteError(f"no command can be forked: {type(error).__name__}: {error}") from None
        return StartedCommand(output, status)

    def close(self) -> None:
        """End the server; harmless to call twice."""
        self._channel.close()
        self._process.kill()
        self._process.wait()

    def _await_ready(self) -> None:
        if self._ready:
            return
        self._channel.settimeout(IMPORT_TIMEOUT_S)
        problem = json.loads(self._channel.recv(MAX_MESSAGE_BYTES) or b'{"problem": "the prefork server died"}')[
            "problem"
        ]
        if problem:
            raise ZygoteError(problem)
        self._ready = True


def _serve(channel: socket.socket) -> None:
    """Import, report whether forking is safe, and start commands until the caller exits."""
    import_trainer()
    importlib.import_module("trainer.launcher.start")
    # The command line is imported by name, because no module of the trainer may depend on it.
    importlib.import_module(f"{_COMMAND}.cli")
    gc.collect()
    gc.freeze()
    channel.send(json.dumps({"problem": unsafe_to_fork()}).encode())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that intermediate processes leave no zombies
    while True:
        blob, fds, _, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, 2)
        if not blob:
            return
        if os.fork() == 0:
            _run_command(json.loads(blob), *fds)
        for fd in fds:
            os.close(fd)


def _run_command(request: Mapping[str, Any], output: int, status: int) -> NoReturn:
    """Start the command, report its pid, wait for it, report its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        _become_command(request, output)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    reset_after_fork([status], stdout=nowhere, stderr=nowhere)  # keeps no other output open
    with contextlib.suppress(OSError):  # the caller is gone
        os.write(status, f"{pid}\n".encode())
        _, ended = os.waitpid(pid, 0)
        os.write(status, f"{os.waitstatus_to_exitcode(ended)}\n".encode())
    os._exit(0)


def _become_command(request: Mapping[str, Any], output: int) -> NoReturn:
    code = 1
    try:
        reset_after_fork([], stdout=output, stderr=output)
        os.chdir(str(request["cwd"]))
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = [_COMMAND, *request["arguments"]]
        runpy.run_module(_COMMAND, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as request_to_end:
        code = int(request_to_end.code or 0)
    except BaseException as error:
        sys.stderr.write(f"{_COMMAND}: {type(error).__name__}: {error}\n")
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError, KeyboardInterrupt):
        _serve(socket.socket(fileno=int(sys.argv[1])))
