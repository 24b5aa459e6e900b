"""Fork the Python processes that a process under test starts; they are its children, as with an interpreter.

    fork_python()                                                     # first of all, with one thread
    subprocess.Popen([sys.executable, "-P", "-u", "-m", "watch.node_process", ...], start_new_session=True, ...)

`tests.forking_server` does this on request (`ForkedPython(..., forks_python=True)`), since the imports of a run's watch
take as long as the rest of the run. The forks come from a small server that was forked from the caller; each becomes a
child of the caller, which is a child subreaper, as with the ranks of `trainer.launcher.processes.zygote`. Ranks that
torchrun starts are forked, too. A command with options that are not known here starts an interpreter.

    monkeypatch.setattr("trainer.replay.session.subprocess", forking_subprocess())    # of one module, in a test
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

__all__ = ["fork_python", "forking_subprocess", "python_arguments"]

MAX_MESSAGE_BYTES = 1 << 20
_FLAGS = frozenset({"-P", "-u"})
_MODULES = frozenset(
    {
        "rankscope", "rankscope.attached_script", "rankscope.worker", "trainer.launcher.processes.prefork",
        "trainer.launcher.processes.zygote", "trainer.rank.worker", "trainer.replay.rank_process",
        "watch.exporting.trackers.follow", "watch.node_process",
    }
)  # fmt: skip
"""Modules that import torch or most of the project; a `rankscope` command forks its children in turn."""
_PR_SET_CHILD_SUBREAPER = 36


def fork_python() -> None:
    """Make `subprocess.Popen` of this process fork instead of starting interpreters."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        try:
            _serve(theirs)
        finally:
            os._exit(0)
    theirs.close()
    assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    execute, caller, lock = subprocess.Popen._execute_child, os.getpid(), threading.Lock()  # type: ignore[attr-defined]

    def execute_child(self: subprocess.Popen[Any], *values: Any) -> None:
        bound = inspect.signature(execute).bind(self, *values).arguments
        arguments = python_arguments(bound["args"])
        if arguments is None or os.getpid() != caller or not bound["start_new_session"] or bound["preexec_fn"]:
            execute(self, *values)
            return
        pipes = [bound[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        files = [fd if fd >= 0 else default for default, fd in enumerate(pipes[i] for i in (0, 3, 5))]
        request = {
            "arguments": arguments,
            "safe_path": "-P" in bound["args"],
            "cwd": str(bound["cwd"] or os.getcwd()),
            "environment": dict(os.environ if bound["env"] is None else bound["env"]),
            "pass_fds": [*bound["pass_fds"]],
            "forks_python": arguments[1] == "rankscope",
        }
        with lock:
            socket.send_fds(ours, [json.dumps(request).encode()], [*files, *bound["pass_fds"]])
            self.pid = int(ours.recv(32))
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self._child_created = True  # type: ignore[attr-defined]

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]


def forking_subprocess() -> SimpleNamespace:
    """What stands for `subprocess` in a module of ours: the interpreters that it starts are forks of the server."""
    from tests.forked import ForkedPython

    def popen(command: Sequence[str], *, start_new_session: bool = True, **more: Any) -> ForkedPython:
        arguments = python_arguments(command)
        assert arguments is not None, command
        return ForkedPython(arguments, **more)  # which has a session of its own anyway

    return SimpleNamespace(**vars(subprocess) | {"Popen": popen})


def python_arguments(command: Sequence[Any]) -> list[str] | None:
    """Arguments of the interpreter without its flags; None for a command that is not to be forked."""
    words = [os.fspath(word) for word in ([command] if isinstance(command, (str, bytes)) else command)]
    if words[:1] != [sys.executable]:
        return None
    first = next((i for i, word in enumerate(words[1:], 1) if word not in _FLAGS), len(words))
    if first == len(words):
        return None
    is_known = words[first + 1] in _MODULES if words[first] == "-m" else words[first].endswith(".py")
    return words[first:] if is_known else None


def _serve(channel: socket.socket) -> None:
    """Fork on request until the caller has ended."""
    from tests.forking_server import become
    from trainer.launcher.processes.zygote import reset_after_fork

    devnull = os.open(os.devnull, os.O_RDWR)
    reset_after_fork([channel.fileno()], stdout=devnull, stderr=devnull)
    while True:
        blob, files, _, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, 16)
        if not blob:
            return
        reader, writer = os.pipe()
        intermediate = os.fork()
        if intermediate == 0:
            pid = os.fork()
            if pid == 0:
                become(json.loads(blob), files)
            os.write(writer, str(pid).encode())
            os._exit(0)  # the fork's parent is now the caller
        for fd in (writer, *files):
            os.close(fd)
        os.waitpid(intermediate, 0)
        channel.send(os.read(reader, 32))
        os.close(reader)
