"""Spans `compile`: when torch.compile is at work, which may take minutes and leaves no other record.

    probe = CompileProbe(recorder)
    probe.hook()                # again and again: it hooks torch's compiler once that is there, and after a reset
    probe.remove()

torch calls back at the beginning and the end of whatever it compiles, also of what a backward pass leaves for later
and of what is compiled again. Why it was, and where a graph broke, are events (`probes.profiling.compile_log`). Its
compiler is a separate package that takes seconds to import: this waits until the program has (the first optimizer
does), and never does it itself. Compilations inside one another are one span.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from .fail_open import failing_open
from .profiling.compile_log import CompileLog
from .recorder import Recorder
from .torch_compat import COMPILE_CALLBACKS

__all__ = ["CompileProbe"]


class CompileProbe:
    """Writes what one process compiles."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._handler: Any = None
        self._span: Any = None
        self._log = CompileLog(recorder)

    def hook(self) -> None:
        """Hook the compiler if it has been imported and does not call us yet. Costs a search of two short lists."""
        if self._handler is not None and self._started in self._handler.start_callbacks:
            return
        module = sys.modules.get(COMPILE_CALLBACKS)
        if module is None or not self._recorder.enabled:
            return
        with failing_open("compilation"):
            handler = getattr(module, "callback_handler", None)
            if handler is None:  # it is being imported
                return
            handler.register_start_callback(self._started)
            handler.register_end_callback(self._finished)
            self._handler = handler

    def remove(self) -> None:
        """Take the hooks away."""
        handler, self._handler = self._handler, None
        if handler is None:
            return
        with failing_open("compilation"):
            self._log.write()
        for callback, remove in (
            (self._started, handler.remove_start_callback),
            (self._finished, handler.remove_end_callback),
        ):
            with contextlib.suppress(ValueError):  # `torch._dynamo.reset` has done so
                remove(callback)

    def _started(self, _: Any) -> None:
        with failing_open("compilation"):
            self._log.write()  # torch notes why it compiled after it has said that it is done
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
