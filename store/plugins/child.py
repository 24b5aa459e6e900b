"""The process in which a plug-in runs: `store.plugins.process` starts it and talks to it.

    def handlers(module, channel): return {"recognise": module.recognise, ...}
    serve(handlers)                 # argv: the module that calls this, group and name of the entry point

Requests arrive as pickles from the parent, responses leave as JSON, so that the parent never unpickles a plug-in's
data. The kernel limits memory (RLIMIT_DATA) and, if the parent has exited, the time of each call (SIGALRM). What the
plug-in prints is discarded.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from itertools import islice
from types import ModuleType
from typing import Any

from store.database import StoreError
from store.limited.frames import read_frame, write_frame

__all__ = ["MEMORY_BYTES", "Channel", "one_line", "serve"]

MEMORY_BYTES = 1 << 30
"""Maximum bytes that a plug-in may allocate beyond Rankscope's modules."""
GRACE_S = 5.0
"""Seconds after a call's time limit at which the kernel ends it, in case the parent has exited and cannot do so."""
ROWS_PER_PART = 5_000
MAX_PROBLEM_CHARS = 300
Handlers = Mapping[str, Callable[..., Any]]


class Channel:
    """The two pipes to the parent, and access to the records that the parent serves."""

    def __init__(self, questions: int, answers: int) -> None:
        self._questions, self._answers = questions, answers
        self.question = 0
        """Number of the current request, to detect a second response from a plug-in that forks."""

    def next(self) -> tuple[str, tuple[Any, ...], float]:
        """Return the next request. Raises EOFError when the parent has exited."""
        what, arguments, limit_s, self.question = self._read()
        return what, arguments, limit_s

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message to the parent. Raises the errors of `json.dumps`."""
        write_frame(self._answers, json.dumps({**message, "to": self.question}).encode(), math.inf)

    def send_rows(self, rows: Iterable[Any]) -> None:
        """Send rows, a few thousand per message."""
        remaining = iter(rows)
        while part := list(islice(remaining, ROWS_PER_PART)):
            self.send({"part": part})

    def query(self, sql: str, params: Any = ()) -> Any:
        """See `analyzers.source.Source.query`."""
        return self._ask("query", sql, list(params or ()))

    def rows(self, sql: str, params: Any = ()) -> Any:
        """See `analyzers.source.Source.rows`."""
        return self._ask("rows", sql, list(params or ()))

    def has(self, table: str) -> bool:
        """See `analyzers.source.Source.has`."""
        return bool(self._ask("has", table))

    def _ask(self, what: str, *arguments: Any) -> Any:
        self.send({"query": what, "arguments": [_plain(one) for one in arguments]})
        outcome, found = self._read()
        if outcome == "error":
            raise StoreError(found)
        return found

    def _read(self) -> Any:
        return pickle.loads(read_frame(self._questions, math.inf, max_bytes=1 << 40))  # noqa: S301 (the parent's)


def serve(handlers_of: Callable[[ModuleType, Channel], Handlers]) -> None:
    """Answer calls until the parent closes the pipe."""
    group, name = sys.argv[1:3]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    channel = Channel(os.dup(0), os.dup(1))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # what a plug-in prints or reads must not mix with the messages
        os.dup2(null, fd)
    _limit_memory()
    channel.send({"ready": name})
    handlers: Handlers = {}
    while True:
        try:
            what, arguments, limit_s = channel.next()
        except EOFError:
            return
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, limit_s + GRACE_S)
        try:
            if what == "load":
                handlers = handlers_of(_loaded(group, name, arguments[0]), channel)
                answer = json.dumps({"result": None, "to": channel.question})
            else:
                found = handlers[what](*arguments)
                # A handler returns the channel to say that it has already sent its rows in parts.
                result = {"result": None, "in_parts": True} if found is channel else {"result": found}
                answer = json.dumps({**result, "to": channel.question})
        except BaseException as error:  # even after SystemExit or MemoryError, only this call fails
            answer = json.dumps({"error": one_line(error), "to": channel.question})
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_frame(channel._answers, answer.encode(), time.monotonic() + limit_s + GRACE_S)


def one_line(error: BaseException) -> str:
    """Type, message and place of an error: `ZeroDivisionError: division by zero (slow_save.py:31)`."""
    try:
        text = " ".join(str(error).split())
    except BaseException:  # str() of a foreign exception may raise, too
        text = ""
    frames = traceback.extract_tb(error.__traceback__)
    where = next((f for f in reversed(frames) if f.filename[0] != "<" and not _is_ours(f.filename)), None)
    place = f" ({os.path.basename(where.filename)}:{where.lineno})" if where else ""
    name = type(error).__name__
    return f"{name}: {text}"[:MAX_PROBLEM_CHARS].rstrip(": ") + place


def _is_ours(path: str) -> bool:
    return os.path.dirname(path) == os.path.dirname(__file__) or os.path.basename(path) == "plugin_child.py"


def _loaded(group: str, name: str, parents_path: list[str]) -> ModuleType:
    sys.path += [folder for folder in parents_path if os.path.isabs(folder) and folder not in sys.path]
    entry = next((one for one in entry_points(group=group) if one.name == name), None)
    if entry is None:
        raise ModuleNotFoundError(f"no installed package has the entry point {name}")
    module = entry.load()
    if not isinstance(module, ModuleType):
        raise TypeError(f"{entry.value} is not a module")
    return module


def _limit_memory() -> None:
    with open("/proc/self/status") as file:
        used = next((int(line.split()[1]) << 10 for line in file if line.startswith("VmData:")), 0)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = used + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _plain(value: Any) -> Any:
    """Convert an argument of a query: numpy numbers to Python numbers."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.item() if hasattr(value, "item") and not isinstance(value, (str, bytes)) else value
