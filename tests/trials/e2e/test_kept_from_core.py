"""A rank of a plain DDP script that has its core for a part of the time only."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.launched import analysis_of, kill
from tests.e2e.script_ranks import EXAMPLES, ScriptRanks
from tests.waiting import wait_for


@contextmanager
def throttled(pid: int, *, busy_s: float, still_s: float) -> Iterator[None]:
    """A process that has its core for a part of the time only."""
    over = threading.Event()

    def toggle() -> None:
        while not over.is_set():
            kill(pid, signal.SIGSTOP)
            over.wait(still_s)
            kill(pid, signal.SIGCONT)
            over.wait(busy_s)

    thread = threading.Thread(target=toggle)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_rank_that_waits_for_a_core_is_named(tmp_path: Path) -> None:
    run_dir, script = tmp_path / "run", tmp_path / "plain_ddp.py"
    lines = (EXAMPLES / "ddp.py").read_text().splitlines()
    script.write_text("\n".join(line for line in lines if "rankscope" not in line) + "\n")
    options = ("--steps", "80")
    with ScriptRanks(script, *options, cwd=tmp_path, run_dir=run_dir, world_size=3, unattended=True) as ranks:
        wait_for(lambda: any(run_dir.glob("tapes/attempt-0/rank-00002/steps.*")), "rank 2's first step")
        with throttled(ranks.pids[2], busy_s=0.005, still_s=0.08):
            ranks.join()
    fired = [finding for finding in analysis_of(run_dir)["findings"] if finding["status"] == "fired"]
    found = [finding for finding in fired if finding["kind"] == "straggler"]  # one a phase: wherever it is stopped
    assert found
    assert {tuple(finding["ranks"]) for finding in found} == {(2,)}
