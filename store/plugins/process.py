"""Call a plug-in in a child process, one process per entry point.

    (plugin,) = plugins("rankscope.analyzers", "analyzers.plugin_calls.child")
    plugin.call("run", 0, scope, source=store)      # its queries are answered here, from `source`

1. The first call starts the process, which imports the plug-in. The import and each call may take `limit_s()` seconds.
2. During a call, the plug-in's queries arrive here, run on `source` and are answered within the call's time, with a
   limited number of rows.
3. If a call takes longer, its process and all processes that it started are killed. An exception, including SystemExit,
   is reported.
4. After its process was killed, the plug-in is not called for `RETRY_S` seconds: each call fails with the same reason.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from probes.attach.launch.own_process import own_process
from store.limited.frames import read_frame, write_frame

__all__ = ["LIMIT_VARIABLE", "MAX_REASON_CHARS", "PluginError", "PluginProcess", "limit_s", "plugins"]

LIMIT_VARIABLE = "RANKSCOPE_PLUGIN_LIMIT_S"
"""Environment variable: seconds that one call of a plug-in may take."""
DEFAULT_LIMIT_S = 10.0
START_S = 60.0
"""Seconds for starting the interpreter and importing Rankscope's modules on a busy machine."""
RETRY_S = 600.0
MAX_ANSWER_BYTES = 64 << 20
INVALID_ANSWER = "its answer is not valid"
IN_PLUGIN = "RANKSCOPE_IN_PLUGIN"
"""Environment variable that is set in a plug-in's process, so that this process does not call plug-ins itself."""


MAX_ROWS = {"rows": 1_000_000, "query": 5_000_000}
"""Maximum rows of one answer, by method; tuples take ten times the memory of columns."""
MAX_PARTS_ROWS = 5_000_000
"""Maximum rows that a plug-in may send in parts."""
MAX_REASON_CHARS = 500
_BOUNDED = ("select", "with", "from")


class PluginError(Exception):
    """A plug-in did not answer; the message is one line with the reason."""


def limit_s() -> float:
    """Seconds that one call may take: the environment variable, or the default if it is not a valid number."""
    with contextlib.suppress(ValueError):
        given = float(os.environ.get(LIMIT_VARIABLE, ""))
        if 0.1 <= given <= 3600:
            return given
    return DEFAULT_LIMIT_S


