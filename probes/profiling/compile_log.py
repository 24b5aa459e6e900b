"""Events for recompilations and graph breaks of torch.compile, each once.

    log = CompileLog(recorder)
    log.write()                 # after a compilation: what is new since the last time

torch keeps both for its own reports: of each compilation the guard that failed, and of each broken graph the reason and
the line of the program. Compilations of another process are in that process's records.
"""

from __future__ import annotations

import sys
from typing import Any

from ..recorder import Recorder
from ..tape import event_kinds
from ..torch_compat import COMPILE_METRICS

__all__ = ["CompileLog"]

MAX_EVENTS = 100
"""Events per process: enough to explain a program that keeps recompiling."""
MAX_CHARACTERS = 300


class CompileLog:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._seen: set[tuple[Any, ...]] = set()
        self._breaks = 0

    def write(self) -> None:
        """Write events of what is new. Looks only at a compiler that has been imported."""
        utils = sys.modules.get(COMPILE_METRICS)
        if utils is None:
            return
        for metrics in getattr(utils, "get_compilation_metrics", list)():
            self._recompiled(metrics)
        breaks: list[Any] = getattr(utils, "graph_break_reasons", [])
        if len(breaks) < self._breaks:  # torch has forgotten them
            self._breaks = 0
        for reason in breaks[self._breaks :]:
            self._broke(reason)
        self._breaks = len(breaks)

    def _recompiled(self, metrics: Any) -> None:
        guard = getattr(metrics, "recompile_reason", None)
        if guard:
            file, line = getattr(metrics, "co_filename", "") or "", getattr(metrics, "co_firstlineno", 0) or 0
            function = getattr(metrics, "co_name", "") or ""
            if self._is_new(str(getattr(metrics, "compile_id", "")), file, line):
                self._recorder.event(
                    event_kinds.RECOMPILE, file=file, line=line, function=function, guard=_shortened(guard)
                )

    def _broke(self, reason: Any) -> None:
        frame = reason.user_stack[-1] if reason.user_stack else None
        file, line = (frame.filename, frame.lineno or 0) if frame is not None else ("", 0)
        function = frame.name if frame is not None else ""
        if self._is_new(file, line, reason.reason):
            why = _shortened(reason.reason)
            self._recorder.event(event_kinds.GRAPH_BREAK, file=file, line=line, function=function, reason=why)

    def _is_new(self, *key: object) -> bool:
        if key in self._seen or len(self._seen) >= MAX_EVENTS:
            return False
        self._seen.add(key)
        return True


def _shortened(text: object) -> str:
    return " ".join(str(text).split())[:MAX_CHARACTERS]
