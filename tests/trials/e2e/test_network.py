"""Nodes with a network of their own each: a cable is pulled and put back, the leader dies, one of four is replaced.

The nodes are network namespaces, so that what is sent between them really stops, and that no name of this machine leads
from one to the other. They share a disk, as nodes with NFS do.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from store import Store
from tests.e2e.launched import LAYOUTS, SOURCE, TINY, kill
from tests.e2e.namespaces import Network, why_not
from tests.waiting import wait_for

ROOT = Path(__file__).parents[3]
PORT = 29500
FREED = ("culprit_killed", "rank_exit", "rank_stopped")
"""Events of a rank that has ended: by `watch`, by itself, and by its launcher."""


class Cluster:
    """`rankscope train` on each node of a network, one rank a node."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder = network, folder
        self.launchers: dict[int, subprocess.Popen[bytes]] = {}
        (folder / "text.txt").write_text(SOURCE * 4)

    def train(self, node: int, *, port: int = PORT, resume: bool = False) -> None:
        """Start a node's launcher; its output goes into a file."""
        if resume:
            what = ["--resume", str(self.folder / "runs" / "latest")]
        else:
            settings = (
                *TINY, *LAYOUTS["elastic"], f"run.dir={self.folder / 'runs'}",
                f"data.path=['{self.folder / 'text.txt'}']", "train.steps=100000", "checkpoint.interval=20",
            )  # fmt: skip
            what = [part for setting in settings for part in ("--set", setting)]
        nodes = ["--nnodes", str(len(self.network.nodes)), "--node-rank", str(node), "--nproc-per-node", "1"]
        where = ["--rdzv-endpoint", f"{self.network.address(0)}:{port}"]
        environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
        with open(self.folder / f"node-{node}.log", "ab") as log:
            self.launchers[node] = subprocess.Popen(
                [*self.network.on(node), sys.executable, "-m", "rankscope", "train", *what, *nodes, *where],
                cwd=ROOT,
                env=environment | {"RANKSCOPE_FAIL_LOUD": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def run(self) -> RunDir:
        return RunDir.open(self.folder / "runs" / "latest")

    def events(self, kind: str, node: int | None = None) -> list[dict[str, Any]]:
        """Of a node's watch and launcher, or of all ranks."""
        if not (self.folder / "runs" / "latest").exists():
            return []
        folders = [self.run.node_dir(node)] if node is not None else [d for _, _, d in self.run.rank_dirs()]
        found = [event for folder in folders for event in read_events(folder / "events.jsonl")[0]]
        return [event for event in found if event["kind"] == kind]

    def findings(self, kind: str, node: int) -> list[dict[str, Any]]:
        return [event for event in self.events("finding", node) if event["finding_kind"] == kind]

    def trains(self, attempt: int, num_steps: int) -> bool:
        """Whether every rank of an attempt has taken so many steps, as the nodes' stores know it."""
        if len([e for e in self.events("rank") if e["attempt"] == attempt]) < len(self.network.nodes):
            return False
        with Store.open(self.run, catch_up=False) as store:
            sql = "SELECT rank FROM steps WHERE attempt = ? AND committed GROUP BY rank HAVING count(*) >= ?"
            return len(store.rows(sql, [attempt, num_steps])) == len(self.network.nodes)

    def await_training(self, attempt: int, num_steps: int = 5) -> None:
        wait_for(
            lambda: self.trains(attempt, num_steps), f"{num_steps} steps of attempt {attempt}\n{self}", deadline_s=120
        )

    def stop(self) -> list[int]:
        """Tell the launchers to end, as a scheduler does; their exit codes."""
        for launcher in self.launchers.values():
            launcher.send_signal(signal.SIGTERM)
        return [launcher.wait(90) for launcher in self.launchers.values()]

    def __str__(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in self.folder.glob("node-*.log"))


@pytest.fixture
def num_nodes() -> int:
    return 2


@pytest.fixture
def cluster(tmp_path: Path, num_nodes: int) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    with Network(num_nodes) as network:
        cluster = Cluster(network, tmp_path)
        yield cluster
        for node in network.nodes:
            network.kill(node)
        for launcher in cluster.launchers.values():
            launcher.wait(100)


def test_a_pulled_cable_is_named_and_training_resumes(cluster: Cluster) -> None:
    for node in (0, 1):
        cluster.train(node)
    cluster.await_training(attempt=0, num_steps=100)  # seconds, in which the leader hears of rank 1

    cluster.network.cut(1)
    (silent,) = wait_for(lambda: cluster.events("node_silent", 0), f"word of the silent node\n{cluster}", deadline_s=60)
    assert (silent["node_rank"], silent["ranks"]) == (1, [1])
    for node in (0, 1):  # each of them sees its own rank stand still, and frees it
        killed = wait_for(lambda node=node: cluster.events("culprit_killed", node), f"end of rank {node}\n{cluster}")
        assert {event["killed_rank"] for event in killed} == {node}
        assert cluster.findings("hang", node)

    cluster.network.restore(1)
    cluster.await_training(attempt=1)
    wait_for(lambda: cluster.events("node_heard", 0), "word that the node is heard again")
    wait_for(lambda: cluster.findings("node_silent", 0)[-1]["status"] == "ok", "the end of the silence")
    told = [len(cluster.findings("hang", node)) for node in (0, 1)]
    assert cluster.stop() == [143, 143], str(cluster)
    hangs = [[e["summary"] for e in cluster.findings("hang", node)][told[node] :] for node in (0, 1)]
    assert all(text.startswith("Over: ") for texts in hangs for text in texts), "an end is no standstill"
    with Store.open(cluster.run) as store:
        rows = store.rows("SELECT step, count(DISTINCT loss) FROM steps WHERE committed AND rank = 0 GROUP BY step")
    assert sorted(step for step, _ in rows) == list(range(1, len(rows) + 1))
    assert all(losses == 1 for _, losses in rows), "what was trained again has the same bits"


def test_the_other_node_records_after_the_leader_dies_and_both_resume(cluster: Cluster) -> None:
    for node in (0, 1):
        cluster.train(node)
    cluster.await_training(attempt=0, num_steps=45)  # two checkpoints
    watch = cluster.events("watch_started", 1)[-1]["pid"]

    cluster.network.cut(0)  # first: a machine without power answers nothing, not even with a reset
    cluster.network.kill(0)
    said = wait_for(
        lambda: [event for kind in ("hang", "rank_lost") for event in cluster.findings(kind, 1)],
        f"finding of node 1\n{cluster}",
    )
    assert said[0]["status"] == "fired"
    assert Path(f"/proc/{watch}").exists(), "it still watches"
    cluster.launchers[1].send_signal(signal.SIGTERM)
    cluster.launchers[1].wait(90)
    kill(watch)

    cluster.network.restore(0)
    for node in (0, 1):
        cluster.train(node, port=PORT + 1, resume=True)
    wait_for(
        lambda: cluster.events("attempt_started", 0)[-1]["attempt"] > 0, f"a new attempt\n{cluster}", deadline_s=90
    )
    attempt = cluster.events("attempt_started", 0)[-1]["attempt"]
    cluster.await_training(attempt)
    loaded = [e for e in cluster.events("checkpoint") if e["attempt"] == attempt and e["state"] == "loaded"]
    assert {event["step"] for event in loaded} <= set(range(20, 10_000)), "not from the beginning"
    assert loaded
    assert cluster.stop() == [143, 143], str(cluster)


@pytest.mark.parametrize("num_nodes", [4])
def test_one_of_four_nodes_loses_its_power_and_another_takes_its_place(cluster: Cluster) -> None:
    lost = 2
    for node in cluster.network.nodes:
        cluster.train(node)
    cluster.await_training(attempt=0, num_steps=25)  # a checkpoint

    cluster.network.cut(lost)
    cluster.network.kill(lost)
    (silent,) = wait_for(lambda: cluster.events("node_silent", 0), f"word of the silent node\n{cluster}", deadline_s=60)
    assert (silent["node_rank"], silent["ranks"]) == (lost, [lost])
    named = [event["finding_ranks"] for kind in ("hang", "rank_lost") for event in cluster.findings(kind, 0)]
    assert all(ranks == [lost] for ranks in named), f"nobody else is blamed: {named}"
    for node in set(cluster.network.nodes) - {lost}:
        # By the limits of a hang; where one of them lost its connection and waits for a new start, by its launcher.
        wait_for(
            lambda node=node: any(cluster.events(kind, node) for kind in FREED),
            f"the end of node {node}'s rank, which waits\n{cluster}", deadline_s=60,
        )  # fmt: skip

    cluster.network.restore(lost)
    cluster.train(lost)
    cluster.await_training(attempt=1)
    told = [found["summary"] for node in cluster.network.nodes for found in cluster.findings("rank_lost", node)]
    assert not any("killed from outside" in text or "No rank is missing" in text for text in told), told
    loaded = [e for e in cluster.events("checkpoint") if e["attempt"] == 1 and e["state"] == "loaded"]
    assert loaded
    assert all(event["step"] >= 20 for event in loaded), "not from the beginning"
    assert set(cluster.stop()) == {143}, str(cluster)
