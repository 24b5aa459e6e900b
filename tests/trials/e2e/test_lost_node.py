"""A node is lost with its shared memory: the run goes on from the copies of another; one that keeps failing goes."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

from probes.tape.files.shared_memory import shared_folder
from store import Store
from tests.e2e.launched import LaunchedRun, resume, unhurried
from tests.e2e.test_nodes import _committed, _lose_node_1, _node, _options, _worlds
from tests.ports import free_port
from tests.waiting import wait_for
from trainer.launcher.nodes.node_exclusion import exclusion_reason


def test_copies_survive_a_lost_node_and_a_failing_node_is_excluded(tmp_path: Path) -> None:
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
