"""Zygote: a process that has imported torch, from which ranks are forked in milliseconds.

    zygote = Zygote(log)                     # the launcher, before its first thread: it imports torch now
    pid = zygote.fork(arguments=[...], environment={...}, stdout=path, stderr=path)

The zygote is a fork of the launcher. The launcher needs torch as well, so one import serves both; if the launcher is
itself a fork (`trainer.launcher.processes.prefork`), torch is already imported. A launcher that already has threads
(after a rendezvous with other nodes) must not be forked. The zygote is then a new interpreter, which imports torch
while the launcher continues.

A rank forked from the zygote becomes a child of the launcher, because the launcher is the subreaper of its descendants.
So the launcher waits for the rank as for any child, and ranks are unaffected if the zygote dies. Forking is safe
because the zygote has one thread, no CUDA context and no process group, which it checks before it reports ready. Any
failure here is a ZygoteError, and the caller starts the rank as a new interpreter instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from probes.attach.launch.own_process import own_process
from trainer.rank.forked import FORKED

__all__ = ["Zygote", "ZygoteError", "import_trainer", "one_thread", "reset_after_fork", "unsafe_to_fork"]

IMPORT_TIMEOUT_S = 120.0
"""Time limit in seconds for the imports, enough for a cold file system on a busy node. After that, each rank imports
torch itself."""
PRELOADED = ("trainer.launcher.launch", "trainer.rank.worker")
"""Modules that are imported once, before forking."""
ENTRY_POINT = "trainer.rank.worker:run_and_leave"
"""Entry point of a forked rank (`module:function`). This is all that the zygote knows about a rank."""
FORK_TIMEOUT_S = 10.0
MAX_MESSAGE_BYTES = 1 << 20
_PR_SET_CHILD_SUBREAPER = 36
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_INHERITED_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD)


class ZygoteError(RuntimeError):
    """No rank can be forked. The message is one line with the reason."""


class Zygote:
    """The launcher's side. Creating it imports torch, unless this process has threads."""

    def __init__(self, log: Path) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = ours
        self._ready = False
        self._interpreter: subprocess.Popen[bytes] | None = None
        if _num_threads() == 1:
            import_trainer()
        with theirs, log.open("ab") as file:
            self._pid, self._problem = 0, ""
            try:
                if _num_threads() == 1:
                    self._pid = _forked(theirs, file.fileno())
                else:
                    self._interpreter = _interpreter(theirs, file.fileno())
                    self._pid = self._interpreter.pid
            except OSError as error:
                self._problem = f"no zygote can be started: {error}"

    def fork(self, *, arguments: Sequence[str], environment: Mapping[str, str], stdout: Path, stderr: Path) -> int:
        """Start a rank with these arguments and exactly this environment; returns its pid."""
        try:
            self._await_ready()
            request = {"arguments": [*arguments], "environment": {**environment}, "logs": [str(stdout), str(stderr)]}
            # No signal may arrive between the fork and the time at which the rank's pid is known.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
            go, release = os.pipe()
            try:
                pid = int(self._exchange(request, go)["pid"])
                os.write(release, b"1")
                return pid
            finally:
                os.close(go)
                os.close(release)  # a rank that was forked too late ends: its place is taken by another
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ZygoteError(f"no rank can be forked: {type(error).__name__}: {error}") from None

    def close(self) -> None:
        """End the zygote; ranks that were forked from it continue. Harmless to call twice."""
        self._channel.close()
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            if self._interpreter is not None:
                self._interpreter.wait()
            else:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(self._pid, 0)
        self._pid = 0

    def _await_ready(self) -> None:
        if self._ready:
            return
        if self._problem:
            raise ZygoteError(self._problem)
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise ZygoteError("prctl(PR_SET_CHILD_SUBREAPER) failed")
        self._channel.settimeout(IMPORT_TIMEOUT_S)
        problem = json.loads(self._channel.recv(MAX_MESSAGE_BYTES) or b'{"problem": "the zygote died"}')["problem"]
        if problem:
            raise ZygoteError(problem)
        self._ready = True

    def _exchange(self, request: Mapping[str, Any], go: int) -> dict[str, Any]:
        self._channel.settimeout(FORK_TIMEOUT_S)
        socket.send_fds(self._channel, [json.dumps(request).encode()], [go])
        answer: dict[str, Any] = json.loads(self._channel.recv(MAX_MESSAGE_BYTES))
        return answer


