"""Syncing tapes where something fails: the thread lives on, the round is finished, an event says why."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from probes.tape import event_kinds
from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from tests.factories import make_run
from tests.waiting import wait_for
from watch.records.tape_sync import TapeSync


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = make_run(tmp_path, ranks=2, steps=5)
    run.node_dir(0).mkdir(parents=True, exist_ok=True)
    return run


def reasons(run: RunDir) -> list[str]:
    events, _, _ = read_events(run.node_dir(0) / "events.jsonl")
    return [event["reason"] for event in events if event["kind"] == event_kinds.HEALTH_FAILED]


def test_the_thread_survives_any_error_and_reports_each_kind_once(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []

    def failing(self: TapeSync, *, last: bool) -> None:
        rounds.append(len(rounds))
        raise (OverflowError("too large") if len(rounds) % 2 else OSError(errno.EIO, f"error {len(rounds)}"))

    monkeypatch.setattr(TapeSync, "_sync", failing)
    with TapeSync(run, every_s=0.01).running():
        wait_for(lambda: len(rounds) > 5, "six rounds")
    assert sorted(reasons(run)) == [
        "tapes cannot be synced: OSError: [Errno 5] error 2",
        "tapes cannot be synced: OverflowError: too large",
    ]
