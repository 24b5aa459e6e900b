"""Captures of torch's profiler: when they begin, what the trace holds, what the budget removes; real traces."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from analyzers.run.policy import StallPolicy
from probes.profiling.attach import profile_steps
from probes.profiling.request import CaptureRequest, write_request
from probes.profiling.step_profiler import StepProfiler, TraceFiles
from probes.settings.section import read_config
from probes.settings.sections import ProfilerSettings
from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from probes.tape_recorder import TapeRecorder
from store.readers.traces.kineto import read_trace
from tests.probes.recorded_world import rows


class Rank:
    """A rank that computes steps, with a clock for the polls of requests that a test moves."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.run, _ = RunDir.adopt(folder / "run")
        self.run.node_dir(0).mkdir(parents=True)
        self.recorder = TapeRecorder(self.run.rank_dir(0, 3), rank=3, attempt=0, world_size=4)
        profile_steps(self.run, self.recorder, {"profiler": config}, node_rank=0)
        self.weight = torch.randn(8, 8, requires_grad=True)

    def train(self, *steps: int) -> None:
        for number in steps:
            with self.recorder.step(number):
                with self.recorder.span("forward"):
                    loss = (self.weight @ self.weight).sum()
                with self.recorder.span("backward"):
                    loss.backward()

    def captured(self) -> list[dict[str, Any]]:
        """Events of the captures, once all are written."""
        assert self.recorder.profiling is not None
        self.recorder.profiling.close()
        events = read_events(self.run.rank_dir(0, 3) / "events.jsonl")[0]
        return [event for event in events if event["kind"] == "profile_captured"]


@pytest.fixture(autouse=True)
def _loud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKSCOPE_FAIL_LOUD", "1")


def test_steps_of_the_schedule_are_in_a_trace_with_their_numbers_and_phases(tmp_path: Path) -> None:
    rank = Rank(tmp_path, {"interval": 10, "active_steps": 2, "ranks": [3]})
    rank.train(8, 9, 10, 11, 12)
    (capture,) = rank.captured()
    assert (capture["first_step"], capture["last_step"], capture["request"]) == (10, 11, None)
    path = rank.run.path / capture["path"]
    assert path.stat().st_size == capture["bytes"]
    trace = read_trace(path)
    assert (trace.rank, trace.marked, trace.steps.tolist()) == (3, True, [10, 11])
    text = gzip.decompress(path.read_bytes()).decode()
    assert "rankscope.forward" in text
    assert "rankscope.backward" in text
    assert "aten::mm" in text
    assert rank.recorder.ranges is None, "ranges end with the capture"


def test_steps_repeated_after_a_rollback_keep_both_traces(tmp_path: Path) -> None:
    rank = Rank(tmp_path, {"interval": 10, "active_steps": 1, "ranks": [3]})
    rank.train(10)
    before = rank.captured()
    rank.train(9, 10)
    first, again = rank.captured()
    assert [first] == before
    assert first["path"] != again["path"]
    sizes = [(rank.run.path / one["path"]).stat().st_size for one in (first, again)]
    assert sizes == [first["bytes"], again["bytes"]]


def test_begin_and_end_of_a_capture_are_spans_that_have_a_limit_of_silence_of_their_own(tmp_path: Path) -> None:
    rank = Rank(tmp_path, {"interval": 2, "active_steps": 1, "ranks": []})
    rank.train(1, 2, 3)
    rank.captured()
    spans = [row["kind"] for row in rows(rank.run.rank_dir(0, 3), "spans")]
    assert spans.count("profile") == 2
    assert StallPolicy().of_phase("profile") > 10 * StallPolicy().floor_s


def test_a_training_is_the_same_to_the_last_bit_with_captures(tmp_path: Path) -> None:
    trained = []
    for config in ({"on_request": False}, {"interval": 1, "ranks": [], "record_shapes": True, "with_stack": True}):
        torch.manual_seed(7)
        rank = Rank(tmp_path / str(len(trained)), config)
        optimizer = torch.optim.AdamW([rank.weight], lr=0.1)
        for number in (1, 2, 3, 4):
            rank.train(number)
            optimizer.step()
            torch.nn.functional.dropout(rank.weight)  # the generator's state is the same, too
        trained.append((rank.weight.detach(), torch.get_rng_state()))
        if rank.recorder.profiling is not None:
            assert rank.captured()
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


def test_a_capture_that_takes_long_ends_with_its_step(tmp_path: Path) -> None:
    rank, now_s = Rank(tmp_path, {}), 0.0
    settings = read_config(ProfilerSettings, {"profiler": {"interval": 1, "active_steps": 50, "ranks": [3]}})
    rank.recorder.profiling = StepProfiler(rank.run, rank.recorder, settings, node_rank=0, clock_s=lambda: now_s)
    rank.train(1)
    now_s = 31.0
    rank.train(2)
    (capture,) = rank.captured()
    assert (capture["first_step"], capture["last_step"]) == (1, 2)


def test_a_rank_that_is_not_named_is_not_profiled(tmp_path: Path) -> None:
    rank = Rank(tmp_path, {"interval": 1, "ranks": [0, 1]})
    rank.train(1, 2, 3)
    assert rank.captured() == []
    assert not (rank.run.path / "traces").exists()


def _request(**changed: Any) -> CaptureRequest:
    values: dict[str, Any] = {
        "number": 7, "attempt": 0, "ranks": (3, 1), "first_step": 5, "num_steps": 2, "reason": "Rank 3 is slow.",
    }  # fmt: skip
    return CaptureRequest(**values | changed)


