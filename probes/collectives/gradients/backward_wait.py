"""Measure the wait at the end of a backward pass for collectives that only C++ waits for, as in DDP.

DDP's reducer takes the future of every bucket and waits for all of them in C++ when the last gradient is there, so no
`wait()` is seen. Autograd runs its final callbacks in the order in which they were queued:

1. with the first bucket of a backward pass we queue `_begin`; the reducer queues its callback after its last bucket;
2. `_begin` notes the time: all gradients are computed by now, and the rest is waiting; it queues `_end`;
3. the reducer waits for its buckets;
4. `_end` takes the time from `_begin` to the last bucket's completion, less the waits that `wait()` counted meanwhile.

The wait is written to the record of the bucket that completed last, and added to the recorder's.
"""

from __future__ import annotations

import time
from typing import Any

from ...fail_open import record_error
from ...torch_compat import graph_task_id, queue_callback
from ..call_records import Call, Calls
from ..thread_state import keep_thread_state

__all__ = ["BackwardWait"]

_monotonic_ns = time.monotonic_ns


class BackwardWait:
    """Follows futures, and the end of the backward pass in which they were taken."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._expected: list[tuple[Call, Any]] = []
        self._task = -1
        self._begin_ns = 0
        self._begin_wait_ns = 0

    def follow(self, call: Call, future: Any) -> None:
        """Complete `call` when `future` completes. If the backward pass waits for the future at the end of the pass,
        count that wait."""
        calls = self._calls
        call.in_backward = self._expect(call, future)

        def completed(done: Any) -> None:
            end = _monotonic_ns()  # on gloo's thread, holding the GIL: do as little as possible
            keep_thread_state()
            try:
                done.value()
            except Exception:  # the call failed: its record stays open, and the waiter gets the error
                return
            try:
                if call.finished:
                    return
                if call.in_backward:
                    calls.note_end(call, end)
                else:
                    calls.finish(call, end, 0)
            except Exception as error:
                record_error("collectives.completed", error)

        calls.callbacks.add(future, completed)

    def _expect(self, call: Call, future: Any) -> bool:
        task = graph_task_id()
        if task < 0:
            return False  # not in a backward pass
        if task != self._task:
            self._expected.clear()  # calls of an earlier pass that raised
            self._task = task
            queue_callback(self._begin)
        self._expected.append((call, future))
        return True

    def _begin(self) -> None:
        try:
            self._begin_wait_ns = self._calls.recorder.wait_ns
            queue_callback(self._end)
            self._begin_ns = _monotonic_ns()
        except Exception as error:
            record_error("collectives.backward", error)

    def _end(self) -> None:
        try:
            now = _monotonic_ns()
            calls, expected = self._calls, self._expected
            self._expected, self._task = [], -1
            complete = []
            for call, future in expected:
                call.in_backward = False
                if future.done():  # a call that is not done was not waited for; its record ends when it completes
                    complete.append(call)
                    call.end_ns = call.end_ns or now  # `end_ns` is 0 if the call's callback still waits for the GIL
            if not complete:
                return
            last = max(complete, key=lambda call: call.end_ns)
            counted = calls.recorder.wait_ns - self._begin_wait_ns
            exposed = max(0, last.end_ns - self._begin_ns - counted)
            calls.add_wait(exposed)
            for call in complete:
                calls.finish(call, call.end_ns, exposed if call is last else 0)
        except Exception as error:
            record_error("collectives.backward", error)
