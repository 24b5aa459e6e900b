"""Steps, spans and events of a rank, as they are read back from its tapes."""

from __future__ import annotations

import ctypes
import functools
import gc
import inspect
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from probes import step_clock, tape_recorder
from probes.device import memory as device_memory
from probes.device.memory import AllocatorRetries
from probes.fail_open import error_counts
from probes.recorder import NullRecorder, Recorder
from probes.step_clock import GAPS, PHASES
from probes.step_scalars import StepScalars
from probes.tape import event_kinds
from probes.tape.format.writer import COMPLETE, OPEN
from probes.tape_recorder import TapeRecorder
from tests.probes.recorded_world import rows


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TapeRecorder:
    monkeypatch.setenv("RANKSCOPE_FAIL_LOUD", "1")
    return TapeRecorder(tmp_path, rank=3, attempt=1, world_size=4)


class Clock:
    """Stands still until a test moves it."""

    now_ns = 10**9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    played = Clock()
    for module in (step_clock, tape_recorder):
        monkeypatch.setattr(module, "_monotonic_ns", lambda: played.now_ns)
    return played


def test_a_step_has_its_phases_and_its_values(recorder: TapeRecorder, tmp_path: Path) -> None:
    with recorder.step(7):
        with recorder.span("data"):
            pass
        with recorder.span("forward", microbatch=2, stage=1):
            recorder.wait_ns += 5
        recorder.log(loss=2.5, tokens=64)
    (step,) = rows(tmp_path, "steps")
    assert (step["step"], step["state"], step["loss"], step["tokens"]) == (7, COMPLETE, 2.5, 64)
    assert step["forward_wait_ns"] == step["collective_wait_ns"] == 5
    assert step["data_ns"] + step["forward_ns"] <= step["duration_ns"]
    assert step["backward_ns"] == 0  # measured: no backward
    assert step["grad_norm"] is None  # not measured
    assert step["memory_bytes"] > 1 << 20
    data, forward = rows(tmp_path, "spans")
    assert (forward["kind"], forward["microbatch"], forward["stage"], forward["wait_ns"]) == ("forward", 2, 1, 5)
    assert data["microbatch"] is None
    assert data["end_ns"] <= forward["start_ns"]


def test_the_phases_of_a_step_do_not_count_twice(recorder: TapeRecorder, tmp_path: Path, clock: Clock) -> None:
    with recorder.step(1), recorder.span("evaluate"), recorder.span("forward"), recorder.span("attention"):
        clock.now_ns += 5
    with recorder.step(2), recorder.span("weight"):
        clock.now_ns += 7
    first, second = rows(tmp_path, "steps")
    assert (first["evaluate_ns"], first["forward_ns"], second["backward_ns"]) == (5, 0, 7)
    assert [span["kind"] for span in rows(tmp_path, "spans")] == ["evaluate", "forward", "attention", "weight"]


def test_phases_and_gaps_add_up_to_the_step(recorder: TapeRecorder, tmp_path: Path, clock: Clock) -> None:
    with recorder.step(1):
        for microbatch in range(3):
            clock.now_ns += 1_000_000
            recorder.wait_ns += 7  # before each forward pass
            with recorder.span("forward", microbatch=microbatch), recorder.span("loss"):
                clock.now_ns += 4
            with recorder.span("log"):  # no phase
                clock.now_ns += 1_000_000
            with recorder.span("backward", microbatch=microbatch):
                clock.now_ns += 8
                recorder.wait_ns += 5
        clock.now_ns += 2_000_000
        with recorder.span("optimizer"):
            pass
        with recorder.span("evaluate"):
            pass
        clock.now_ns += 3_000_000
    (step,) = rows(tmp_path, "steps")
    assert sum(step[f"{name}_ns"] for name in (*PHASES, *GAPS)) == step["duration_ns"]
    assert [step[f"{gap}_ns"] for gap in GAPS] == [3_000_000, 3_000_000, 2_000_000, 3_000_000]
    assert (step["forward_ns"], step["backward_ns"], step["backward_wait_ns"]) == (12, 24, 15)
    assert step["before_forward_wait_ns"] == 21
    assert [step[f"{gap}_wait_ns"] for gap in GAPS[1:]] == [0, 0, 0]
    assert step["collective_wait_ns"] == 36


