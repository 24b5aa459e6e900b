"""A device that must be replaced is left out of the run: a spare takes its place if one is left.

Slow ranks that are left out are trials: tests/trials/e2e/test_exclusion.py.
"""

from __future__ import annotations

from pathlib import Path

from tests.e2e.broken_devices import exporter, stopped, wait_for_attempt
from tests.e2e.launched import start, unhurried
from tests.ports import free_port

SETTINGS = (
    "train.steps=20000", "checkpoint.interval=0", "train.global_batch_size=6", "recovery.on_xid=exclude",
    "recovery.exclusion_cooldown_s=1.0",
)  # fmt: skip


def test_a_spare_takes_the_place_of_a_broken_device_and_the_next_one_is_left_out(tmp_path: Path) -> None:
    nodes = ["--nnodes", "2", "--rdzv-endpoint", f"localhost:{free_port()}", "--node-rank"]
    with exporter("GPU-first", "GPU-second") as gpus:
        settings = [*SETTINGS, f"probes.dcgm_url={gpus.url}"]
        run = start(
            tmp_path, "elastic", faults=unhurried(1, seconds=0.4), settings=settings,
            options=[*nodes, "0", "--nproc-per-node", "3"],
        )  # fmt: skip
        spare = start(tmp_path, "elastic", options=[*nodes, "1", "--nproc-per-node", "1"])
        for attempt, uuid in enumerate(gpus.xids):
            wait_for_attempt(run, attempt)
            gpus.break_device_of(run, attempt, rank=1, uuid=uuid)
        wait_for_attempt(run, 2)
        run = stopped(run)
        spare.finish(exit_code=None)
    worlds = [(event["world_size"], event["ranks_left_over"]) for event in run.events("attempt_started")]
    assert worlds == [(3, 1), (3, 0), (2, 0)] * 2, "of both nodes"
    asked = [(e["ranks"], e["mode"], e["cause"], e["attempt"]) for e in run.events("exclusion_requested")]
    assert asked == [([1], "exclude", "xid", attempt) for attempt in (0, 1)]
    excluded = [(e["excluded_rank"], e["cause"], e["attempt"]) for e in run.events("excluded")]
    assert excluded == [(1, "xid", attempt) for attempt in (0, 1)]
    saved = {event["attempt"]: event["checkpoint_step"] for event in run.events("preempted", 0)}
    loaded = {e["attempt"]: e["step"] for e in run.events("checkpoint", 0) if e["state"] == "loaded"}
    assert (loaded[1], loaded[2]) == (saved[0], saved[1]), "no step is lost"
    assert not run.events("rank_exit"), "ranks save and leave: none dies"
    assert not run.findings("hang")
    assert {finding["evidence"]["excluded_for"] for finding in run.findings("excluded")} == {"xid"}
