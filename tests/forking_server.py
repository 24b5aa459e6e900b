"""The server from which `tests.forked` forks processes: it imports what they need, and reaps them.

`tests.forked` starts it with the file descriptor of its channel. A forked process can have a channel, too, so that the
groups of `python -m tests.suite` share one server. When a channel is closed, the processes requested on it are killed;
when the first one is closed, the server ends.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import logging
import multiprocessing.util
import os
import random
import runpy
import select
import signal
import socket
import sys
import threading
import types
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

MAX_MESSAGE_BYTES = 1 << 20
CHANNEL = "TESTS_FORKING_CHANNEL"
"""Environment variable of a process that has a channel: its pid, and the file descriptor."""
PRELOADED = (
    "torch", "torch._inductor.compile_fx", "functorch.compile",
    "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining",
    "numpy.ma",
    "trainer.launcher.start", "trainer.launcher.launch", "trainer.rank.worker",
    "tests.trainer.training_runs",
    "watch.node_process", "analyzers.live", "analyzers.settings.live_advice",
    "rankscope.cli", "analyzers.diagnose", "duckdb", "rich.console", "pytest", "hypothesis",
)  # fmt: skip


def serve(channel: socket.socket) -> None:
    """Import, report whether forking is safe, then fork on request until the first channel is closed."""
    from tests.support.huge_pages import use_huge_pages
    from trainer.launcher.processes.zygote import one_thread, unsafe_to_fork

    with one_thread():
        for name in PRELOADED:
            importlib.import_module(name)
        importlib.import_module("analyzers.analysis").our_analyses()  # each of them imports its module
    _limit_exit_handlers()
    gc.collect()
    gc.freeze()
    use_huge_pages()
    channel.send(json.dumps({"problem": unsafe_to_fork()}).encode())
    awake, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    reports: dict[int, int] = {}
    requested_by: dict[int, socket.socket] = {}
    """{pid: the channel on which it was requested}."""
    channels = [channel]
    while True:
        ready, _, _ = select.select([*channels, awake], [], [])
        if awake in ready:
            os.read(awake, 4096)
            _report_ends(reports)
        for asking in channels[:]:
            if asking not in ready:
                continue
            blob, fds, _, _ = socket.recv_fds(asking, MAX_MESSAGE_BYTES, 4)
            if not blob and asking is channel:
                _end(reports)
                return
            if not blob:
                _end([pid for pid in reports if requested_by.get(pid) is asking])
                asking.close()
                channels.remove(asking)
                continue
            *files, report = fds
            request = json.loads(blob)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                become(request, files, theirs if request["forks"] else None)
            reports[pid], requested_by[pid] = report, asking
            os.write(report, f"{pid}\n".encode())
            for fd in files:
                os.close(fd)
            theirs.close()
            if request["forks"]:
                channels.append(ours)
            else:
                ours.close()


def _limit_exit_handlers() -> None:
    """Limit the exit handlers of forks to the standard library's: tearing down torch would copy its memory."""
    atexit._clear()
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    for ending in weakref.finalize._registry.values():  # type: ignore[attr-defined]
        ending.atexit = False
    for at_end in (logging.shutdown, multiprocessing.util._exit_function):
        atexit.register(at_end)


def _end(pids: Iterable[int]) -> None:
    """Kill the processes that a test left behind, e.g. if it was killed: a launcher would keep training."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _report_ends(reports: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while reports:
            pid, status, used = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            report = reports.pop(pid)
            with contextlib.suppress(BrokenPipeError):  # the test has closed its end
                os.write(report, f"{status} {used.ru_utime + used.ru_stime}\n".encode())
            os.close(report)


def become(request: dict[str, Any], files: list[int], channel: socket.socket | None = None) -> NoReturn:
    """Run the arguments as an interpreter would, and exit like it. `files`: stdin, stdout, stderr and `pass_fds`."""
    from trainer.launcher.processes.zygote import reset_after_fork

    stdin, stdout, stderr, *passed = files
    keep = [stdin, *passed] if channel is None else [stdin, *passed, channel.fileno()]
    reset_after_fork(keep, stdout=stdout, stderr=stderr)
    os.dup2(stdin, 0)
    os.close(stdin)
    _move_fds(passed, request.get("pass_fds", []))
    code = 1
    try:
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environment"])
        if channel is not None:
            os.environ[CHANNEL] = f"{os.getpid()} {channel.detach()}"
        _reseed()
        if request.get("forks_python"):
            from tests.local_forks import fork_python

            fork_python()
        _run(request["arguments"], safe_path=request.get("safe_path", False))
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        _print_as_python(sys.exc_info())
        code = -signal.SIGINT
    except BaseException:
        _print_as_python(sys.exc_info())
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def _move_fds(fds: list[int], numbers: list[int]) -> None:
    """Move file descriptors to the numbers that they have in the requesting process."""
    copies = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3 + max([*fds, *numbers])) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(copies, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def _reseed() -> None:
    import numpy as np

    random.seed()
    np.random.seed()


def _print_as_python(error: Any) -> None:
    """Print an uncaught exception as the interpreter does; hooks recognise it by `sys.last_value`."""
    sys.last_type, sys.last_value, sys.last_traceback = error
    sys.excepthook(*error)


def _run(arguments: list[str], *, safe_path: bool) -> None:
    sys.path[1:1] = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    kind = arguments[0]
    if kind == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *arguments[2:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        sys.path[0] = str(Path.cwd())
        sys.argv = arguments[1:]
        if safe_path:
            del sys.path[0]
        if arguments[1] == "torch.distributed.run":
            from trainer.launcher.nodes.method_names import name_methods_cheaply

            name_methods_cheaply()  # as in Rankscope's launchers
        sys.modules.pop(arguments[1], None)  # runpy warns about a module that is already imported
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(kind).resolve().parent)
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # without the exit handlers of what was imported
