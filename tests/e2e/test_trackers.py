"""TensorBoard and Weights & Biases, written by `watch`'s side while a run trains, read back by their own libraries."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from probes.tape.attempts import process_is_alive
from probes.tape.events import EventWriter, read_events
from probes.tape.rundir import NODE_RANK, RunDir
from store import Store
from tests.e2e.launched import start
from tests.factories import make_run
from tests.local_forks import forking_subprocess
from tests.waiting import wait_for
from tests.wandb_file import alerts, history, summary, wandb_file, wandb_records
from watch.exporting.trackers import processes


def steps_in(folder: Path) -> list[int]:
    """Steps whose loss TensorBoard shows."""
    if not list(folder.glob("events.*")):
        return []
    read = EventAccumulator(str(folder)).Reload()
    return [event.step for event in read.Scalars("train/loss")] if "train/loss" in read.Tags()["scalars"] else []


def last_step_in(run: RunDir, name: str) -> int:
    """The newest step that a tracker's process has handed over."""
    try:
        return int(json.loads((run.path / "trackers" / f"{name}.json").read_text())["last_step"])
    except FileNotFoundError:
        return -1


@pytest.mark.timeout(900)
def test_both_trackers_are_written_while_the_run_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = ["train.steps=100000", "trackers.to=['tensorboard', 'wandb']", "trackers.every_s=0.3"]
    # Slow steps: what Weights & Biases has not written when the run ends, it has to write within its time.
    faults = ["nan_grad@step=12,rank=1", "slow_data@step=15,rank=0,seconds=0.2"]
    run = start(tmp_path, "two", faults=faults, settings=settings)
    folder = run.run.path / "tensorboard"
    wait_for(lambda: max(steps_in(folder), default=0) > 20, "steps in TensorBoard while it trains", run)
    # Its library is slow to import: one that is far behind when the run ends may not be done within its time.
    wait_for(lambda: last_step_in(run.run, "wandb") > 20, "steps in Weights & Biases while it trains", run)
    started = run.events("tracker_started")
    assert [event["tracker"] for event in started] == ["tensorboard", "wandb"]
    assert all(Path(f"/proc/{event['pid']}").exists() for event in started)
    run.process.terminate()
    run.finish(exit_code=143)
    # On a crowded machine the launcher kills the watch when the time after a signal is up; both write the end anyway.
    pids = [int(event["pid"]) for event in started]
    wait_for(lambda: not any(process_is_alive(pid) for pid in pids), "the end of both", deadline_s=400)
    assert run.events("tracker_failed") == [], (run.run.path / "logs" / "tracker-wandb.log").read_text()
    with Store.open(run.run) as store:
        executions = store.rows(
            "SELECT step FROM steps WHERE rank = 0 AND duration_ns IS NOT NULL ORDER BY attempt, start_ns"
        )
        ((fired,),) = store.rows("SELECT count(*) FROM findings WHERE finding_kind = 'non_finite' AND status = 'fired'")
    trained = [step for (step,) in executions]
    assert steps_in(folder) == sorted(set(trained))
    assert EventAccumulator(str(folder)).Reload().Tensors("findings/non_finite")
    records = wandb_records(wandb_file(run.run.path))  # one connection
    assert [row["step"] for row in history(records) if "train/loss" in row] == trained
    assert alerts(records).count(("WARN", "non_finite")) == fired == 1
    assert summary(records)["last_step"] == trained[-1]


@pytest.fixture(autouse=True)
def forked_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that this process starts; a run's watch starts interpreters."""
    monkeypatch.setattr(processes, "subprocess", forking_subprocess())


@pytest.fixture
def events(tmp_path: Path) -> EventWriter:
    return EventWriter(tmp_path / "told.jsonl", attempt=0, rank=NODE_RANK)


def told(events: EventWriter, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(events.path)[0] if event["kind"] == kind]


def recorded_run(tmp_path: Path, **section: Any) -> RunDir:
    """With a store, and TensorBoard in its configuration."""
    run = make_run(tmp_path, ranks=2, steps=30, config={"trackers": {"to": ["tensorboard"], "every_s": 0.2, **section}})
    Store.open(run).close()
    return run


def test_a_dead_tracker_is_restarted_and_a_hanging_one_is_abandoned(
    tmp_path: Path, events: EventWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "RETRY_S", (0.0,))
    monkeypatch.setattr(processes, "CLOSE_S", 1.0)
    run = recorded_run(tmp_path)
    with processes.trackers(run, 0, events) as tracked:
        wait_for(lambda: len(steps_in(run.path / "tensorboard")) == 30, "all steps")
        wait_for(lambda: (run.path / "trackers" / "tensorboard.json").exists(), "its progress")
        os.kill(told(events, "tracker_started")[0]["pid"], signal.SIGKILL)

        def is_again() -> bool:
            tracked.poll()
            return len(told(events, "tracker_started")) == 2

        wait_for(is_again, "another one")
        log = run.path / "tensorboard"
        wait_for(lambda: len(list(log.glob("events.*"))) == 2, "its file")
        os.kill(told(events, "tracker_started")[1]["pid"], signal.SIGSTOP)
    reasons = [event["reason"] for event in told(events, "tracker_failed")]
    assert reasons[0] == "exit code -9"
    assert reasons[1] == f"not finished 1 s after the run: write it with rankscope export {run.path} --to tensorboard"
    assert steps_in(run.path / "tensorboard") == list(range(1, 31))  # none twice


def test_the_last_poll_reads_what_no_watch_has_ingested(tmp_path: Path, events: EventWriter) -> None:
    run = make_run(tmp_path, ranks=2, steps=30, config={"trackers": {"to": ["tensorboard"], "every_s": 0.2}})
    with processes.trackers(run, 0, events):
        pass
    assert [event["tracker"] for event in told(events, "tracker_finished")] == ["tensorboard"]
    assert steps_in(run.path / "tensorboard") == list(range(1, 31))


def test_a_tracker_that_cannot_write_reports_it_once(tmp_path: Path, events: EventWriter) -> None:
    run = recorded_run(tmp_path, tensorboard_dir="/dev/null/logs")
    with processes.trackers(run, 0, events) as tracked:

        def has_failed() -> bool:
            tracked.poll()
            return bool(told(events, "tracker_failed"))

        wait_for(has_failed, "its end")
        tracked.poll()
    (event,) = told(events, "tracker_failed")
    assert "/dev/null/logs" in event["reason"]
    assert "cannot be written" in event["reason"]


def test_only_the_first_node_runs_trackers(tmp_path: Path, events: EventWriter) -> None:
    with processes.trackers(recorded_run(tmp_path), 1, events):
        assert told(events, "tracker_started") == []