def import_trainer() -> None:
    """Import everything that a rank and its launcher need, without starting threads of numeric libraries."""
    if all(name in sys.modules for name in PRELOADED):
        return
    # Garbage collection is off during the imports: they create no garbage, and it would take an eighth of the time.
    with one_thread(), _no_collections():
        for name in PRELOADED:
            importlib.import_module(name)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Keep numeric libraries imported in the block from starting threads, which would forbid a fork."""
    before = {name: os.environ.get(name) for name in _ONE_THREAD}
    os.environ.update(_ONE_THREAD)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def unsafe_to_fork() -> str:
    """Reason why this process, which has imported the trainer, must not be forked; empty if it may be."""
    import torch

    threads = _num_threads()
    if threads != 1:
        return f"{threads} threads after the import of torch"
    if torch.cuda.is_initialized() or driver_is_open():  # type: ignore[no-untyped-call]  # torch: no types
        return "the import has begun to use CUDA"
    return ""


def driver_is_open(files: Path = Path("/proc/self/fd")) -> bool:
    """Return True if this process has opened a GPU's device file; even counting devices does so.

    The driver's state does not survive a fork, and torch calls CUDA initialised only once it has a context.
    """
    for link in files.iterdir():
        with contextlib.suppress(OSError):  # the descriptor that listed the folder is closed by now
            if os.readlink(link).startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/dxg")):
                return True
    return False


def reset_after_fork(keep: Sequence[int], *, stdout: int, stderr: int) -> None:
    """Reset a forked process: new session, default signal handlers, and of the parent's files only those in `keep`."""
    signal.set_wakeup_fd(-1)  # signals of this process must not be written to the parent's descriptor
    os.setsid()  # Ctrl-C is for the launcher; in a separate session, a rank is stopped together with its data workers
    for number in _INHERITED_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
    # Output is written at once: a process that is killed must not lose its last lines.
    sys.stdout = open(1, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115  (for good)
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in keep:
            with contextlib.suppress(OSError):  # the descriptor that listed the folder is closed already
                os.close(int(name))


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _forked(channel: socket.socket, log: int) -> int:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()  # otherwise the child would print the content again
    pid = os.fork()
    if pid == 0:
        try:
            reset_after_fork([channel.fileno()], stdout=log, stderr=log)
            _serve(channel)
        except (ConnectionError, KeyboardInterrupt):
            pass
        finally:
            os._exit(0)  # without clean-up, which belongs to the launcher
    return pid


def _interpreter(channel: socket.socket, log: int) -> subprocess.Popen[bytes]:
    command, environment = own_process("trainer.launcher.processes.zygote", str(channel.fileno()))
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,  # Ctrl-C is for the launcher
        pass_fds=[channel.fileno()],
        env=environment | _ONE_THREAD,
    )


def _serve(channel: socket.socket) -> None:
    """Import, report whether forking is safe, fork until the launcher is gone."""
    import_trainer()
    gc.collect()
    gc.freeze()  # a collection in a rank would touch, and so copy, every page that is shared
    channel.send(json.dumps({"problem": unsafe_to_fork()}).encode())
    while (received := socket.recv_fds(channel, MAX_MESSAGE_BYTES, 1))[0]:
        request, (go,) = json.loads(received[0]), received[1]
        reader, writer = os.pipe()
        middle = os.fork()
        if middle == 0:
            rank = os.fork()
            if rank == 0:
                channel.close()
                os.close(reader)
                os.close(writer)
                if not os.read(go, 1):  # the launcher waits for this rank no longer
                    os._exit(0)
                os.close(go)
                _become_rank(request)
            os.write(writer, str(rank).encode())
            os._exit(0)  # the rank's parent is now the launcher
        os.close(writer)
        os.close(go)
        os.waitpid(middle, 0)
        pid = int(os.read(reader, 32))
        os.close(reader)
        channel.send(json.dumps({"pid": pid}).encode())


def _become_rank(request: Mapping[str, Any]) -> NoReturn:
    code = 1
    try:
        os.setsid()  # as a separate process group it is stopped together with its data workers
        for path, fd in zip(request["logs"], (1, 2), strict=True):
            log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(log, fd)
            os.close(log)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.environ[FORKED] = "1"
        sys.argv = ["trainer.rank.worker", *request["arguments"]]
        module, _, function = ENTRY_POINT.partition(":")
        getattr(importlib.import_module(module), function)()
    except BaseException as error:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"rankscope: the rank could not be started: {type(error).__name__}: {error}\n")
    os._exit(code)


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError, BrokenPipeError):
        _serve(socket.socket(fileno=int(sys.argv[1])))
