"""`step_trace_time.csv` of Ascend's profiler: parts of steps, ranks from its metadata, damaged rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.evidence.diagnose_files import diagnose_files
from store.readers.traces.ascend_steps import read_ascend_steps
from store.readers.traces.rank_traces import breakdown
from store.readers.untrusted.external_files import SourceError

HEADER = (
    "Device_id,Step,Computing,Communication(Not Overlapped),Overlapped,Communication,Free,Stage,Bubble,"
    "Communication(Not Overlapped and Exclude Receive),Preparing\n"
)


def row(step: int, compute: float = 30_000.0, exposed: float = 6_000.0) -> str:
    stage = compute + exposed + 1000.0
    return f"0,{step},{compute},{exposed},4000.0,{exposed + 4000.0},1000.0,{stage},0.0,{exposed},12.5\n"


def written(folder: Path, rank: int, text: str) -> Path:
    place = folder / f"host_{rank}_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
    place.mkdir(parents=True)
    (place.parent / f"profiler_info_{rank}.json").write_text("{}")
    path = place / "step_trace_time.csv"
    path.write_text(HEADER + text)
    return path


def test_the_parts_are_those_of_the_file(tmp_path: Path) -> None:
    trace = read_ascend_steps(written(tmp_path, 3, "".join(row(step) for step in (7, 8))))
    parts = {name: values.tolist() for name, values in breakdown(trace).items()}
    assert (trace.rank, trace.steps.tolist()) == (3, [7, 8])
    assert parts["compute"] == pytest.approx([30.0, 30.0])
    assert parts["communication"] == pytest.approx([10.0, 10.0])
    assert parts["exposed"] == pytest.approx([6.0, 6.0])
    assert parts["idle"] == pytest.approx([1.0, 1.0])
    assert parts["step"] == pytest.approx([37.0, 37.0])


def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    for rank in range(4):
        slow = rank == 2
        text = "".join(row(step, 38_000.0 if slow else 30_000.0, 500.0 if slow else 8_500.0) for step in range(20))
        written(tmp_path, rank, text)
    assert [(one.kind, one.ranks) for one in diagnose_files([tmp_path]).fired] == [("straggler", (2,))]


@pytest.mark.parametrize(
    "text", ["", "0,1,x,1,1,1,1\n", "0,1,nan,1,1,1,1,1,1,1,1\n", "0,1,-5,1,1,1,1,1,1,1,1\n", "0\n"]
)
def test_files_without_a_whole_step_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SourceError, match="no step"):
        read_ascend_steps(written(tmp_path, 0, text))


def test_without_a_rank_it_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "step_trace_time.csv"
    path.write_text(HEADER + row(1))
    with pytest.raises(SourceError, match="no rank"):
        read_ascend_steps(path)
    assert read_ascend_steps(path, is_only=True).rank == 0