def test_gaps_of_a_step_without_phases_are_not_measured(recorder: TapeRecorder, tmp_path: Path) -> None:
    with recorder.step(1), recorder.span("log"):
        pass
    (step,) = rows(tmp_path, "steps")
    assert [step[f"{gap}{suffix}"] for gap in GAPS for suffix in ("_ns", "_wait_ns")] == [None] * 8


def test_phase_is_the_innermost_span(recorder: TapeRecorder) -> None:
    seen = []
    with recorder.span("backward"):
        seen.append(recorder.phase)
        with recorder.span("layer"):
            seen.append(recorder.phase)
        seen.append(recorder.phase)
    assert seen == [recorder.name("backward"), recorder.name("layer"), recorder.name("backward")]
    assert recorder.phase == 0


def test_what_was_going_on_when_a_step_failed_stays_open(recorder: TapeRecorder, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), recorder.step(1):
        raise ZeroDivisionError
    (step,) = rows(tmp_path, "steps")
    assert step["state"] == OPEN
    assert step["duration_ns"] is None


def test_values_that_come_later(recorder: TapeRecorder, tmp_path: Path) -> None:
    with recorder.step(1):
        recorder.defer()
    with recorder.step(2):
        pass
    assert [step["state"] for step in rows(tmp_path, "steps")] == [OPEN, COMPLETE]
    recorder.log_late(1, loss=float("nan"), grad_norm=3.0)
    first, _ = rows(tmp_path, "steps")
    assert first["state"] == COMPLETE
    assert first["loss"] != first["loss"]  # a NaN is a value, not a gap
    assert first["grad_norm"] == 3.0


def test_time_in_the_garbage_collector_is_counted(recorder: TapeRecorder, tmp_path: Path) -> None:
    with recorder.step(1):
        gc.collect()
    (step,) = rows(tmp_path, "steps")
    assert 0 < step["gc_ns"] <= step["duration_ns"]


def test_ctrl_c_while_garbage_is_collected_is_raised_after_it(recorder: TapeRecorder) -> None:
    class Garbage:
        __del__ = functools.partial(ctypes.CDLL(None).kill, os.getpid(), signal.SIGINT)  # no Python on its way

    def train() -> None:
        with recorder.step(1), recorder.span("forward"):
            garbage = Garbage()
            garbage.itself = garbage  # type: ignore[attr-defined]
            del garbage
            gc.collect()
            did.append("forward")
        did.append("step")

    did: list[str] = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    others, gc.callbacks[:] = gc.callbacks[:-1], gc.callbacks[-1:]  # recorders of earlier tests
    try:
        with pytest.raises(KeyboardInterrupt):
            train()
        assert did == ["forward"]
    finally:
        gc.callbacks[:] = [*others, *gc.callbacks]
        signal.signal(signal.SIGINT, before)


def test_an_unknown_value_is_counted_and_not_raised(tmp_path: Path) -> None:
    recorder = TapeRecorder(tmp_path, rank=0, attempt=0)
    before = error_counts["recorder.log"]
    with recorder.step(1):
        recorder.log(no_such_column=1.0)
    assert error_counts["recorder.log"] == before + 1
    assert rows(tmp_path, "steps")[0]["state"] == COMPLETE


