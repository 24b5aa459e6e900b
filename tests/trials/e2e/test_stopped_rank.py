"""A rank that the operating system stopped (SIGSTOP): named within 5 s after the stall limit, then restarted."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.e2e.launched import kill, start
from tests.waiting import wait_for

NAMED_WITHIN_S = 5.0


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_stopped_rank_is_named_in_seconds(tmp_path: Path, layout: str) -> None:
    floor_s = 3.0
    run = start(tmp_path, layout, settings=["train.steps=100000", f"recovery.hang_floor_s={floor_s}"])
    wait_for(run.is_saved, "a checkpoint", run)
    stopped_at = time.monotonic()
    kill(run.pids()[2], signal.SIGSTOP)
    finding = wait_for(
        lambda: next((e for e in run.events("finding") if e["finding_kind"] == "hang"), None), "finding", run
    )
    seconds = time.monotonic() - stopped_at
    assert finding["finding_ranks"] == [2]
    assert "stopped" in finding["summary"]
    assert seconds <= floor_s + NAMED_WITHIN_S
    wait_for(lambda: [e for e in run.events("attempt_started") if e["attempt"] == 1], "restart", run)
    wait_for(lambda: [e for e in run.events("checkpoint", 0) if e["state"] == "loaded"], "resume", run)
    run.process.send_signal(signal.SIGTERM)
    run.finish(exit_code=128 + signal.SIGTERM)
