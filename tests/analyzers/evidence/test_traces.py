"""Profiler traces: what is counted as what, against a generator whose truth is known and real gloo runs."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzers.diagnose import Diagnosis
from analyzers.evidence.diagnose_files import diagnose_files
from store.readers.traces.intervals import Spans, intersection, overlap, union
from store.readers.traces.kineto import read_trace
from store.readers.traces.rank_traces import breakdown
from tests.processes import run_ranks
from tests.store.readers.trace_files import HIDDEN_MS, TRANSFER_MS, trace, write


def slow(rank: int, step: int) -> float:
    return 36.0 if rank == 3 else 30.0


def traces(folder: Path, ranks: int = 4, **options: object) -> Diagnosis:
    for rank in range(ranks):
        write(folder, trace(rank, world_size=ranks, **options), f"host_{rank}", packed=rank % 2 == 1)  # type: ignore[arg-type]
    return diagnose_files([folder])


@pytest.mark.parametrize("device_marks", [True, False])
def test_the_parts_of_a_step_agree_with_the_generator(tmp_path: Path, device_marks: bool) -> None:
    write(tmp_path, trace(0, steps=20, device_marks=device_marks, launch_ahead_ms=0.0), "rank0")
    parts = breakdown(read_trace(tmp_path / "rank0.pt.trace.json"))
    assert parts["compute"] == pytest.approx(30.0, rel=0.02)
    assert parts["communication"] == pytest.approx(HIDDEN_MS + TRANSFER_MS, rel=1e-6)
    assert parts["exposed"] == pytest.approx(TRANSFER_MS, rel=1e-6)
    assert parts["idle"] == pytest.approx(0.0, abs=1e-6)
    assert parts["step"] == pytest.approx(parts["compute"] + parts["exposed"] + parts["idle"], rel=1e-9)


def test_the_devices_own_marks_are_taken_where_the_host_runs_ahead(tmp_path: Path) -> None:
    write(tmp_path, trace(0, steps=20, launch_ahead_ms=25.0), "rank0")
    parts = breakdown(read_trace(tmp_path / "rank0.pt.trace.json"))
    assert parts["exposed"] == pytest.approx(TRANSFER_MS, rel=1e-6)


def test_exposed_copies_are_not_compute(tmp_path: Path) -> None:
    made = trace(0, steps=20, device_marks=True, launch_ahead_ms=0.0)
    kernels = [event for event in made["traceEvents"] if event.get("cat") == "kernel" and "nccl" not in event["name"]]
    for number, kernel in enumerate(kernels):  # the first half of each kernel's time becomes a copy
        half = kernel["dur"] / 2
        copy = {
            **kernel,
            "cat": "gpu_memcpy",
            "name": "Memcpy HtoD",
            "dur": half,
            "args": {"correlation": 10**6 + number},
        }
        made["traceEvents"].append(copy)
        kernel["ts"], kernel["dur"] = kernel["ts"] + half, half
    write(tmp_path, made, "rank0")
    parts = breakdown(read_trace(tmp_path / "rank0.pt.trace.json"))
    whole = parts["compute"] + parts["exposed"] + parts["copies"] + parts["idle"]
    assert parts["step"] == pytest.approx(whole, rel=1e-9)
    assert parts["compute"] == pytest.approx(15.0, rel=0.02)
    assert parts["copies"] == pytest.approx(15.0, rel=0.02)
    assert parts["idle"] == pytest.approx(0.0, abs=1e-6)


def test_a_rank_with_slow_copies_is_still_slow(tmp_path: Path) -> None:
    for rank in range(4):
        made = trace(rank, world_size=4, steps=20, compute_ms=slow)
        for event in made["traceEvents"]:
            if event.get("cat") == "kernel" and "nccl" not in event["name"]:
                event["cat"] = "gpu_memcpy"
        made["traceEvents"].append(
            {
                "ph": "X",
                "cat": "kernel",
                "name": "gemm",
                "pid": 0,
                "tid": 7,
                "ts": made["traceEvents"][-1]["ts"],
                "dur": 1,
            }
        )
        write(tmp_path, made, f"host_{rank}")
    (found,) = diagnose_files([tmp_path]).fired
    assert (found.kind, found.ranks) == ("straggler", (3,))


def test_a_straggler_among_traces(tmp_path: Path) -> None:
    diagnosis = traces(tmp_path, steps=20, compute_ms=slow)
    (found,) = diagnosis.fired
    assert (found.kind, found.ranks, found.cause) == ("straggler", (3,), "compute")
    assert found.evidence["excess_ms"] == pytest.approx(6.0, rel=0.1)
    assert found.evidence["peers_wait_more_ms"] == pytest.approx(6.0, rel=0.1)
    rows = {row["rank"]: row for row in diagnosis.run["trace"]["ranks"]}
    assert rows[3]["exposed_ms"] == pytest.approx(TRANSFER_MS, rel=0.05)
    assert rows[0]["exposed_ms"] == pytest.approx(TRANSFER_MS + 6.0, rel=0.05)
    assert rows[3]["overlap_ratio"] == pytest.approx(HIDDEN_MS / (HIDDEN_MS + TRANSFER_MS), rel=0.01)


@pytest.mark.parametrize("usual_ms", [2.0, 6.0])
def test_a_straggler_among_traces_of_few_short_steps(tmp_path: Path, usual_ms: float) -> None:
    diagnosis = traces(tmp_path, steps=12, compute_ms=lambda rank, step: (1.5 if rank == 3 else 1.0) * usual_ms)
    (found,) = diagnosis.fired
    assert (found.kind, found.ranks, found.cause) == ("straggler", (3,), "compute")


def test_equal_ranks_give_no_finding(tmp_path: Path) -> None:
    assert traces(tmp_path, steps=40).findings == ()


def test_equal_ranks_with_short_steps_give_no_finding(tmp_path: Path) -> None:
    assert traces(tmp_path, steps=40, compute_ms=lambda rank, step: 3.0).fired == ()


def test_stages_of_a_pipeline_are_no_peers(tmp_path: Path) -> None:
    for rank in range(4):
        made = trace(rank, world_size=4, steps=20, compute_ms=lambda rank, step: 45.0 if rank >= 2 else 30.0)
        pairs = [rank % 2, rank % 2 + 2]
        made["distributedInfo"]["pg_config"] = [{"pg_name": "1", "pg_desc": "mesh_pp", "pg_size": 2, "ranks": pairs}]
        write(tmp_path, made, f"host_{rank}")
    assert [finding.kind for finding in diagnose_files([tmp_path]).fired] != ["straggler"]


def test_exposed_communication_is_reported(tmp_path: Path) -> None:
    diagnosis = traces(tmp_path, steps=20, compute_ms=lambda rank, step: 5.0)
    assert diagnosis.fired == ()
    assert diagnosis.verdict.startswith("No problems found")
    (found,) = diagnosis.advised
    assert (found.kind, found.advice) == ("exposed_communication", "exposed-communication")
    assert found.evidence["exposed_ratio"] == pytest.approx(TRANSFER_MS / (5.0 + TRANSFER_MS), rel=0.05)


def test_the_files_of_several_cycles_are_one_trace(tmp_path: Path) -> None:
    """`schedule(repeat=3)` writes a file a cycle; together they have the steps that a verdict takes."""
    for rank in range(4):
        for cycle in range(3):
            made = trace(rank, world_size=4, steps=6, compute_ms=slow, seed=cycle)
            for event in made["traceEvents"]:
                name, mark, number = event["name"].partition("ProfilerStep#")
                event["name"] = f"{name}{mark}{int(number) + 20 * cycle if mark else ''}"
            write(tmp_path, made, f"worker{rank}.{1000 + cycle}")
    diagnosis = diagnose_files([tmp_path])
    assert diagnosis.run["steps"] == 18
    assert diagnosis.run["file_problems"] == []
    assert [(finding.ranks, finding.first_step, finding.last_step) for finding in diagnosis.fired] == [((3,), 0, 45)]


def test_too_few_steps_and_missing_ranks_are_reported(tmp_path: Path) -> None:
    for rank in (0, 1, 3):
        write(tmp_path, trace(rank, world_size=4, steps=4, compute_ms=slow), f"host_{rank}")
    diagnosis = diagnose_files([tmp_path])
    said = " ".join(finding.summary for finding in diagnosis.not_judged)
    assert "no trace of rank 2" in said
    assert "4 steps are in all traces" in said
    assert diagnosis.fired == ()


def test_a_trace_without_marks_is_one_step_and_not_judged(tmp_path: Path) -> None:
    made = trace(0, steps=5)
    made["traceEvents"] = [event for event in made["traceEvents"] if "ProfilerStep" not in event["name"]]
    write(tmp_path, made, "rank0")
    diagnosis = diagnose_files([tmp_path])
    assert "no ProfilerStep# marks" in diagnosis.findings[0].summary
    assert diagnosis.run["trace"]["ranks"][0]["steps"] == 1


def test_damaged_cut_and_empty_traces_among_good_ones_do_not_silence_them(tmp_path: Path) -> None:
    ranks = 9
    made = [trace(rank, world_size=ranks, steps=30, compute_ms=slow) for rank in range(ranks)]
    made[5]["traceEvents"] = [event for event in made[5]["traceEvents"] if "ProfilerStep" not in event["name"]]
    for rank in (0, 1, 2, 3, 5):
        write(tmp_path, made[rank], f"host_{rank}")
    cut = gzip.compress(json.dumps(made[4]).encode())
    (tmp_path / "host_4_rank4.pt.trace.json.gz").write_bytes(cut[: len(cut) // 5])
    (tmp_path / "host_6_rank6.pt.trace.json").write_bytes(b"")
    (tmp_path / "host_7_rank7.pt.trace.json").write_text('{"traceEvents": []}')
    blob = json.dumps(made[8]).encode()
    damaged = blob[: len(blob) // 5] + b"\0" + blob[len(blob) // 5 + 1 :]
    (tmp_path / "host_8_rank8.pt.trace.json").write_bytes(damaged)
    diagnosis = diagnose_files([tmp_path])
    (found,) = (finding for finding in diagnosis.fired if finding.kind == "straggler")
    assert (found.ranks, found.cause) == ((3,), "compute")
    assert found.evidence["excess_ms"] == pytest.approx(6.0, rel=0.1)
    told = " ".join(finding.summary for finding in diagnosis.not_judged)
    assert "no ProfilerStep# marks on rank 5" in told
    assert "ranks 4 and 8 lack most steps" in told
    assert "no trace of ranks 6 and 7" in told


def test_traces_without_marks_are_one_step_each(tmp_path: Path) -> None:
    for rank in range(4):
        made = trace(rank, world_size=4, steps=20, compute_ms=lambda rank, step: 5.0)
        made["traceEvents"] = [event for event in made["traceEvents"] if "ProfilerStep" not in event["name"]]
        write(tmp_path, made, f"host_{rank}")
    diagnosis = diagnose_files([tmp_path])
    (found,) = diagnosis.advised
    assert found.kind == "exposed_communication"
    assert found.evidence["step_ms"] == pytest.approx(20 * (5.0 + TRANSFER_MS), rel=0.05)
    assert "no ProfilerStep# marks on ranks 0-3" in diagnosis.not_judged[0].summary


def test_one_readable_trace_among_empty_and_damaged_ones_needs_no_rank(tmp_path: Path) -> None:
    made = trace(0, steps=20)
    del made["distributedInfo"]
    write(tmp_path, made, "trace")
    (tmp_path / "empty.pt.trace.json").write_bytes(b"")
    (tmp_path / "cut.pt.trace.json").write_text('{"traceEvents": [')
    diagnosis = diagnose_files([tmp_path])
    assert [(row["rank"], row["steps"]) for row in diagnosis.run["trace"]["ranks"]] == [(0, 20)]
    assert {problem["path"] for problem in diagnosis.run["file_problems"]} == {
        "empty.pt.trace.json", "cut.pt.trace.json",
    }  # fmt: skip


def test_the_rank_may_be_in_the_folders_name_or_be_missing_in_a_single_file(tmp_path: Path) -> None:
    for rank in (0, 1):
        made = trace(rank, world_size=2, steps=20)
        del made["distributedInfo"]
        write(tmp_path / "several" / f"rank_{rank}", made, "trace")
    write(tmp_path / "one", made, "rank")
    assert [row["rank"] for row in diagnose_files([tmp_path / "several"]).run["trace"]["ranks"]] == [0, 1]
    assert [row["rank"] for row in diagnose_files([tmp_path / "one"]).run["trace"]["ranks"]] == [0]


def test_times_that_are_written_as_text_are_read(tmp_path: Path) -> None:
    numbers, texts = (trace(0, steps=5) for _ in range(2))
    for event in texts["traceEvents"]:
        event["ts"] = f"{event['ts']:.3f}"
    for name, made in (("numbers", numbers), ("texts", texts)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, made, "rank0")
    rows = [diagnose_files([tmp_path / name]).run["trace"]["ranks"] for name in ("numbers", "texts")]
    assert rows[0] == rows[1]


def test_a_trace_that_is_cut_gives_what_came_before(tmp_path: Path) -> None:
    blob = json.dumps(trace(0, steps=30)).encode()
    (tmp_path / "rank0.pt.trace.json.gz").write_bytes(gzip.compress(blob[: len(blob) // 2]))
    diagnosis = diagnose_files([tmp_path])
    assert 10 <= diagnosis.run["steps"] <= 20
    assert "read up to there" in diagnosis.run["file_problems"][0]["problem"]


ACTIVE = 24
SLOW_MS = 150.0


def profiled(rank: int, world_size: int, folder: Path, slow_rank: int) -> tuple[float, float]:
    """A real profiled loop; milliseconds a step in our own clock: all of it, and inside the all-reduce's call."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

    weight = torch.randn(200, 200)
    bucket = torch.ones(1 << 16)
    begins, waited = [], []
    handler = tensorboard_trace_handler(str(folder), worker_name=f"worker{rank}")
    plan = schedule(wait=0, warmup=2, active=ACTIVE)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=handler) as profiler:
        for step in range(ACTIVE + 2):
            begins.append(time.perf_counter())
            weight @ weight
            if rank == slow_rank:
                time.sleep(SLOW_MS / 1e3)  # not in an operator: the host is slow, on however crowded a machine
            before = time.perf_counter()
            dist.all_reduce(bucket)
            waited.append(time.perf_counter() - before)
            if step < ACTIVE + 1:
                profiler.step()
        begins.append(time.perf_counter())
    whole = np.diff(begins)  # as the profiler's steps: from one begin to the next
    return 1e3 * float(np.mean(whole[2:])), 1e3 * float(np.mean(waited[2:]))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[float, float]]]:
    folder = tmp_path_factory.mktemp("profiled")
    return folder, run_ranks(profiled, world_size=2, args=(folder, 1))


