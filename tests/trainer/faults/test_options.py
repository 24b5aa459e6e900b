"""Faults: how they are asked for, and that each happens once, where and when it was asked for."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from rankscope.cli import app
from tests.trainer.training_runs import run_loop, small, with_steps
from trainer.faults.injectors import data, process, slow_compute
from trainer.faults.options import KINDS, Fault, FaultError, parse_fault


def test_faults_are_parsed_with_their_options() -> None:
    fault = parse_fault(" slow_compute@step=60, rank=3 ,factor=1.5,until=80")
    assert fault == Fault(
        kind="slow_compute",
        step=60,
        rank=3,
        factor=1.5,
        until=80,
        text="slow_compute@step=60, rank=3 ,factor=1.5,until=80",
    )
    assert fault.parameters() == {"step": 60, "rank": 3, "factor": 1.5, "until": 80}
    assert parse_fault("nan_grad@step=4,rank=0,parameter=head.weight").parameter == "head.weight"
    assert parse_fault("bad_batch@step=33").batch_index == 32
    assert parse_fault("bad_batch@batch=33,rank=1").batch_index == 33


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_takes_a_step_and_a_rank(kind: str) -> None:
    assert parse_fault(f"{kind}@step=1,rank=0").kind == kind


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["unknown kind ''", "rankscope drill --list"]),
        ("explode@step=1,rank=0", ["unknown kind 'explode'", "rankscope drill --list"]),
        ("kill", ["step=N is missing"]),
        ("kill@step=3", ["rank=R is missing"]),
        ("kill@rank=3", ["step=N is missing"]),
        ("kill@step=3,rank=1,factor=2", ["'factor=2' is not for kill", "step, rank"]),
        ("kill@step,rank=1", ["'step' is not for kill"]),
        ("kill@step=three,rank=1", ["step = 'three'", "whole number from 1"]),
        ("kill@step=0,rank=1", ["step = '0'", "whole number from 1"]),
        ("kill@step=1,rank=-1", ["rank = '-1'", "whole number from 0"]),
        ("kill@step=1,step=2,rank=0", ["step is given twice"]),
        ("slow_compute@step=1,rank=0,factor=0.5", ["factor = '0.5'", "above 1"]),
        ("slow_compute@step=1,rank=0,factor=nan", ["factor = 'nan'"]),
        ("slow_data@step=1,rank=0,seconds=-1", ["seconds = '-1'", "above 0"]),
    ],
)
def test_mistakes_are_one_line_with_what_is_allowed(text: str, words: list[str]) -> None:
    with pytest.raises(FaultError) as caught:
        parse_fault(text)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"--fault {text}")
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("text", "words"),
    [("kill@step=1,rank=7", "ranks 0 to 0"), ("nan_grad@step=1,rank=0,parameter=blocks.9.x", "'blocks.9.x'")],
)
def test_a_fault_without_its_target_is_refused(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(FaultError, match=words):
        run_loop(with_steps(small(), 2), tmp_path, rank=0, world_size=1, faults=[text])


def injected(folder: Path, attempt: int = 0) -> list[tuple[int, str]]:
    events, _, _ = read_events(RunDir(folder).rank_dir(attempt, 0) / "events.jsonl")
    return [(event["step"], event["fault"]) for event in events if event["kind"] == "fault_injected"]


def test_a_fault_fires_once_though_its_step_is_replayed(tmp_path: Path) -> None:
    faults = ["nan_grad@step=6,rank=0", "nan_grad@step=10,rank=0", "slow_data@step=9,rank=0,seconds=0.001"]
    result = run_loop(with_steps(small(), 12), tmp_path, rank=0, world_size=1, faults=faults)
    assert injected(tmp_path) == [(6, "nan_grad"), (9, "slow_data"), (10, "nan_grad")]
    assert result.skipped == [], "no batch was to blame"


def test_a_fault_does_not_fire_again_in_the_next_attempt(tmp_path: Path) -> None:
    faults = ["exception@step=6,rank=0"]
    with pytest.raises(RuntimeError, match="injected fault: exception at step 6 on rank 0"):
        run_loop(with_steps(small(), 12), tmp_path, rank=0, world_size=1, faults=faults)
    again = run_loop(with_steps(small(), 12), tmp_path, rank=0, world_size=1, faults=faults, attempt=1)
    assert again.outcome == "finished"
    assert (injected(tmp_path), injected(tmp_path, 1)) == ([(6, "exception")], [])


def test_a_bad_batch_is_bad_whenever_it_is_met(tmp_path: Path) -> None:
    faults = ["bad_batch@batch=3"]
    one = run_loop(with_steps(small(), 5), tmp_path / "one", rank=0, world_size=1, faults=faults)
    two = run_loop(with_steps(small(), 5), tmp_path / "two", rank=0, world_size=1, faults=faults)
    clean = run_loop(with_steps(small(), 5), tmp_path / "clean", rank=0, world_size=1)
    assert one.losses == two.losses, "the same noise each time"
    assert one.losses[4] != clean.losses[4]
    assert [one.losses[step] for step in (1, 2, 3)] == [clean.losses[step] for step in (1, 2, 3)]


@pytest.mark.parametrize(("kind", "expected"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_signals_go_to_the_process_itself(
    kind: str, expected: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    run_loop(with_steps(small(), 4), tmp_path, rank=0, world_size=1, faults=[f"{kind}@step=3,rank=0"])
    assert sent == [(os.getpid(), expected)]
    assert injected(tmp_path) == [(3, kind)], "told before it acted"


def test_a_hang_begins_after_the_forward_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hung(Exception):
        pass

    def hang() -> Any:
        raise Hung

    monkeypatch.setattr(process, "_sleep_for_ever", hang)
    with pytest.raises(Hung):
        run_loop(with_steps(small(), 4), tmp_path, rank=0, world_size=1, faults=["hang@step=3,rank=0"])
    assert injected(tmp_path) == [(3, "hang")]


def test_slow_faults_end_when_they_should(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s: list[float] = []
    monkeypatch.setattr(data, "time", SimpleNamespace(sleep=slept_s.append, monotonic_ns=time.monotonic_ns))
    faults = ["slow_data@step=3,rank=0,seconds=0.05,until=4"]
    run_loop(with_steps(small(), 6), tmp_path, rank=0, world_size=1, faults=faults)
    assert injected(tmp_path) == [(3, "slow_data")]
    assert slept_s == [0.05, 0.05], "in steps 3 and 4"


def test_slow_compute_makes_forward_and_backward_slower(tmp_path: Path) -> None:
    """Fast and slow stretches in turn, so that the machine's other work falls on both alike."""
    windows = range(6, 60, 10)
    faults = [f"slow_compute@step={step},rank=0,factor=3,until={step + 4}" for step in windows]
    run_loop(with_steps(small(), 60), tmp_path, rank=0, world_size=1, faults=faults)
    for column in ("forward_ns", "backward_ns"):
        values = step_column(tmp_path, column)
        # The fastest of each kind: what other processes add is never below zero.
        fast = min(value for number, value in enumerate(values) if number // 5 % 2 == 0)
        slow = min(value for number, value in enumerate(values) if number // 5 % 2 == 1)
        assert slow / fast > 2.0, column


def test_slow_compute_adds_to_own_work_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of our own: not for waits, and not for what the block before has added."""
    clock = SimpleNamespace(now_ns=0)
    monkeypatch.setattr(slow_compute.time, "monotonic_ns", lambda: clock.now_ns)
    recorder = SimpleNamespace(wait_ns=0)
    drag = slow_compute._Drag(torch.device("cpu"), 0.5, recorder)  # type: ignore[arg-type]
    asked: list[float] = []

    def compute_for(ns: float) -> None:
        asked.append(ns)
        clock.now_ns += int(ns)
        drag.added += ns

    monkeypatch.setattr(drag, "compute_for", compute_for)
    later, earlier = slow_compute._Work(drag), slow_compute._Work(drag)
    later.start()
    clock.now_ns += 1000
    recorder.wait_ns += 400
    earlier.start()  # autograd tells the block before that its turn has come, before the later one is done
    later.end()
    assert asked == [300], "half of 1000 less 400"
    clock.now_ns += 200
    earlier.end()
    assert asked == [300, 100], "half of 200: the 300 between were not its own"


def step_column(folder: Path, column: str) -> list[int]:
    from probes.tape.format.reader import read_segment, segment_paths

    paths = segment_paths(RunDir(folder).rank_dir(0, 0), "steps")
    return [int(value) for path in paths for value in read_segment(path).records[column]]


def test_the_command_that_the_help_names_lists_every_kind() -> None:
    helped = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "300", "TERM": "dumb"})
    assert "`drill --list`" in helped.output
    listed = CliRunner().invoke(app, ["drill", "--list"], env={"COLUMNS": "300", "TERM": "dumb"})
    assert [kind for kind in KINDS if kind not in listed.output] == []
