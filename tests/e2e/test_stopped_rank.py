"""A rank that the operating system stopped (SIGSTOP) is named, then restarted; how soon: tests/trials/e2e."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.depth import later
from tests.e2e.launched import kill, start
from tests.waiting import wait_for


@later("a rank that the drill stops: e2e/test_drill.py; `stopped` in the words of the finding: analyzers/test_live.py")
def test_a_stopped_rank_is_named_and_restarted(tmp_path: Path) -> None:
    run = start(tmp_path, "fsdp", settings=["train.steps=100000", "recovery.hang_floor_s=10"])
    wait_for(run.is_saved, "a checkpoint", run)
    kill(run.pids()[2], signal.SIGSTOP)
    finding = wait_for(
        lambda: next((e for e in run.events("finding") if e["finding_kind"] == "hang"), None), "finding", run
    )
    assert finding["finding_ranks"] == [2]
    assert "stopped" in finding["summary"]
    wait_for(lambda: [e for e in run.events("attempt_started") if e["attempt"] == 1], "restart", run)
    wait_for(lambda: [e for e in run.events("checkpoint", 0) if e["state"] == "loaded"], "resume", run)
    run.process.send_signal(signal.SIGTERM)
    run.finish(exit_code=128 + signal.SIGTERM)