def test_real_gloo_traces(real: tuple[Path, list[tuple[float, float]]]) -> None:
    """The trace's exposed communication is what the loop itself measured around its all-reduce."""
    folder, measured = real
    diagnosis = diagnose_files([folder])
    rows = {row["rank"]: row for row in diagnosis.run["trace"]["ranks"]}
    assert diagnosis.run["devices"] == ["cpu"]
    assert diagnosis.run["file_problems"] == []
    for rank, (step_ms, waited_ms) in enumerate(measured):
        assert rows[rank]["steps"] == ACTIVE
        assert rows[rank]["step_ms"] == pytest.approx(step_ms, rel=0.1)
        # The backend's span begins when its thread has the call, and ends before the caller wakes up.
        assert 0 < rows[rank]["exposed_ms"] <= 1.02 * waited_ms
    assert rows[0]["exposed_ms"] == pytest.approx(measured[0][1], rel=0.1)
    assert rows[1]["idle_ms"] >= SLOW_MS
    waited_more = measured[0][1] - measured[1][1]
    assert rows[0]["exposed_ms"] - rows[1]["exposed_ms"] == pytest.approx(waited_more, rel=0.25)
    assert waited_more > SLOW_MS / 2


def test_the_slow_rank_of_a_real_run_is_named(real: tuple[Path, list[tuple[float, float]]]) -> None:
    found = [finding for finding in diagnose_files([real[0]]).fired if finding.kind == "straggler"]
    assert [finding.cause for finding in found if finding.ranks == (1,)] == ["compute"]


INTERVALS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 12)), max_size=15)


def length(spans: Spans) -> float:
    return float(np.sum(spans[1] - spans[0]))


@given(first=INTERVALS, second=INTERVALS)
def test_intervals_against_counting(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    def spans(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        begin = np.array([float(at) for at, _ in pairs])
        return union(begin, begin + np.array([float(size) for _, size in pairs]))

    def counted(pairs: list[tuple[int, int]]) -> set[int]:
        return {i for at, size in pairs for i in range(at, at + size)}

    a, b = spans(first), spans(second)
    assert length(a) == len(counted(first))
    assert length(intersection(a, b)) == len(counted(first) & counted(second))
    edges = np.array([0.0, 5.0, 17.0, 70.0])
    windows = [len(counted(first) & set(range(lo, hi))) for lo, hi in ((0, 5), (5, 17), (17, 70))]
    assert overlap(a, edges[:-1], edges[1:]).tolist() == windows
