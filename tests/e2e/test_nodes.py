"""Two nodes (two launchers with watches and shared memory of their own) on one machine: one dies and comes back."""

from __future__ import annotations

import math
import signal
from collections.abc import Sequence
from pathlib import Path

from probes.tape.events import read_events
from probes.tape.format.reader import TapeError, read_segment, segment_paths
from store import Store
from tests.e2e.launched import LaunchedRun, kill, start
from tests.ports import free_port
from tests.waiting import wait_for

ELASTIC = (
    "parallel.dp_shard=-1", "train.steps=100000", "recovery.rejoin_s=1", "checkpoint.interval=5",
)  # fmt: skip


def _options(rank: int, port: int, nodes: str = "1:2") -> list[str]:
    where = ["--nnodes", nodes, "--node-rank", str(rank), "--rdzv-endpoint", f"localhost:{port}"]
    return [*where, "--nproc-per-node", "2"]


def _node(
    tmp_path: Path, rank: int, port: int, *settings: str, nodes: str = "1:2", faults: Sequence[str] = ()
) -> LaunchedRun:
    options = _options(rank, port, nodes)
    return start(tmp_path, "elastic", settings=[*ELASTIC, *settings], options=options, faults=faults)


def _lose_node_1(first: LaunchedRun, second: LaunchedRun, attempt: int) -> None:
    """SIGKILL to everything of a node: launcher, ranks, watch."""
    second.process.kill()
    second.process.communicate()
    for _, _, folder in first.run.rank_dirs():
        for event in read_events(folder / "events.jsonl")[0]:
            if event["kind"] == "rank" and event["node_rank"] == 1 and event["attempt"] == attempt:
                kill(event["pid"])
    for event in read_events(first.run.node_dir(1) / "events.jsonl")[0]:
        if event["kind"] == "watch_started":
            kill(event["pid"])


def _worlds(run: LaunchedRun) -> list[int]:
    return [event["world_size"] for event in run.events("attempt_started") if event["node_rank"] == 0]


def test_a_node_dies_the_other_goes_on_and_it_comes_back(tmp_path: Path) -> None:
    port = free_port()
    # Steps without a pause would take the cores from the node that comes back. A fault ends with its attempt: many.
    paced = [f"slow_data@step={step},until={step + 19},rank=0,seconds=0.4" for step in range(1, 400, 20)]
    first = _node(tmp_path, 0, port, faults=paced)
    wait_for(lambda: (first.runs_dir / "latest").exists(), "the run", first)
    second = _node(tmp_path, 1, port)
    wait_for(lambda: 4 in _worlds(first) and first.is_saved() and len(first.pids()) == 4, "both nodes", first)
    attempt = max(event["attempt"] for event in first.events("attempt_started"))

    _lose_node_1(first, second, attempt)
    wait_for(lambda: _worlds(first)[-1] == 2, "two ranks go on", first)
    again = max(event["attempt"] for event in first.events("attempt_started"))
    wait_for(lambda: _committed(first, again) > 3, "steps on two ranks", first)

    third = _node(tmp_path, 1, port)
    wait_for(lambda: _worlds(first)[-1] == 4, "the world grows again", first)
    newest = max(event["attempt"] for event in first.events("attempt_started"))
    wait_for(lambda: _committed(first, newest) > 3, "steps on four ranks", first)
    for node in (first, third):
        node.process.send_signal(signal.SIGTERM)
    first.finish(exit_code=143)
    third.finish(exit_code=143)
    stopped_at = first.events("preempted", 0)[-1]["checkpoint_step"]

    with Store.open(first.run) as store:
        rows = store.rows(
            "SELECT step, arg_max(batch_index, (attempt, start_ns)), arg_max(loss, (attempt, start_ns)) FROM steps "
            "WHERE committed AND rank = 0 GROUP BY step ORDER BY step"
        )
    assert [step for step, _, _ in rows] == list(range(1, stopped_at + 1))
    assert [batch for _, batch, _ in rows] == list(range(stopped_at)), "every batch was trained on once"
    assert all(math.isfinite(loss) for _, _, loss in rows)
    assert (first.run.path / "telemetry-node1.duckdb").exists()


def _committed(run: LaunchedRun, attempt: int) -> int:
    """On the tape of rank 0, as often as it is asked; 0 while the file is there and its header is not."""
    try:
        segments = [read_segment(path) for path in segment_paths(run.run.rank_dir(attempt, 0), "steps")]
    except TapeError:
        return 0
    return sum(int(record["committed"]) == 1 for segment in segments for record in segment.records)
