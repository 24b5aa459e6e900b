"""`rankscope compare` and `Run.compare` of runs that train, and of one run with itself."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from typer.testing import CliRunner

import rankscope
from probes.tape.attempts import start_ticks
from probes.tape.rundir import RunDir
from rankscope.cli import app
from tests.factories import make_run, still_training


def of_this_process(run: RunDir) -> RunDir:
    """Its ranks are this process, which lives; no `watch` has come up yet."""
    here = {"host": socket.gethostname(), "pid": os.getpid(), "start_ticks": start_ticks()}
    for path in run.path.glob("tapes/attempt-*/rank-*/events.jsonl"):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(e | (here if e["kind"] == "rank" else {})) + "\n" for e in events))
    return run


def test_a_run_that_trains_is_not_taken_for_one_that_died(tmp_path: Path) -> None:
    before = make_run(tmp_path / "a", ranks=2, steps=40)
    after = of_this_process(still_training(make_run(tmp_path / "b", ranks=2, steps=40, end="")))
    assert rankscope.open_run(after.path).findings == ()
    words = ["compare", str(before.path), str(after.path), "--format", "json", "--fail-on", "critical"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert json.loads(done.stdout)["only_b"] == []
    assert done.exit_code == 0, done.output


def test_a_gate_does_not_pass_a_run_that_is_compared_with_itself(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=40)
    latest = tmp_path / "runs" / "newest"
    latest.symlink_to(run.path)
    done = CliRunner().invoke(app, ["compare", str(run.path), str(latest), "--fail-on", "slower"])
    assert done.exit_code == 2, done.output
    assert "are the same run" in done.output
