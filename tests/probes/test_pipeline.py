"""Spans of a pipeline: each microbatch on each stage, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from probes.pipeline import record_schedule, record_stage
from probes.recorder import NullRecorder
from probes.tape_recorder import TapeRecorder
from tests.probes.recorded_world import recorded_world, rows
from tests.probes.small_models import batch, pipeline
from tests.processes import run_ranks


def _run(rank: int, world_size: int, folder: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    with recorded_world(rank, world_size, folder) as recorder:
        stage, schedule = pipeline(microbatches=4)
        record_schedule(recorder, schedule, [stage])
        for step in (1, 2):
            with recorder.step(step):
                schedule.step(*([batch(step)] if rank == 0 else []), target=batch(step, 1) if rank else None)
    return rows(recorder.directory, "spans"), rows(recorder.directory, "steps")


def test_spans_of_each_microbatch_and_stage(tmp_path: Path) -> None:
    for rank, (spans, steps) in enumerate(run_ranks(_run, world_size=2, args=(str(tmp_path),))):
        for step in (1, 2):
            mine = [span for span in spans if span["step"] == step]
            # Of two ranks the first sends activations and receives gradients, the second the reverse.
            kinds = ("forward", "backward", "send", "recv", *(("loss",) if rank == 1 else ()))
            assert sorted((span["kind"], span["microbatch"] or 0) for span in mine) == sorted(
                [*((kind, number) for kind in kinds for number in range(4)), ("reduce", 0)]
            )
            assert {span["stage"] for span in mine} == {rank}
            assert all(0 <= span["wait_ns"] <= span["end_ns"] - span["start_ns"] for span in mine)
        for step in steps:
            assert step["forward_ns"] > 0
            assert step["backward_ns"] > 0
            assert step["forward_ns"] + step["backward_ns"] <= step["duration_ns"]


def test_the_weight_gradient_is_a_separate_span(tmp_path: Path) -> None:
    class Stage:
        stage_index = 3

        def forward_one_chunk(self, fwd_chunk_id: int) -> str:
            return f"forward {fwd_chunk_id}"

        def backward_one_chunk(self, bwd_chunk_id: int) -> None: ...

        def backward_weight_one_chunk(self, bwd_chunk_id: int) -> None: ...

    recorder, stage = TapeRecorder(tmp_path, rank=0, attempt=0), Stage()
    record_stage(recorder, stage)
    assert stage.forward_one_chunk(fwd_chunk_id=5) == "forward 5"
    stage.backward_weight_one_chunk(6)
    assert [(span["kind"], span["microbatch"], span["stage"]) for span in rows(tmp_path, "spans")] == [
        ("forward", 5, 3),
        ("weight", 6, 3),
    ]


def test_a_disabled_recorder_leaves_the_stage_alone() -> None:
    class Stage:
        def forward_one_chunk(self) -> None: ...

    stage = Stage()
    record_stage(NullRecorder(), stage)
    assert vars(stage) == {}
