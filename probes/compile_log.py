"""What torch.compile compiled again and why, and where it broke a graph: as events, each once.

    log = CompileLog(recorder)
    log.write()                 # after a compilation: what is new since the last time

torch keeps both for its own reports: of each compilation the guard that failed, and of each broken graph the reason and
the line of the program. Compilations of another process are in that process's records.
"""

from __future__ import annotations

import sys
from typing import Any

from .recorder import Recorder
from .tape import event_kinds

__all__ = ["CompileLog"]

MAX_EVENTS = 100
"""Of one process. A program that goes on compiling has said why by then."""
MAX_CHARACTERS = 300


class CompileLog:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._seen: set[tuple[Any, ...]] = set()
        self._breaks = 0

    def write(self) -> None:
        """Write events of what is new. Looks only at a compiler that has been imported."""
        utils = sys.modules.get("torch._dynamo.utils")
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
            key = (str(getattr(metrics, "compile_id", "")), file, line)
            self._event(event_kinds.RECOMPILE, key, file, line, getattr(metrics, "co_name", "") or "", guard=guard)

    def _broke(self, reason: Any) -> None:
        frame = reason.user_stack[-1] if reason.user_stack else None
        file, line = (frame.filename, frame.lineno or 0) if frame is not None else ("", 0)
        function = frame.name if frame is not None else ""
        self._event(event_kinds.GRAPH_BREAK, (file, line, reason.reason), file, line, function, reason=reason.reason)

    def _event(self, kind: str, key: tuple[Any, ...], file: str, line: int, function: str, **why: str) -> None:
        if (kind, *key) in self._seen or len(self._seen) >= MAX_EVENTS:
            return
        self._seen.add((kind, *key))
        said = {name: " ".join(str(text).split())[:MAX_CHARACTERS] for name, text in why.items()}
        self._recorder.event(kind, file=file, line=line, function=function, **said)
