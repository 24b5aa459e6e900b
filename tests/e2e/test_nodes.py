"""Two nodes (two launchers with watches of their own) on one machine: one dies, the other goes on, it comes back."""

from __future__ import annotations

import math
import socket
from pathlib import Path

from probes.events import read_events
from probes.store import Store
from tests.e2e.launched import LaunchedRun, kill, start, wait_for

STEPS = 400
ELASTIC = (
    "parallel.dp_shard=-1", f"train.steps={STEPS}", "recovery.rejoin_s=1", "checkpoint.interval=5",
)  # fmt: skip


def _node(tmp_path: Path, rank: int, port: int, *settings: str) -> LaunchedRun:
    options = ["--nnodes", "1:2", "--node-rank", str(rank), "--rdzv-endpoint", f"localhost:{port}"]
    return start(tmp_path, "elastic", settings=[*ELASTIC, *settings], options=[*options, "--nproc-per-node", "2"])


def _worlds(run: LaunchedRun) -> list[int]:
    return [event["world_size"] for event in run.events("attempt_started") if event["node_rank"] == 0]


def test_a_node_dies_the_other_goes_on_and_it_comes_back(tmp_path: Path) -> None:
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    first = _node(tmp_path, 0, port)
    wait_for(lambda: (first.runs_dir / "latest").exists(), "the run", first)
    second = _node(tmp_path, 1, port)
    wait_for(lambda: 4 in _worlds(first) and first.is_saved() and len(first.pids()) == 4, "both nodes", first)
    attempt = max(event["attempt"] for event in first.events("attempt_started"))

    second.process.kill()
    for _, _, folder in first.run.rank_dirs():
        for event in read_events(folder / "events.jsonl")[0]:
            if event["kind"] == "rank" and event["node_rank"] == 1 and event["attempt"] == attempt:
                kill(event["pid"])
    for event in read_events(first.run.node_dir(1) / "events.jsonl")[0]:
        if event["kind"] == "watch_started":
            kill(event["pid"])
    wait_for(lambda: _worlds(first)[-1] == 2, "two ranks go on", first)
    again = max(event["attempt"] for event in first.events("attempt_started"))
    wait_for(lambda: _committed(first, again) > 3, "steps on two ranks", first)

    third = _node(tmp_path, 1, port)
    wait_for(lambda: _worlds(first)[-1] == 4, "the world grows again", first)
    newest = max(event["attempt"] for event in first.events("attempt_started"))
    wait_for(lambda: _committed(first, newest) > 3, "steps on four ranks", first)
    first.finish()
    third.finish()

    with Store.open(first.run) as store:
        rows = store.rows(
            "SELECT step, arg_max(batch_index, (attempt, start_ns)), arg_max(loss, (attempt, start_ns)) FROM steps "
            "WHERE committed AND rank = 0 GROUP BY step ORDER BY step"
        )
    assert [step for step, _, _ in rows] == list(range(1, STEPS + 1))
    assert [batch for _, batch, _ in rows] == list(range(STEPS)), "every batch was trained on once"
    assert all(math.isfinite(loss) for _, _, loss in rows)
    assert (first.run.path / "telemetry-node1.duckdb").exists()


def _committed(run: LaunchedRun, attempt: int) -> int:
    with Store.open(run.run) as store:
        sql = "SELECT count(*) FROM steps WHERE attempt = ? AND rank = 0 AND committed"
        return int(store.rows(sql, [attempt])[0][0])