class PluginProcess:
    """One entry point and its process. Threads may share it; calls run one at a time."""

    def __init__(self, entry: EntryPoint, module: str) -> None:
        self.name = entry.name
        self._group, self._module = entry.group, module
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner_pid = os.getpid()
        self._problem, self._problem_s = "", 0.0
        self._is_interrupted = False
        self._question = 0

    def call(
        self,
        what: str,
        *arguments: Any,
        source: Any = None,
        limit: float | None = None,
        form: Callable[[Any], Any] = lambda found: found,
    ) -> Any:
        """Return the result of one call as JSON values; rows sent in parts are joined into one list.

        `source` answers the plug-in's queries. `limit` replaces `limit_s()`. `form` validates and converts the result,
        since checks in the child cannot be trusted. Raises PluginError.
        """
        with self._lock:
            if self._is_interrupted:
                raise PluginError("it was not called, because its caller stopped waiting")
            if self._problem and time.monotonic() - self._problem_s < RETRY_S:
                raise PluginError(self._problem)
            seconds = limit or limit_s()
            try:
                self._start()
                return _validated(form, self._ask((what, arguments), source, seconds))
            except PluginError:
                raise
            except (TimeoutError, QueryLimitError):
                reason = f"it took longer than {seconds:g} s and was ended"
            except (EOFError, OSError):
                reason = self._how_it_ended()
            except ValueError as error:
                reason = f"{error}, and it was ended"
            except BaseException:  # Ctrl-C: the process may be in the middle of an answer
                self._end()
                raise
            self._end()
            if self._is_interrupted:  # the caller stopped waiting, which is not the plug-in's fault
                raise PluginError("it was ended, because its caller stopped waiting")
            self._problem, self._problem_s = reason, time.monotonic()
            raise PluginError(reason)

    def interrupt(self, *, refuse: bool) -> None:
        """End the running call from another thread, and refuse further calls, until called with `refuse=False`."""
        self._is_interrupted = refuse
        process = self._process
        if refuse and process is not None and self._lock.locked():  # an idle process, which waits for a call, is kept
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process, if one runs."""
        self._end()

    def _start(self) -> None:
        if self._owner_pid != os.getpid():  # a forked child must not use its parent's process
            self._process, self._owner_pid = None, os.getpid()
        if self._process is not None:
            return
        command, environment = own_process("rankscope.plugin_process", self._module, self._group, self.name)
        environment |= {IN_PLUGIN: "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
            start_new_session=True,
        )  # fmt: skip
        os.set_blocking(self._in, False)
        read_frame(self._out, time.monotonic() + START_S, max_bytes=1 << 10)
        try:
            self._ask(("load", (sys.path,)), None, limit_s())
        except PluginError as error:
            self._end()
            self._problem, self._problem_s = f"it cannot be loaded: {error}", time.monotonic()
            raise PluginError(self._problem) from None

    @property
    def _in(self) -> int:
        assert self._process is not None
        assert self._process.stdin is not None
        return self._process.stdin.fileno()

    @property
    def _out(self) -> int:
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def _ask(self, question: tuple[str, tuple[Any, ...]], source: Any, seconds: float) -> Any:
        deadline_s = time.monotonic() + seconds
        self._question += 1
        write_frame(self._in, pickle.dumps((*question, seconds, self._question)), deadline_s)
        rows: list[Any] = []
        while True:
            message = _message(read_frame(self._out, deadline_s, max_bytes=MAX_ANSWER_BYTES))
            if (number := message.get("to")) != self._question:
                raise ValueError("it answered twice" if isinstance(number, int) else INVALID_ANSWER)
            if "query" in message:
                found = answered(source, message["query"], message["arguments"], deadline_s)
                write_frame(self._in, pickle.dumps(found), deadline_s)
            elif "part" in message:
                rows += message["part"]
                if len(rows) > MAX_PARTS_ROWS:
                    raise ValueError(f"its answer has more than {MAX_PARTS_ROWS:,} rows")
            elif "error" in message:
                raise PluginError(" ".join(str(message["error"]).split())[:MAX_REASON_CHARS])
            else:
                return rows if message.get("in_parts") else message["result"]

    def _how_it_ended(self) -> str:
        if self._process is None:
            return "its process cannot be started"
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "it closed its connection and was ended"
        if code == -signal.SIGALRM:
            return "it took too long and was ended"
        return f"it ended by signal {-code}" if code < 0 else f"it ended its process with exit code {code}"

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner_pid != os.getpid():
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # including its child processes
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _message(blob: bytes) -> dict[str, Any]:
    """Parse a message of `store.plugins.child`. Raises ValueError for any other form: a plug-in may have altered the
    modules in its process.
    """
    try:
        found = json.loads(blob)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        if isinstance(found.get("query"), str) and isinstance(found.get("arguments"), list) and found["arguments"]:
            return found
        if isinstance(found.get("part"), list) or {"error", "result"} & {*found}:
            return {name: value for name, value in found.items() if name != "query"}
    raise ValueError(INVALID_ANSWER)


def _validated(form: Callable[[Any], Any], answer: Any) -> Any:
    try:
        return form(answer)
    except Exception:  # for any malformed message
        raise ValueError(INVALID_ANSWER) from None


@cache
def _installed() -> Any:  # Python 3.12 has a different class for entry points than earlier versions
    """Entry points of all groups, cached: finding one group reads the metadata of all installed packages anyway."""
    return entry_points()


@cache
def plugins(group: str, module: str) -> tuple[PluginProcess, ...]:
    """All plug-ins of a group, by name. `module` serves their calls (with `store.plugins.child`). Empty in a plug-in's
    process.
    """
    if IN_PLUGIN in os.environ:
        return ()
    by_name: Mapping[str, EntryPoint] = {entry.name: entry for entry in _installed().select(group=group)}
    found = tuple(PluginProcess(by_name[name], module) for name in sorted(by_name))
    for plugin in found:
        atexit.register(plugin.close)
    return found


class QueryLimitError(Exception):
    """A query was interrupted because the plug-in's time limit was reached."""


def answered(source: Any, what: str, arguments: Sequence[Any], deadline_s: float) -> tuple[str, Any]:
    """Run a plug-in's query: ("result", rows) or ("error", one line). Raises QueryLimitError at the deadline
    (`time.monotonic()`).
    """
    if source is None or what not in ("rows", "query", "has"):
        return "error", "this call has no access to records"
    is_late = threading.Event()

    def interrupt() -> None:
        is_late.set()
        if (stop := getattr(source, "interrupt", None)) is not None:
            stop()

    timer = threading.Timer(max(0.01, deadline_s - time.monotonic()), interrupt)
    timer.daemon = True
    timer.start()
    try:
        if what == "has":
            return "result", bool(source.has(str(arguments[0])))
        sql, params = str(arguments[0]), list(arguments[1] or ())
        found = getattr(source, what)(_bounded(sql, MAX_ROWS[what]), params)
        count = len(found) if what == "rows" else max(map(len, found.values()), default=0)
        if count > MAX_ROWS[what]:
            return "error", f"more than {MAX_ROWS[what]:,} rows: aggregate in SQL"
        return "result", found
    except (Exception, KeyboardInterrupt) as error:
        if is_late.is_set():
            raise QueryLimitError from None
        if isinstance(error, KeyboardInterrupt):
            raise
        return "error", " ".join(str(error).split())[:500]
    finally:
        timer.cancel()


def _bounded(sql: str, max_rows: int) -> str:
    """Limit a statement to one row more than allowed, to detect longer results."""
    statement = sql.strip().rstrip(";")
    if not statement.lower().startswith(_BOUNDED):
        return sql
    return f"SELECT * FROM (\n{statement}\n) LIMIT {max_rows + 1}"
