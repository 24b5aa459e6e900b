"""Python processes that a process of a test starts are forked as well, and are its children as they would be.

    fork_python()                                                     # first of all, with one thread
    subprocess.Popen([sys.executable, "-P", "-u", "-m", "watch.node_process", ...], start_new_session=True, ...)

`tests.forking_server` does this in a process that asks for it (`ForkedPython(..., forks_python=True)`): a launcher
starts a watch for each run, whose imports take as long as the rest of it. The forks come from a small server that was
forked from the caller; each becomes a child of the caller, which is made the reaper of its descendants, as with the
ranks of `trainer.launcher.processes.zygote`. So are ranks that torchrun starts, of a worker or of a script. What has
options that are not known here is started as an interpreter.
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
from typing import Any

__all__ = ["fork_python", "python_arguments"]

MAX_MESSAGE_BYTES = 1 << 20
_FLAGS = frozenset({"-P", "-u"})
_MODULES = frozenset(
    {
        "rankscope", "rankscope.attached_script", "rankscope.worker", "trainer.launcher.processes.prefork",
        "trainer.launcher.processes.zygote", "trainer.rank.worker", "watch.node_process",
    }
)  # fmt: skip
"""What imports torch or most of the project, as scripts of ranks do; a `rankscope` command forks in its turn."""
_PR_SET_CHILD_SUBREAPER = 36


def fork_python() -> None:
    """Let `subprocess.Popen` of this process fork."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        try:
            _serve(theirs)
        finally:
            os._exit(0)
    theirs.close()
    assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    execute, caller, lock = subprocess.Popen._execute_child, os.getpid(), threading.Lock()  # type: ignore[attr-defined]

    def execute_child(self: subprocess.Popen[Any], *given: Any) -> None:
        asked = inspect.signature(execute).bind(self, *given).arguments
        arguments = python_arguments(asked["args"])
        if arguments is None or os.getpid() != caller or not asked["start_new_session"] or asked["preexec_fn"]:
            execute(self, *given)
            return
        pipes = [asked[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        files = [fd if fd >= 0 else usual for usual, fd in enumerate(pipes[i] for i in (0, 3, 5))]
        request = {
            "arguments": arguments,
            "safe_path": "-P" in asked["args"],
            "cwd": str(asked["cwd"] or os.getcwd()),
            "environment": dict(os.environ if asked["env"] is None else asked["env"]),
            "pass_fds": [*asked["pass_fds"]],
            "forks_python": arguments[1] == "rankscope",
        }
        with lock:
            socket.send_fds(ours, [json.dumps(request).encode()], [*files, *asked["pass_fds"]])
            self.pid = int(ours.recv(32))
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self._child_created = True  # type: ignore[attr-defined]

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]


def python_arguments(command: Sequence[Any]) -> list[str] | None:
    """Arguments of the interpreter without its flags; None for a command that is not to be forked."""
    words = [os.fspath(word) for word in ([command] if isinstance(command, (str, bytes)) else command)]
    if words[:1] != [sys.executable]:
        return None
    first = next((place for place, word in enumerate(words[1:], 1) if word not in _FLAGS), len(words))
    if first == len(words):
        return None
    is_known = words[first + 1] in _MODULES if words[first] == "-m" else words[first].endswith(".py")
    return words[first:] if is_known else None


def _serve(channel: socket.socket) -> None:
    """Fork until the caller is gone."""
    from tests.forking_server import become
    from trainer.launcher.processes.zygote import reset_after_fork

    nowhere = os.open(os.devnull, os.O_RDWR)
    reset_after_fork([channel.fileno()], stdout=nowhere, stderr=nowhere)
    while True:
        blob, files, _, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES, 16)
        if not blob:
            return
        reader, writer = os.pipe()
        middle = os.fork()
        if middle == 0:
            pid = os.fork()
            if pid == 0:
                become(json.loads(blob), files)
            os.write(writer, str(pid).encode())
            os._exit(0)  # the fork's parent is now the caller
        for fd in (writer, *files):
            os.close(fd)
        os.waitpid(middle, 0)
        channel.send(os.read(reader, 32))
        os.close(reader)