def test_a_request_is_followed_from_its_first_step_and_once(tmp_path: Path) -> None:
    rank = Rank(tmp_path, {})
    assert write_request(rank.run, 0, _request())
    rank.train(3, 4, 5, 6, 7, 8)
    (capture,) = rank.captured()
    assert (capture["first_step"], capture["last_step"]) == (5, 6)
    assert (capture["request"], capture["reason"]) == (7, "Rank 3 is slow.")


def test_the_schedule_gives_way_to_a_request_so_that_suspect_and_peer_profile_the_same_steps(tmp_path: Path) -> None:
    rank = Rank(tmp_path, {"interval": 5, "active_steps": 3, "ranks": [3]})
    assert write_request(rank.run, 0, _request(first_step=11))
    rank.train(9, 10, 11, 12)
    (requested,) = rank.captured()
    assert (requested["first_step"], requested["last_step"], requested["request"]) == (11, 12, 7)
    rank.train(13, 14, 15, 16, 17)
    _, scheduled = rank.captured()
    assert (scheduled["first_step"], scheduled["request"]) == (15, None)


@pytest.mark.parametrize("changed", [{"attempt": 1}, {"ranks": (0, 1)}])
def test_a_request_for_others_is_left_alone(tmp_path: Path, changed: dict[str, Any]) -> None:
    rank = Rank(tmp_path, {})
    write_request(rank.run, 0, _request(**changed))
    rank.train(5, 6, 7)
    assert rank.captured() == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"number": 1}', '{"number": 1e999}', '{"ranks": "all"}'])
def test_a_damaged_request_is_left_alone(tmp_path: Path, text: str) -> None:
    rank = Rank(tmp_path, {})
    (rank.run.node_dir(0) / "capture-request.json").write_text(text)
    rank.train(5, 6)
    assert rank.captured() == []


def test_requests_are_polled_once_a_second(tmp_path: Path) -> None:
    rank, now_s = Rank(tmp_path, {"on_request": False}), 100.0
    assert rank.recorder.profiling is None, "nothing is called where all is off"
    settings = read_config(ProfilerSettings, {})
    rank.recorder.profiling = StepProfiler(rank.run, rank.recorder, settings, node_rank=0, clock_s=lambda: now_s)
    rank.train(1)
    write_request(rank.run, 0, _request(first_step=0, num_steps=1))
    now_s = 100.9
    rank.train(2)
    now_s = 101.0
    rank.train(3)
    assert [capture["first_step"] for capture in rank.captured()] == [3]


def test_traces_beyond_the_budget_are_removed_those_of_the_schedule_first(tmp_path: Path) -> None:
    run, _ = RunDir.adopt(tmp_path / "run")
    files = TraceFiles(run, attempt=0, rank=3, budget_bytes=250)
    other = TraceFiles(run, attempt=0, rank=1, budget_bytes=0)
    requested, others = files.new_path(1, 2, requested=True), other.new_path(1, 1, requested=False)
    scheduled = [files.new_path(step, step, requested=False) for step in (10, 20)]
    for path in (requested, *scheduled, others):
        path.write_bytes(bytes(100))
    assert files.prune() == ["traces/attempt-0/rank-00003-steps-10-10-scheduled.pt.trace.json.gz"]
    assert [path.exists() for path in (requested, *scheduled)] == [True, False, True]
    assert others.exists(), "another rank's are its own to remove"


def test_a_trace_larger_than_the_budget_is_removed_and_reported(tmp_path: Path) -> None:
    rank = Rank(tmp_path, {"interval": 2, "active_steps": 1, "ranks": [], "budget_mb": 0.0001})
    rank.train(2, 3)
    (capture,) = rank.captured()
    assert capture["path"] is None
    assert len(capture["removed"]) == 1
    assert not list((rank.run.path / "traces").glob("*/*.gz"))


def test_ranges_are_open_in_every_step_where_they_are_asked_for(tmp_path: Path) -> None:
    rank = Rank(tmp_path, {"ranges": True})
    with torch.autograd.profiler.profile(use_kineto=True) as profiled:  # the user's own
        rank.train(1)
    names = [event.name for event in profiled.function_events]
    assert names.count("rankscope.forward") == names.count("rankscope.backward") == 1
    rank.captured()


def test_a_profiler_of_the_users_own_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKSCOPE_FAIL_LOUD", "0")
    rank = Rank(tmp_path, {"interval": 1, "ranks": []})
    with torch.autograd.profiler.profile(use_kineto=True) as profiled:
        rank.train(1, 2)
    assert any(event.name == "aten::mm" for event in profiled.function_events)
    assert rank.captured() == []


def test_settings_of_any_type_are_read_or_left_at_their_defaults() -> None:
    odd = {"interval": "often", "ranks": ["a"], "budget_mb": -1, "ranges": 1, "active_steps": True}
    assert (
        read_config(ProfilerSettings, {"profiler": odd})
        == read_config(ProfilerSettings, {"profiler": 3})
        == ProfilerSettings()
    )
    given = read_config(ProfilerSettings, {"profiler": {"interval": 5, "ranks": [2], "budget_mb": 3}})
    assert (given.interval, given.ranks, given.budget_mb) == (5, (2,), 3.0)


def test_the_capture_is_not_imported_before_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = ("probes.profiling.trace", "probes.profiling.ranges")
    for name in modules:
        monkeypatch.delitem(sys.modules, name, raising=False)
    rank = Rank(tmp_path, {"interval": 100})
    rank.train(1, 2)
    assert not [name for name in modules if name in sys.modules]
