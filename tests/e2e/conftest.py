"""No process of a run outlives its test, however the test ends; and where its time went adds up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from analyzers.account.goodput import measure
from analyzers.run.policy import stall_policy
from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from store import Store
from tests.e2e.launched import STARTED
from tests.local_forks import forking_subprocess

TOLERANCE = 0.005


@pytest.fixture(autouse=True)
def nothing_is_left_running(tmp_path: Path) -> Iterator[None]:
    """It asks for `tmp_path` so that the run is still there when its account is checked."""
    yield
    paths = {run.runs_dir / "latest" for run in STARTED if (run.runs_dir / "latest").exists()}
    while STARTED:
        run = STARTED.pop()
        if run.process.poll() is None:
            run.kill_all()
        if run.process.stdout is not None:
            run.process.stdout.close()
    for path in paths:
        check_account(RunDir.open(path))


@pytest.fixture
def forked_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `start_watch` fork: the imports of a watch cost more than what it does in a minute."""
    monkeypatch.setattr("probes.attach.launch.watch_process.subprocess", forking_subprocess())


def check_account(run: RunDir) -> None:
    """Compare the account's sums, of the mean and of each rank, with the wall time. The run must have ended."""
    with Store.open(run) as store:
        account = measure(store, stall_policy(run.manifest()))
        if account is None:
            return  # no step was taken
        ((steps_s,),) = store.rows(
            "SELECT (max(start_ns + duration_ns) - min(start_ns)) / 1e9 FROM steps "
            "WHERE rank = (SELECT min(rank) FROM steps)"
        )
    events = [event for _, folder in run.node_dirs() for event in read_events(folder / "events.jsonl")[0]]
    when = {
        kind: [event["wall_ns"] for event in events if event["kind"] == kind]
        for kind in ("run_started", "attempt_started", "run_ended")
    }
    wall_s = account.wall_s
    if when["run_started"] and when["run_ended"] and max(when["run_ended"]) > max(when["attempt_started"], default=0):
        wall_s = (max(when["run_ended"]) - min(when["run_started"])) / 1e9
    assert wall_s >= 0.99 * (steps_s or 0.0), (wall_s, steps_s)
    for rank, seconds in (("mean", account.seconds), *account.by_rank.items()):
        assert min(seconds.values()) >= 0, (rank, seconds)
        assert abs(sum(seconds.values()) - wall_s) <= TOLERANCE * wall_s, (rank, sum(seconds.values()), wall_s, seconds)
