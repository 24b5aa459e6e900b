"""`rankscope profile`: whom it asks and for which steps, and what it refuses, on a run whose ranks a test plays."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from probes.profiling.request import RequestFile
from probes.tape.rundir import RunDir
from rankscope.cli import app
from tests.factories import make_run, still_training
from watch.live_tapes import LiveTapes


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = still_training(make_run(tmp_path, ranks=4, steps=30, end=""))
    made.node_dir(0).mkdir(parents=True, exist_ok=True)
    return made


def asked(run: RunDir, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["profile", str(run.path), *options])
    return result.exit_code, result.output


def test_the_ranks_get_one_request_for_steps_ahead(run: RunDir) -> None:
    files = [RequestFile(run, node_rank=0, attempt=0, rank=rank) for rank in range(4)]
    code, text = asked(run, "--ranks", "0,3", "--steps", "5", "--wait", "0")
    assert code == 0, text
    requests = [file.poll() for file in files]
    assert requests[1] is requests[2] is None
    assert requests[0] == requests[3]
    assert requests[0] is not None
    assert (requests[0].ranks, requests[0].num_steps) == ((0, 3), 5)
    assert requests[0].first_step > 30
    assert text.strip() == f"asked for 5 steps from step {requests[0].first_step} on"


def test_a_trace_that_does_not_come_is_exit_code_1(run: RunDir) -> None:
    code, text = asked(run, "--wait", "0.01")
    assert code == 1
    assert "no trace of rank 0" in text


@pytest.mark.parametrize(("ranks", "problem"), [("0,7", "has no rank 7"), ("all", "give numbers")])
def test_ranks_that_are_not_there_are_refused(run: RunDir, ranks: str, problem: str) -> None:
    code, text = asked(run, "--ranks", ranks)
    assert code == 2
    assert problem in " ".join(text.split())


def test_a_run_that_takes_no_requests_is_refused(run: RunDir) -> None:
    run.write_manifest(run.manifest() | {"config": {"profiler": {"on_request": False}}})
    code, text = asked(run)
    assert code == 2
    assert "profiler.on_request" in text


def test_a_run_whose_ranks_have_closed_is_refused(tmp_path: Path) -> None:
    """`rankscope run` leaves no end of the run by its launcher, and the ranks' own."""
    made = make_run(tmp_path, ranks=2, steps=30)
    made.node_dir(0).mkdir(parents=True, exist_ok=True)
    code, text = asked(made)
    assert code == 2
    assert "has ended" in text


def test_profile_ends_when_the_run_ends(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ending(LiveTapes):
        """A run whose end is seen at the second look."""

        num_polls = 0

        def poll(self) -> None:
            super().poll()
            self.num_polls += 1
            self.has_ended = self.num_polls > 1

    monkeypatch.setattr("watch.live_tapes.LiveTapes", Ending)
    code, text = asked(run, "--wait", "100000")
    assert code == 1
    assert "the run has ended" in text
