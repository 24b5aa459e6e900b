"""Execution traces as PyTorch's observer writes them: with NCCL's numbers, and gloo's calls that have none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from analyzers.evidence.diagnose_files import diagnose_files
from store.readers.formats import format_of
from store.readers.traces.execution_trace import read_execution_trace
from tests.sentences import assert_plain

RANKS = 4
Call = tuple[str, int]


def node(number: int, name: str, values: list[Any], shapes: list[Any], types: list[str]) -> dict[str, Any]:
    return {
        "id": number, "name": name, "ctrl_deps": 1,
        "inputs": {"values": values, "shapes": shapes, "types": types, "strides": [[] for _ in shapes]},
        "outputs": {"values": [], "shapes": [], "types": [], "strides": []},
        "attrs": [{"name": "rf_id", "type": "uint64", "value": number}],
    }  # fmt: skip


def trace(rank: int, calls: list[Call], *, backend: str = "nccl", first: int = 1) -> str:
    groups = [{"pg_name": "0", "pg_desc": "default_pg", "backend_config": backend, "ranks": [], "group_size": RANKS}]
    nodes = [node(3, "## process_group:init ##", [json.dumps(groups)], [[]], ["String"])]
    for place, (op, size) in enumerate(calls):
        tensor, shape, kind = [[9, 8, 0, size, 4, "cuda:0"]], [[size]], "GenericList[Tensor(float)]"
        if backend == "gloo":
            nodes.append(node(4 + place, f"gloo:{op}", tensor, [[size]], ["Tensor(float)"]))
            continue
        values = [tensor, [first + place, False], ["0", "default_pg"], rank, op, [], [], 0, 1, RANKS]
        shapes = [shape, [[], []], [[], []], [], [], [], [], [], [], []]
        types = [kind, "Tuple[Int,Bool]", "Tuple[String,String]", "Int", "String", "L", "L", "Int", "Int", "Int"]
        nodes.append(node(4 + place, "record_param_comms", values, shapes, types))
    top = {
        "schema": "1.1.1-chakra.0.0.4",
        "pid": 70,
        "time": "2026-03-01",
        "start_ts": 1,
        "nodes": nodes,
        "finish_ts": 2,
    }
    return json.dumps(top, indent=2)


def write(folder: Path, calls: dict[int, list[Call]], **how: Any) -> None:
    for rank, own in calls.items():
        (folder / f"et_rank{rank}.json").write_text(trace(rank, own, **how))


STEPS: list[Call] = [("allreduce", 64), ("_allgather_base", 8)] * 5


def test_another_operation_at_the_same_number_is_proven(tmp_path: Path) -> None:
    write(tmp_path, dict.fromkeys(range(RANKS), STEPS) | {2: [*STEPS[:5], ("reduce", 64), *STEPS[6:]]})
    diagnosis = diagnose_files([tmp_path])
    first = diagnosis.fired[0]
    assert (first.status, first.ranks, first.cause) == ("fired", (2,), "mismatch_operation")
    assert first.evidence["seq"] == 6
    assert_plain(first.summary)
    assert diagnosis.run["files_read"] == {"execution trace": RANKS}


def test_another_size_is_a_mismatch_of_sizes(tmp_path: Path) -> None:
    write(tmp_path, dict.fromkeys(range(RANKS), STEPS) | {1: [*STEPS[:4], ("allreduce", 63), *STEPS[5:]]})
    first = diagnose_files([tmp_path]).fired[0]
    assert (first.ranks, first.cause) == ((1,), "mismatch_size")


def test_both_sides_are_told_in_elements_and_bytes(tmp_path: Path) -> None:
    write(tmp_path, dict.fromkeys(range(RANKS), STEPS) | {1: [*STEPS[:4], ("allreduce", 63), *STEPS[5:]]})
    first = diagnose_files([tmp_path]).fired[0]
    assert "of 64 elements (256 bytes) on ranks 0, 2 and 3 against all_reduce of 63 elements" in first.summary
    assert first.evidence["silent_s"] is None


def test_two_names_of_one_operation_fit(tmp_path: Path) -> None:
    write(tmp_path, {0: STEPS, 1: [(op.replace("_allgather_base", "allgather"), size) for op, size in STEPS]})
    assert diagnose_files([tmp_path]).fired == ()


def test_windows_of_different_length_fit(tmp_path: Path) -> None:
    write(tmp_path, {0: STEPS, 1: STEPS[:3]})
    (tmp_path / "et_rank2.json").write_text(trace(2, STEPS[4:], first=5))
    diagnosis = diagnose_files([tmp_path])
    assert diagnosis.fired == ()
    assert any("have no times" in finding.summary for finding in diagnosis.findings)


def test_counted_calls_are_a_suspicion(tmp_path: Path) -> None:
    write(tmp_path, dict.fromkeys(range(RANKS), STEPS) | {3: [*STEPS[:5], ("reduce", 64)]}, backend="gloo")
    first = diagnose_files([tmp_path]).fired[0]
    assert (first.status, first.ranks) == ("suspect", (3,))


def test_half_a_file_is_read_up_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "et_rank0.json"
    text = trace(0, STEPS)
    path.write_text(text[: int(len(text) * 0.7)])
    assert format_of(path) == "execution_trace"
    read = read_execution_trace(path)
    assert read.problem
    assert 4 <= len(read.calls["0"]) < len(STEPS)
