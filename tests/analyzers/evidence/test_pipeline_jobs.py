"""What-if of pipeline jobs out of per-operation Parquet, against jobs whose answers are formulas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import duckdb
import numpy as np
import pytest

from analyzers.evidence.diagnose_files import diagnose_files
from analyzers.whatif.pipeline_jobs import what_if_of_operations
from analyzers.whatif.what_if import WhatIf
from store.readers.operations import read_operations
from store.readers.untrusted.external_files import SourceError
from tests.sentences import plain

Row = tuple[int, int, int, str, float, float, int]
Cost = Callable[[int, int, int], float]
"""(data-parallel rank, stage, microbatch) -> seconds of a forward pass; a backward pass takes twice as long."""


def gpipe(
    dp: int,
    stages: int,
    microbatches: int,
    cost: Cost,
    *,
    link_s: float = 0.0,
    sync_s: float = 0.0,
    norm_s: float = 0.0,
) -> list[Row]:
    """One step of all forward passes and then all backward passes. A message begins when both sides have posted it."""
    rows: list[Row] = []
    ends = np.zeros((dp, stages))
    for lane in range(dp):
        free = np.zeros(stages)
        for direction, order in (("forward", range(stages)), ("backward", range(stages - 1, -1, -1))):
            left = np.zeros(microbatches)
            for at, stage in enumerate(order):
                posted, sent = (0.0 if direction == "forward" else free[stage]), left
                left = np.zeros(microbatches)
                for micro in range(microbatches):
                    arrived = 0.0
                    if at:
                        arrived = max(posted, sent[micro]) + link_s
                        rows.append((lane, stage, 0, f"{direction}-recv", posted, arrived - posted, -1))
                        rows.append(
                            (lane, order[at - 1], 0, f"{direction}-send", sent[micro], arrived - sent[micro], -1)
                        )
                    took = cost(lane, stage, micro) * (1 if direction == "forward" else 2)
                    start = max(free[stage], arrived)
                    rows.append((lane, stage, 0, f"{direction}-compute", start, took, micro))
                    free[stage] = posted = left[micro] = start + took
        ends[lane] = free
    if sync_s:
        for stage in range(stages):
            for lane in range(dp):
                begin = ends[lane, stage]
                took = ends[:, stage].max() + sync_s - begin
                rows.append((lane, stage, 0, "grads-reduce-scatter", begin, took, -1))
    if norm_s:
        last = ends.max() + norm_s
        for (lane, stage), begin in np.ndenumerate(ends):
            rows.append((lane, stage, 0, "optimizer-clip-main-grad", begin, last - begin, -1))
    return rows


def written(folder: Path, rows: list[Row], steps: int = 3) -> Path:
    path = folder / "trace.parquet"
    repeated = [(*row[:2], step, row[3], row[4] + 100.0 * step, *row[5:]) for step in range(steps) for row in rows]
    names = ("dp_rank", "stage", "step", "optype", "start", "duration", "microbatch")
    with duckdb.connect() as connection:
        columns = {name: np.array([row[at] for row in repeated]) for at, name in enumerate(names)}
        connection.register("t", columns)
        connection.execute(f"COPY (FROM t) TO '{path}' (FORMAT parquet)")
    return path


def judged(folder: Path, rows: list[Row]) -> WhatIf:
    return what_if_of_operations(read_operations(written(folder, rows)))


def test_balanced_jobs_have_no_slowdown(tmp_path: Path) -> None:
    found = judged(tmp_path, gpipe(2, 4, 6, lambda lane, stage, micro: 1.0, link_s=0.1, sync_s=0.5))
    assert found.slowdown == pytest.approx(1.0, rel=0.001)
    assert found.error_ratio < 0.01
    assert (found.worst_ranks_ratio, found.last_stage_ratio) == (None, None)


def test_one_slow_worker_of_a_data_parallel_job(tmp_path: Path) -> None:
    dp, micros, sync = 4, 8, 2.0
    found = judged(tmp_path, gpipe(dp, 1, micros, lambda lane, stage, micro: 1.6 if lane == 2 else 1.0, sync_s=sync))
    mean = (3 * 1.0 + 1.6) / 4
    ran, ideal = micros * 3 * 1.6 + sync, micros * 3 * mean + sync
    assert found.slowdown == pytest.approx(ran / ideal, rel=0.01)
    assert found.worst_ranks == (2,)
    assert found.worst_ranks_ratio == pytest.approx(1.0, rel=0.01)
    assert found.last_stage_ratio is None
    assert found.by_rank[2] == pytest.approx(ran / ideal, rel=0.01)


@pytest.mark.parametrize("link_s", [0.0, 0.05])
def test_a_last_stage_that_is_too_large(tmp_path: Path, link_s: float) -> None:
    stages, micros, last = 4, 8, 1.5

    def takes(others: float, last: float) -> float:
        """A stage that receives takes the link as well; the slowest of them sets the pace."""
        forward = (stages - 1) * (others + link_s) + last + (micros - 1) * (last + link_s)
        first = max(2 * last, 2 * others + link_s)
        backward = 2 * last + (micros - 1) * first + (stages - 1) * (link_s + 2 * others)
        return forward + backward

    found = judged(
        tmp_path, gpipe(2, stages, micros, lambda lane, stage, micro: last if stage == 3 else 1.0, link_s=link_s)
    )
    mean = (3 * 1.0 + last) / 4
    ran, ideal, without = takes(1.0, last), takes(mean, mean), takes(1.0, mean)
    assert found.slowdown == pytest.approx(ran / ideal, rel=0.01)
    assert ran - without > ran - ideal, "as the paper says of such jobs"
    assert found.last_stage_ratio == 1.0


def test_waiting_for_the_norm_of_all_gradients_is_no_work(tmp_path: Path) -> None:
    dp, micros, norm = 4, 8, 0.5
    found = judged(tmp_path, gpipe(dp, 1, micros, lambda lane, stage, micro: 1.6 if lane == 2 else 1.0, norm_s=norm))
    ran, ideal = micros * 3 * 1.6 + norm, micros * 3 * (3 * 1.0 + 1.6) / 4 + norm
    assert found.slowdown == pytest.approx(ran / ideal, rel=0.01)
    assert found.error_ratio < 0.01


def test_one_slow_worker_of_a_pipeline(tmp_path: Path) -> None:
    dp, stages, micros, slow = 3, 2, 6, 1.4
    rows = gpipe(dp, stages, micros, lambda lane, stage, micro: slow if (lane, stage) == (1, 0) else 1.0, sync_s=0.3)
    found = judged(tmp_path, rows)
    mean = (5 * 1.0 + slow) / 6
    ran = 3 * (micros * slow + 1.0) + 0.3
    ideal = 3 * (micros + 1) * mean + 0.3
    rest = max(3 * (micros + 1) * 1.0, 3 * (micros * mean + 1.0)) + 0.3
    assert found.slowdown == pytest.approx(ran / ideal, rel=0.01)
    assert found.worst_ranks == (1 * stages + 0,)
    assert found.worst_ranks_ratio == pytest.approx(min(1.0, (ran - rest) / (ran - ideal)), rel=0.01)


def test_a_slow_worker_of_the_last_stage_is_not_the_stage(tmp_path: Path) -> None:
    """Balancing either removes the whole slowdown."""
    written(tmp_path, gpipe(3, 2, 6, lambda lane, stage, micro: 1.4 if (lane, stage) == (1, 1) else 1.0))
    (finding,) = diagnose_files([tmp_path]).fired
    assert (finding.kind, finding.ranks) == ("straggler", (3,))
    assert finding.evidence["removed_by_worst_ranks_ratio"] == 1.0


def test_it_is_one_of_the_files_that_analyze_reads(tmp_path: Path) -> None:
    written(tmp_path, gpipe(2, 4, 8, lambda lane, stage, micro: 1.5 if stage == 3 else 1.0))
    diagnosis = diagnose_files([tmp_path])
    assert diagnosis.what_if is not None
    assert diagnosis.what_if.slowdown == pytest.approx(1.19, abs=0.03)
    assert [(one.kind, one.ranks) for one in plain(diagnosis.fired)] == [("stage_imbalance", (3, 7))]
    slow = tmp_path / "slow"
    slow.mkdir()
    written(slow, gpipe(4, 1, 8, lambda lane, stage, micro: 1.6 if lane == 2 else 1.0))
    assert [(one.kind, one.ranks) for one in plain(diagnose_files([slow]).fired)] == [("straggler", (2,))]


@pytest.mark.parametrize(
    ("sql", "problem"),
    [
        ("SELECT 1 AS a", "without the columns dp_rank"),
        ("SELECT 0 AS dp_rank, 0 AS stage, 0 AS step, 'x' AS optype, 0.0 AS start, -1.0 AS duration", "no operation"),
        ("SELECT 0 AS dp_rank, 'a' AS stage, 0 AS step, NULL AS optype, 0.0 AS start, 1.0 AS duration", "no operation"),
    ],
)
def test_other_parquet_files_are_refused_by_name(tmp_path: Path, sql: str, problem: str) -> None:
    path = tmp_path / "x.parquet"
    with duckdb.connect() as connection:
        connection.execute(f"COPY ({sql}) TO '{path}' (FORMAT parquet)")
    with pytest.raises(SourceError, match=problem):
        read_operations(path)


def test_damaged_files_and_odd_names_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, gpipe(2, 1, 2, lambda lane, stage, micro: 1.0))
    blob = path.read_bytes()
    for name, content in (
        ("cut", blob[:200]),
        ("noise", b"PAR1" + bytes(range(256)) * 8 + b"PAR1"),
        ("empty", b"PAR1"),
    ):
        bad = tmp_path / f"{name}.parquet"
        bad.write_bytes(content)
        with pytest.raises(SourceError, match="cannot be read as Parquet"):
            read_operations(bad)
    odd = tmp_path / "a*.parquet"
    odd.write_bytes(blob)
    with pytest.raises(SourceError, match="rename it"):
        read_operations(odd)
