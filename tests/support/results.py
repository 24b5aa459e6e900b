"""pytest plug-in: write the outcome and the cost of each test to a file, a line of JSON for each.

    python -m pytest -p tests.support.results --results FILE tests/store

`python -m tests.suite` merges these files. `real` tells whether a test, or an earlier one of its module (they may share
fixtures), started a process or a thread or opened a connection: only such a test may fail by chance.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.forked import forks_cpu_s

# Audit events (docs.python.org/3/library/audit_events.html) of what another process can delay. A thread's start has
# none before Python 3.12.
_REAL = frozenset(
    {"os.fork", "os.forkpty", "os.posix_spawn", "socket.bind", "socket.connect", "socket.sendmsg", "subprocess.Popen"}
)
_RANK = {"passed": 0, "skipped": 1, "failed": 2}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", type=Path, help="write outcome and cost of each test to this file")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--results")
    if path is not None:
        config.pluginmanager.register(_Recorder(path))


class _Recorder:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)
        self._outcome = "passed"
        self._text = ""
        self._is_real = False
        self._real_modules: set[str] = set()
        self._exit_code = int(pytest.ExitCode.INTERNAL_ERROR)
        sys.addaudithook(self._on_event)
        self._watch_threads()

    def _watch_threads(self) -> None:
        start = threading.Thread.start

        def started(thread: threading.Thread) -> None:
            self._is_real = True
            start(thread)

        threading.Thread.start = started  # type: ignore[method-assign]

    def _on_event(self, event: str, args: tuple[Any, ...]) -> None:
        if event in _REAL:
            self._is_real = True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
        module = item.nodeid.partition("::")[0]
        self._outcome, self._text, self._is_real = "passed", "", False
        self._write(test=item.nodeid, began=True)
        began_s, began_cpu_s = time.monotonic(), _cpu_s()
        result = yield
        if self._is_real or item.get_closest_marker("e2e"):
            self._real_modules.add(module)
        self._write(
            test=item.nodeid, outcome=self._outcome, real=module in self._real_modules, text=self._text,
            wall_s=round(time.monotonic() - began_s, 3), cpu_s=round(_cpu_s() - began_cpu_s, 3),
        )  # fmt: skip
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if _RANK[report.outcome] > _RANK[self._outcome]:
            self._outcome = report.outcome
        if report.failed:
            self._text += f"{report.longreprtext}\n" + "".join(f"--- {name}\n{text}" for name, text in report.sections)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._exit_code = int(exitstatus)
        self._write(session_cpu_s=round(_cpu_s(), 1))

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        # At exit an interpreter waits for its child processes, even for one that ignores SIGTERM.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self._exit_code)

    def _write(self, **fields: object) -> None:
        self._file.write(json.dumps(fields) + "\n")


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + forks_cpu_s()
