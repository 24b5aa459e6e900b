"""Record spans `compile` while torch.compile works, which may take minutes without any other record.

    probe = CompileProbe(recorder)
    probe.hook()                # called repeatedly: hooks torch's compiler when it is imported, and again after a reset
    probe.remove()

torch calls back at the beginning and end of every compilation, deferred backward graphs and recompilations included.
Reasons of recompilations and graph breaks are events (`CompileLog`). Importing torch's compiler takes seconds, so this
module waits until the program has imported it (the first optimizer does), and never imports it itself. Nested
compilations are one span.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from .fail_open import failing_open
from .recorder import Recorder
from .tape import event_kinds
from .torch_compat import COMPILE_CALLBACKS, COMPILE_METRICS

__all__ = ["CompileProbe"]

MAX_EVENTS = 100
"""Events per process: enough to explain a program that keeps recompiling."""
MAX_CHARACTERS = 300


class CompileProbe:
    """Records the compilations of one process."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._handler: Any = None
        self._span: Any = None
        self._log = CompileLog(recorder)

    def hook(self) -> None:
        """Hook the compiler if it has been imported and does not call us yet. Costs a search of a short list."""
        if self._handler is not None and self._started in self._handler.start_callbacks:
            return
        module = sys.modules.get(COMPILE_CALLBACKS)
        if module is None or not self._recorder.enabled:
            return
        with failing_open("compilation"):
            handler = getattr(module, "callback_handler", None)
            if handler is None:  # the module is being imported
                return
            handler.register_start_callback(self._started)
            handler.register_end_callback(self._finished)
            self._handler = handler

    def remove(self) -> None:
        """Remove the hooks."""
        handler, self._handler = self._handler, None
        if handler is None:
            return
        with failing_open("compilation"):
            self._log.write()
        for callback, remove in (
            (self._started, handler.remove_start_callback),
            (self._finished, handler.remove_end_callback),
        ):
            with contextlib.suppress(ValueError):  # `torch._dynamo.reset` has removed it already
                remove(callback)

    def _started(self, _: Any) -> None:
        with failing_open("compilation"):
            self._log.write()  # only now has torch stored the reasons of the previous compilation
            if self._span is None:
                span = self._recorder.span("compile")
                span.__enter__()
                self._span = span

    def _finished(self, _: Any) -> None:
        with failing_open("compilation"):
            span, self._span = self._span, None
            if span is not None:
                span.__exit__(None, None, None)
            self._log.write()


class CompileLog:
    """Events for recompilations and graph breaks of torch.compile, one for each distinct entry.

    torch keeps both for its own reports: the guard that failed for each compilation, and the reason and line of the
    program for each graph break. Compilations of another process are in that process's records.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        utils = sys.modules.get(COMPILE_METRICS)
        # Leave out compilations that an earlier run in this process has recorded.
        self._earlier = {_key(metrics) for metrics in getattr(utils, "get_compilation_metrics", list)()}
        self._breaks = len(getattr(utils, "graph_break_reasons", []))
        self._seen: set[tuple[Any, ...]] = set()

    def write(self) -> None:
        """Write events for new entries. Does nothing until the compiler has been imported."""
        utils = sys.modules.get(COMPILE_METRICS)
        if utils is None:
            return
        for metrics in getattr(utils, "get_compilation_metrics", list)():
            self._recompiled(metrics)
        breaks: list[Any] = getattr(utils, "graph_break_reasons", [])
        if len(breaks) < self._breaks:  # torch has cleared its list of graph breaks in the meantime
            self._breaks = 0
        for reason in breaks[self._breaks :]:
            self._broke(reason)
        self._breaks = len(breaks)

    def _recompiled(self, metrics: Any) -> None:
        guard, key = getattr(metrics, "recompile_reason", None), _key(metrics)
        if guard and key not in self._earlier and self._is_new(*key):
            _, file, line = key
            function = getattr(metrics, "co_name", "") or ""
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


def _key(metrics: Any) -> tuple[str, str, int]:
    file, line = getattr(metrics, "co_filename", "") or "", getattr(metrics, "co_firstlineno", 0) or 0
    return str(getattr(metrics, "compile_id", "")), file, line


def _shortened(text: object) -> str:
    return " ".join(str(text).split())[:MAX_CHARACTERS]
