"""Self time of operators in a trace: nested spans, phases, other threads and kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from store.readers.traces.trace_operators import BETWEEN, OperatorTime, OperatorTimes
from store.readers.untrusted.external_files import unpacked
from store.readers.untrusted.json_stream import members


def span(name: str, begin: float, end: float, *, category: str = "cpu_op", thread: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin, "tid": thread, "pid": 1}


def read_operators(path: Path, *, num_steps: int) -> list[OperatorTime]:
    operators = OperatorTimes()
    for _, event, is_item in members(unpacked(path), {"traceEvents"}):
        if is_item:
            operators.take(event)
    return operators.rows(num_steps=num_steps)


def step(number: int, begin: float) -> list[dict[str, Any]]:
    """Ten milliseconds: 1 of Python, a forward of 6 (1 of Python, mm 4 with a copy of 1, add 1), 3 of Python."""
    note = "user_annotation"
    at = begin + 1000
    return [
        span(f"ProfilerStep#{number}", begin, begin + 10_000, category=note),
        span("rankscope.forward", at, at + 6000, category=note),
        span("aten::mm", at, at + 4000),
        span("aten::copy_", at + 500, at + 1500),
        span("aten::add", at + 4000, at + 5000),
        span("gloo:all_reduce", at, at + 5000, thread=2),
        span("ampere_gemm", at + 20_000, at + 22_000, category="kernel", thread=7),
    ]


def written(folder: Path, events: list[Any]) -> Path:
    path = folder / "rank-3.pt.trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


def test_each_operator_has_its_self_time_by_phase(tmp_path: Path) -> None:
    outside = [span("aten::mm", 0, 90)]
    rows = read_operators(written(tmp_path, outside + step(1, 100_000) + step(2, 200_000)), num_steps=2)
    found = {(row.name, row.phase, row.device): (row.self_ms, row.calls) for row in rows}
    assert found == {
        ("aten::mm", "forward", False): (3.0, 1.0),
        ("aten::copy_", "forward", False): (1.0, 1.0),
        ("aten::add", "forward", False): (1.0, 1.0),
        (BETWEEN, "forward", False): (1.0, 1.0),
        (BETWEEN, "", False): (4.0, 1.0),
        ("ampere_gemm", "", True): (2.0, 1.0),
    }
    host = sum(row.self_ms for row in rows if not row.device)
    assert host == pytest.approx(10.0), "the host's parts add up to the step"
    assert [row.self_ms for row in rows] == sorted((row.self_ms for row in rows), reverse=True)


def test_order_and_damage_of_events_do_not_matter(tmp_path: Path) -> None:
    events = step(1, 100_000)
    odd: list[Any] = [None, 3, {"ph": "X"}, span("x", 0, 1) | {"ts": "soon"}, span("x", 0, 1) | {"tid": None}]
    expected = read_operators(written(tmp_path, events), num_steps=1)
    found = read_operators(written(tmp_path, odd + events[::-1]), num_steps=1)
    assert {*found} == {*expected}
    assert all(isinstance(row, OperatorTime) for row in found)


def test_a_trace_without_marks_has_no_operators_of_a_step(tmp_path: Path) -> None:
    assert read_operators(written(tmp_path, [span("aten::mm", 0, 5)]), num_steps=1) == []
