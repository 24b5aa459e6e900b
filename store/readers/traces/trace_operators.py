"""Self time per step of the operators and kernels in a profiler trace.

    operators = OperatorTimes()
    trace = read_trace(path, each=operators.take)
    for row in operators.rows(num_steps=len(trace.steps)):
        row.name, row.phase, row.device, row.self_ms, row.calls     # "aten::mm", "forward", False, 12.3, 24.0

1. Host: spans of the thread with the step marks, within these marks. An operator's self time excludes the spans nested
   in it. The remaining time of a phase (`rankscope.forward`) or step lies between operators: Python, or a wait that no
   operator shows.
2. Device: kernels and copies by name, with their full duration.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["BETWEEN", "OperatorTime", "OperatorTimes"]

BETWEEN = "between operators"
STEP_MARK, PHASE_MARK = "ProfilerStep#", "rankscope."
_HOST = ("cpu_op", "operator", "user_annotation", "cuda_runtime", "cuda_driver")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
MAX_NAMES = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTime:
    """Means per step. `phase` is empty outside of phases, and for the device, which runs behind the host."""

    name: str
    phase: str
    device: bool
    self_ms: float
    calls: float


@dataclass(slots=True)
class _Spans:
    begin: array[float]
    end: array[float]
    name: array[int]

    @classmethod
    def empty(cls) -> _Spans:
        return cls(array("d"), array("d"), array("q"))

    def add(self, begin: float, end: float, name: int) -> None:
        self.begin.append(begin)
        self.end.append(end)
        self.name.append(name)

    def in_order(self) -> Iterator[tuple[float, float, int]]:
        """Spans by start time; of spans that start together, the longer (outer) one comes first."""
        begin, end = np.frombuffer(self.begin), np.frombuffer(self.end)
        for at in np.lexsort((-end, begin)):
            yield self.begin[at], self.end[at], self.name[at]


class OperatorTimes:
    """Collects the events of one trace as they are read."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._host: dict[Any, _Spans] = {}
        self._device = _Spans.empty()
        self._marked: Any = None

    def take(self, event: Any) -> None:
        """Add one item of `traceEvents`, which may have any type."""
        if not isinstance(event, dict) or event.get("ph") != "X":
            return
        category, name = str(event.get("cat", "")).lower(), str(event.get("name", ""))[:200]
        is_host = category in _HOST
        if not is_host and category not in _DEVICE:
            return
        begin, duration, thread = _time(event.get("ts")), _time(event.get("dur", 0)), event.get("tid")
        if begin is None or duration is None or not isinstance(thread, (int, str)):
            return
        if name not in self._names and len(self._names) >= MAX_NAMES:
            name = "others"
        number = self._names.setdefault(name, len(self._names))
        if is_host and name.startswith(STEP_MARK):
            self._marked = thread
        spans = self._host.setdefault(thread, _Spans.empty()) if is_host else self._device
        spans.add(begin, begin + duration, number)

    def rows(self, *, num_steps: int) -> list[OperatorTime]:
        """Operators by descending self time."""
        names = list(self._names)
        sums: dict[tuple[str, str, bool], list[float]] = {}
        if self._marked is not None:
            _add_host(self._host[self._marked], names, sums)
        for begin, end, number in self._device.in_order():
            _add(sums, (names[number], "", True), end - begin)
        steps = max(1, num_steps)
        rows = [
            OperatorTime(name=name, phase=phase, device=on, self_ms=us / 1e3 / steps, calls=count / steps)
            for (name, phase, on), (us, count) in sums.items()
        ]
        return sorted(rows, key=lambda row: -row.self_ms)


def _add_host(spans: _Spans, names: list[str], sums: dict[tuple[str, str, bool], list[float]]) -> None:
    """Add the self times of nested spans, by the enclosing phase."""
    stack: list[tuple[float, tuple[str, str, bool]]] = []  # end and key of the open spans
    for begin, end, number in spans.in_order():
        while stack and stack[-1][0] <= begin:
            stack.pop()
        name = names[number]
        is_step = name.startswith(STEP_MARK)
        if not stack and not is_step:
            continue  # the span lies outside the marked steps
        phase = stack[-1][1][1] if stack else ""
        if is_step or name.startswith(PHASE_MARK):
            phase = "" if is_step else name[len(PHASE_MARK) :]
            name = BETWEEN
        key = (name, phase, False)
        _add(sums, key, end - begin)
        if stack:
            sums[stack[-1][1]][0] -= min(end, stack[-1][0]) - begin
        stack.append((end, key))


def _add(sums: dict[tuple[str, str, bool], list[float]], key: tuple[str, str, bool], us: float) -> None:
    found = sums.setdefault(key, [0.0, 0])
    found[0] += us
    found[1] += 1


def _time(value: Any) -> float | None:
    is_time = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e17
    return float(value) if is_time else None