@pytest.mark.parametrize(
    "value", [2**63, 2**61, -1, math.nan, math.inf, 1e300, 10**400, "many", None, [1], torch.tensor([1, 2])]
)
def test_a_value_that_no_column_takes_costs_itself_alone(tmp_path: Path, value: Any) -> None:
    recorder = TapeRecorder(tmp_path, rank=0, attempt=0)
    values = StepScalars(recorder)
    for step in (1, 2):
        with recorder.step(step):
            values.put(lr=0.5, tokens=value, loss=2.0, mine=1.0)
            values.put(tokens=value)
            values.put(mine=value if isinstance(value, (str, list)) else "text")
            recorder.log(batch_index=value)
            recorder.log(committed=True)
    recorder.close()
    for step in rows(tmp_path, "steps"):
        assert (step["state"], step["lr"], step["loss"], step["committed"]) == (COMPLETE, 0.5, 2.0, True)
        assert step["duration_ns"] > 0
        assert step["tokens"] is None
        assert step["batch_index"] is None
    assert [row["value"] for row in rows(tmp_path, "scalars")] == [1.0, 1.0]


def test_the_last_event_says_what_was_lost(recorder: TapeRecorder, tmp_path: Path) -> None:
    recorder.event(event_kinds.FAULT_INJECTED, fault="nan_grad")
    recorder.close()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events] == ["rank", "fault_injected", "rank_closed"]
    assert events[0]["world_size"] == 4
    assert events[-1]["dropped_records"] == {}
    with recorder.step(9):  # after the end: dropped, and no error
        pass


def test_retries_of_the_allocator_are_events(recorder: TapeRecorder, tmp_path: Path) -> None:
    counts = iter([0, 3, 3, 4])
    recorder._clock.allocator = AllocatorRetries(
        "cuda:0", lambda: {"num_alloc_retries": next(counts), "reserved_bytes.all.current": 7}
    )
    for step in range(1, 5):
        recorder._clock._memory_read_ns = -(1 << 62)  # it looks once a second
        with recorder.step(step):
            pass
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    found = [(line["step"], line["num_retries"]) for line in lines if line["kind"] == "allocation_retries"]
    assert found == [(2, 3), (4, 1)]
    AllocatorRetries("cpu").report(lambda kind, **detail: pytest.fail(kind))


def test_the_memory_of_a_rank_on_a_device_is_what_it_allocated_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "_reader", lambda device: lambda: {"allocated_bytes.all.current": 12_345})
    recorder = TapeRecorder(tmp_path, rank=0, attempt=0, world_size=1, device="cuda:0")
    with recorder.step(1):
        pass
    (step,) = rows(tmp_path, "steps")
    assert step["memory_bytes"] == 12_345


@pytest.mark.parametrize("kind", [NullRecorder, TapeRecorder])
def test_both_recorders_have_what_the_protocol_asks_for(kind: type[Recorder], tmp_path: Path) -> None:
    recorder = kind() if kind is NullRecorder else TapeRecorder(tmp_path, rank=0, attempt=0)
    assert all(hasattr(recorder, name) for name in Recorder.__annotations__)
    for name, wanted in inspect.getmembers(Recorder, inspect.isfunction):
        if not name.startswith("_"):
            found = inspect.signature(getattr(kind, name)).parameters
            assert [(p.name, p.kind) for p in found.values()] == [
                (p.name, p.kind) for p in inspect.signature(wanted).parameters.values()
            ]


def test_a_null_recorder_does_nothing(tmp_path: Path) -> None:
    recorder = NullRecorder()
    with recorder.step(4), recorder.span("forward", microbatch=1):
        recorder.log(loss=1.0)
    recorder.defer()
    recorder.log_late(4, loss=1.0)
    recorder.event(event_kinds.EVALUATION)
    recorder.user_event("anything")
    recorder.describe(tp=0)
    recorder.close()
    assert recorder.step_number == 4
    assert not recorder.enabled
    assert list(tmp_path.iterdir()) == []


def test_what_is_computed_in_a_replay_is_no_part_of_the_step(recorder: TapeRecorder, tmp_path: Path) -> None:
    with recorder.step(7):
        with recorder.span("replay"), recorder.span("forward"):
            recorder.wait_ns += 5
        with recorder.span("backward"):
            pass
    (step,) = rows(tmp_path, "steps")
    assert (step["forward_ns"], step["forward_wait_ns"]) == (0, 0)
    assert step["backward_ns"] > 0
    assert [span["kind"] for span in rows(tmp_path, "spans")] == ["replay", "forward", "backward"]
