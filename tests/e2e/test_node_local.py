"""Two nodes whose run folders lie on disks of their own: the leader knows the other's ranks from digests alone.

Both watches are real processes, and they talk through a real store. The culprit is a process that sleeps.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from probes.attach.launch.watch_process import start_watch
from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from tests.e2e.launched import rankscope
from tests.factories import make_run
from tests.stand_ins import stand_ins, take_in
from tests.waiting import wait_for

CULPRIT = 3


def said(run: RunDir, node: int, kind: str) -> list[dict[str, Any]]:
    path = run.node_dir(node) / "events.jsonl"
    return [event for event in (read_events(path)[0] if path.exists() else []) if event["kind"] == kind]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Four that stand for ranks; whatever is left of them and of the watches is ended."""
    started = stand_ins(tmp_path, 4)
    yield started
    for process in started:
        process.kill()
        process.wait(100)


@pytest.fixture
def nodes(tmp_path: Path, processes: list[subprocess.Popen[bytes]]) -> list[RunDir]:
    """The folders of both nodes: ranks 0 and 1 wait for rank 3 of node 1, as does rank 2."""
    where = {
        rank: {"node_rank": rank // 2, "local_rank": rank % 2, "pid": process.pid}
        for rank, process in enumerate(processes)
    }
    whole = make_run(tmp_path, steps=20, hang={CULPRIT: 20}, identities=where)
    folders = []
    for node in (0, 1):
        copy = RunDir(Path(shutil.copytree(whole.path, tmp_path / f"node-{node}" / whole.run_id)))
        for rank in (2, 3) if node == 0 else (0, 1):
            shutil.rmtree(copy.rank_dir(0, rank))
        if node == 1:
            shutil.rmtree(copy.node_dir(0))
        take_in(copy, processes[2 * node : 2 * node + 2])
        folders.append(copy)
    return folders


@pytest.mark.usefixtures("forked_watch")
def test_a_hang_across_nodes_is_named_killed_and_found_afterwards(
    tmp_path: Path, nodes: list[RunDir], processes: list[subprocess.Popen[bytes]]
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    processes += [
        start_watch(run.path, node, num_nodes=2, digests=f"127.0.0.1:{store.port}") for node, run in enumerate(nodes)
    ]
    assert processes[CULPRIT].wait(110) == -signal.SIGKILL, "its own node's watch acts on the leader's word"
    (killed,) = wait_for(lambda: said(nodes[1], 1, "culprit_killed"), "event of the kill")
    assert killed["killed_rank"] == CULPRIT
    (finding,) = [event for event in said(nodes[0], 0, "finding") if event["finding_kind"] == "hang"]
    assert (finding["finding_ranks"], finding["cause"]) == ([CULPRIT], "not_entered")
    assert finding["evidence"]["waiting_ranks"] == [0, 1, 2]
    clocks = wait_for(lambda: said(nodes[0], 0, "clock_offset"), "offset of the clock")  # more where an answer was slow
    assert all(abs(clock["offset_ns"]) <= clock["error_ns"] for clock in clocks), "one machine, one clock"

    assert not said(nodes[0], 0, "culprit_killed"), "who waits is left alone"
    assert [processes[rank].poll() for rank in (0, 1, 2)] == [None] * 3

    processes[-1].kill()  # node 1's watch
    (silent,) = wait_for(lambda: said(nodes[0], 0, "node_silent"), "word that the node is silent")
    assert (silent["node_rank"], silent["ranks"]) == (1, [2, 3])
    assert not said(nodes[0], 0, "culprit_killed"), "nor is a rank killed for the silence"
    processes[-2].terminate()
    assert processes[-2].wait(100) == 0

    alone = rankscope("analyze", str(nodes[0].path)).stdout
    assert "waits for ranks 2 and 3, of which there are no records here" in alone
    assert "no records of ranks 2 and 3 in this folder" in alone
    assert "Rank 3 did not reach" in rankscope("analyze", str(nodes[1].path)).stdout, "it is recorded there"

    into = tmp_path / "collected"
    done = rankscope("collect", *(str(run.path) for run in nodes), "--into", str(into))
    assert done.returncode == 0, done.stderr
    assert "4 ranks of 2 nodes" in done.stdout
    told = rankscope("analyze", str(into))
    assert "Rank 3 did not reach" in told.stdout, told.stdout + told.stderr
    assert "Node 1 stopped reporting" in told.stdout
