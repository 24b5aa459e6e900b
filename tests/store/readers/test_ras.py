"""NCCL's RAS as JSON, in the shape that `src/ras/client_support.cc` writes: who is behind, who did not answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analyzers.evidence.diagnose_files import diagnose_files
from store.readers.formats import format_of
from store.readers.ras import read_ras


def about(rank: int, number: int | None = None) -> dict[str, Any]:
    return {
        "rank": rank if number is None else number, "host": f"10.0.0.{rank // 4}", "pid": 900 + rank,
        "cuda_dev": rank % 4, "nvml_dev": rank % 4,
    }  # fmt: skip


def ras_answer(
    communicators: Mapping[str, Mapping[int, int]], missing: Sequence[int] = (), errors: Mapping[int, int] | None = None
) -> str:
    """`communicators`: operations launched by job rank. Ranks are numbered from 0 in each, as NCCL does."""
    found = []
    for name, counts in communicators.items():
        order = sorted([*counts, *(missing if not found else ())])
        ranks = [
            about(rank, order.index(rank))
            | {
                "status": {
                    "init_state": 0, "async_error": (errors or {}).get(rank, 0), "finalize_called": False,
                    "destroy_flag": False, "abort_flag": False,
                },
                "collective_counts": {"Broadcast": 1, "Reduce": 0, "AllGather": 0, "ReduceScatter": 0, "AllReduce": n},
            }
            for rank, n in counts.items()
        ]  # fmt: skip
        silent = [
            about(rank, order.index(rank)) | {"status": {"unresponsive": True, "considered_dead": False}}
            for rank in (missing if not found else ())
        ]
        found.append({
            "hash": name, "secondary_hash": "0x1:0x2", "size": len(order), "ranks_count": len(ranks),
            "missing_ranks_count": len(silent), "ranks": ranks, "missing_ranks": silent,
        })  # fmt: skip
    top = {
        "nccl_version": "2.28.3", "cuda_runtime_version": 13000, "cuda_driver_version": 13000,
        "timestamp": "2026-03-01 08:30:00", "communicators_count": len(found), "communicators": found,
        "ras": {"collection_time_sec": 0.2, "timeouts_count": len(missing)},
    }  # fmt: skip
    return json.dumps(top, indent=2)


def written(folder: Path, text: str) -> Path:
    path = folder / "answer"
    path.write_text(text)
    return path


def test_the_rank_behind_is_named_with_its_count(tmp_path: Path) -> None:
    path = written(tmp_path, ras_answer({"0xa": dict.fromkeys(range(8), 7) | {3: 6}}))
    assert format_of(path) == "ras"
    event = read_ras(path).events[0]
    assert (event.fields["ranks"], event.fields["launched"], event.fields["most_launched"]) == ("3", 7, 8)
    first = diagnose_files([path]).fired[0]
    assert (first.status, first.ranks, first.cause) == ("suspect", (3,), "not_entered")


def test_ranks_of_a_small_communicator_are_those_of_the_job(tmp_path: Path) -> None:
    answer = ras_answer({"0xa": dict.fromkeys(range(8), 7), "0xb": {4: 2, 5: 2, 6: 1, 7: 2}})
    first = diagnose_files([written(tmp_path, answer)]).fired[0]
    assert first.ranks == (6,)


def test_the_largest_communicator_counts(tmp_path: Path) -> None:
    answer = ras_answer({"0xa": dict.fromkeys(range(8), 7) | {3: 6}, "0xb": {4: 2, 5: 2, 6: 1, 7: 2}})
    assert diagnose_files([written(tmp_path, answer)]).fired[0].ranks == (3,)


def test_a_rank_that_does_not_answer_is_suspected(tmp_path: Path) -> None:
    first = diagnose_files([written(tmp_path, ras_answer({"0xa": dict.fromkeys(range(7), 7)}, missing=[7]))]).fired[0]
    assert (first.status, first.ranks) == ("suspect", (7,))
    assert "did not answer NCCL's RAS" in first.summary


def test_a_rank_that_answered_without_this_communicator_or_its_counts_is_not_accused(tmp_path: Path) -> None:
    left_out = ras_answer({"0xa": dict.fromkeys(range(7), 7)}, missing=[7]).replace(
        '"unresponsive": true', '"unresponsive": false'
    )
    uncounted = ras_answer({"0xa": dict.fromkeys(range(8), 7)}).replace(
        "collective_counts", "counts_of_another_version"
    )
    for answer in (left_out, uncounted):
        assert diagnose_files([written(tmp_path, answer)]).fired == ()


def test_a_healthy_answer_gives_no_finding(tmp_path: Path) -> None:
    assert diagnose_files([written(tmp_path, ras_answer({"0xa": dict.fromkeys(range(8), 7)}))]).fired == ()


def test_damaged_answers_are_reported_and_what_stands_is_read(tmp_path: Path) -> None:
    text = ras_answer({"0xa": dict.fromkeys(range(8), 7) | {3: 6}, "0xb": {0: 1, 1: 1}})
    log = read_ras(written(tmp_path, text[: int(len(text) * 0.9)]))
    assert log.problem
    assert log.events[0].fields["ranks"] == "3"
    strange = '{"nccl_version": 1, "cuda_driver_version": [], "communicators": [7, {"size": "x", "ranks": {"a": 1}}]}'
    assert read_ras(written(tmp_path, strange)).events == []
