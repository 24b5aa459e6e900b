"""Two nodes (two launchers with watches and shared memory of their own) on one machine: one dies and comes back."""

from __future__ import annotations

import math
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from probes.tape.events import read_events
from probes.tape.shared_memory import shared_folder
from store import Store
from tests.e2e.launched import LaunchedRun, kill, resume, start, unhurried
from tests.ports import free_port
from tests.waiting import wait_for
from trainer.launcher.nodes.node_exclusion import exclusion_reason

STEPS = 400
ELASTIC = (
    "parallel.dp_shard=-1", f"train.steps={STEPS}", "recovery.rejoin_s=1", "checkpoint.interval=5",
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
    # A survivor in a hurry may be done before the node is back, which takes ten seconds and more beside other tests.
    # A fault ends with its attempt, so there are many.
    paced = [f"slow_data@step={step},until={step + 19},rank=0,seconds=0.15" for step in range(1, STEPS - 100, 20)]
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


def test_a_lost_node_does_not_cost_the_copies_and_one_that_keeps_failing_is_left_out(tmp_path: Path) -> None:
    """Nothing is on the disk. After the loss of node 1 with its shared memory both go on from the copies that node 0
    kept; told to stop they leave with a checkpoint; resumed together, a rank of node 1 dies twice, and node 0 goes on
    without it."""
    settings = ("checkpoint.interval=0", "train.steps=3000")
    nodes = [_node(tmp_path, 0, port := free_port(), *settings, nodes="2", faults=unhurried(4))]
    wait_for(lambda: (nodes[0].runs_dir / "latest").exists(), "the run", nodes[0])
    nodes.append(_node(tmp_path, 1, port, *settings, nodes="2", faults=unhurried(4)))
    wait_for(lambda: len(nodes[0].pids()) == 4 and _committed(nodes[0], 0) > 20, "both nodes", nodes[0])
    wait_for(lambda: all(_is_kept(nodes[0], rank) for rank in (2, 3)), "the copies of node 1 on node 0", nodes[0])

    _lose_node_1(nodes[0], nodes[1], 0)
    shared = shared_folder(nodes[0].run.path, 1)
    assert shared.is_dir()
    shutil.rmtree(shared)
    lost_after = _committed(nodes[0], 0)
    nodes[1] = _node(tmp_path, 1, port, *settings, nodes="2")
    wait_for(lambda: _committed(nodes[0], 1) > 20, "both nodes again", nodes[0])
    (loaded,) = (event for event in nodes[0].events("checkpoint", 0) if event["state"] == "loaded")
    assert loaded["tier"] == "memory"
    assert loaded["step"] >= lost_after - 15, "a copy every 5 steps, vetted 3 steps later"
    assert not list(nodes[0].run.checkpoints.glob("step-*")), "there was nothing else to go on from"

    nodes[0].process.send_signal(signal.SIGTERM)
    nodes[0].finish(exit_code=143)
    nodes[1].finish(exit_code=143)
    stopped_at = nodes[0].events("preempted", 0)[-1]["checkpoint_step"]
    port, steps = free_port(), stopped_at + 60
    # Node 0 may do without node 1, and has to wait for it while it is not left out: they start within seconds.
    again = (
        f"train.steps={steps}", "recovery.max_failures_per_node=2", "checkpoint.interval=10", "recovery.rejoin_s=10",
    )  # fmt: skip
    faults = [f"kill@step={stopped_at + 12},rank=2", f"kill@step={stopped_at + 24},rank=2"]
    nodes = [resume(nodes[0], *_options(rank, port), settings=again, faults=faults) for rank in (0, 1)]
    assert "excluded after 2 failures" in nodes[1].finish(exit_code=5).output
    nodes[0].finish()
    assert _worlds(nodes[0]) == [4, 4, 4, 4, 2]
    (excluded,) = nodes[0].findings("excluded")
    assert excluded["evidence"] == {"node_rank": 1, "device": None, "num_failures": 2}
    assert exclusion_reason(nodes[0].run, 1)

    with Store.open(nodes[0].run) as store:
        twice = store.rows(
            "SELECT step, count(DISTINCT loss), count(DISTINCT batch_index) FROM steps WHERE committed AND rank = 0 "
            "AND attempt < 4 GROUP BY step HAVING count(*) > 1 ORDER BY step"  # the last world sums in another order
        )
        batches = store.rows("SELECT DISTINCT batch_index FROM steps WHERE committed AND rank = 0 ORDER BY 1")
    assert twice, "steps between the copy and the loss were trained again"
    assert all((losses, batches) == (1, 1) for _, losses, batches in twice), "with the same bits"
    assert [batch for (batch,) in batches] == list(range(steps))


def _is_kept(run: LaunchedRun, rank: int) -> bool:
    """Return True if the newest word of a rank's copies is that another node has them."""
    told = run.events("peer_copy", rank)
    return bool(told) and told[-1]["state"] == "complete"


def _committed(run: LaunchedRun, attempt: int) -> int:
    with Store.open(run.run) as store:
        sql = "SELECT count(*) FROM steps WHERE attempt = ? AND rank = 0 AND committed"
        return int(store.rows(sql, [attempt])[0][0])
