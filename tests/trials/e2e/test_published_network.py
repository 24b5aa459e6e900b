"""Three nodes with networks and disks of their own publish to an S3 API on a fourth; a fifth reads the live run there.

The cable of the storage is pulled and put back: training goes on, the reader says what it has, and no row is lost.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from probes.tape.events import read_events
from tests.e2e.namespaces import INTERFACE, Network, why_not
from tests.object_store import BUCKET, KEYS
from tests.waiting import wait_for

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[3]
NODES, STORAGE, READER = 3, 3, 4
SLOW = 2
PORT, S3_PORT = 29500, 9000
ADDRESS = f"s3://{BUCKET}/runs"

SCRIPT = f"""
import os, sys, time
import torch, torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
stop = torch.zeros(1)
while not stop:
    model(torch.randn(8, 64)).square().mean().backward()
    time.sleep(0.06 if dist.get_rank() == {SLOW} else 0.02)
    optimizer.step()
    optimizer.zero_grad()
    stop[0] = os.path.exists(sys.argv[1])
    dist.all_reduce(stop, op=dist.ReduceOp.MAX)
dist.destroy_process_group()
"""

READ = f"""
import json
import rankscope

run = rankscope.open("{ADDRESS}/one")
found = run.findings
seen = run.account()  # what it reads is as new as what was found, or newer
print(json.dumps({{
    "stragglers": [list(f.ranks) for f in found if f.kind == "straggler" and f.status == "fired"],
    "findings": [f"{{f.status}} {{f.kind}} {{f.summary}}" for f in found],
    "goodput": run.diagnose().goodput is not None,
    "ranks": seen.ranks.tolist(),
    "steps": dict(run.sql("SELECT rank, count(*) FROM steps WHERE duration_ns > 0 GROUP BY rank")),
}}))
"""


class Nodes:
    """Launchers, the storage, and what a reader on the last node sees."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder = network, folder
        self.processes: list[subprocess.Popen[bytes]] = []
        (folder / "train.py").write_text(SCRIPT)
        self.environment = {**os.environ, **KEYS, "GLOO_SOCKET_IFNAME": INTERFACE, "AWS_DEFAULT_REGION": "us-east-1"}
        self.environment |= {"AWS_ENDPOINT_URL": f"http://{network.address(STORAGE)}:{S3_PORT}"}
        self.environment |= {"AWS_EC2_METADATA_DISABLED": "true", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def start(self, node: int, name: str, *command: str) -> subprocess.Popen[bytes]:
        """A process on a node; its output goes into a file."""
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                [*self.network.on(node), sys.executable, *command], cwd=self.folder, env=self.environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def train(self, node: int) -> subprocess.Popen[bytes]:
        """Launch the script on a node, with a run folder of the node's own."""
        where = [
            "--nnodes",
            str(NODES),
            "--node-rank",
            str(node),
            "--nproc-per-node",
            "1",
            "--run-dir",
            f"node-{node}/one",
        ]
        where += ["--rdzv-endpoint", f"{self.network.address(0)}:{PORT}"]
        published = ["--set", f"publish.address={ADDRESS}", "--set", "publish.every_s=1"]
        return self.start(node, f"node-{node}", "-m", "rankscope", "run", *where, *published, "train.py", "stop")

    def on_reader(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.network.on(READER), sys.executable, *command], cwd=self.folder, env=self.environment,
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    def read(self) -> dict[str, Any]:
        """What `rankscope.open` of the address gives on the reader; empty while nothing is there."""
        done = self.on_reader("-c", READ)
        (self.folder / "reader.log").write_text(done.stderr + done.stdout)
        return json.loads(done.stdout) if done.returncode == 0 else {}

    def until(self, condition: Callable[[], Any], what: str, deadline_s: float = 120.0) -> Any:
        """Wait for a condition; what all processes have said is in the error."""
        try:
            return wait_for(condition, what, deadline_s=deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self}") from None

    def events(self, node: int, kind: str) -> list[dict[str, Any]]:
        (path,) = self.folder.glob(f"node-{node}/one/**/node-*{node}/events.jsonl")
        return [event for event in read_events(path)[0] if event["kind"] == kind]

    def __str__(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in self.folder.glob("*.log"))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    if reason := why_not():
        pytest.skip(reason)
    with Network(NODES + 2) as network:
        nodes = Nodes(network, tmp_path)
        yield nodes
        for node in network.nodes:
            network.kill(node)
        for process in nodes.processes:
            process.wait(100)


def test_a_live_run_of_three_nodes_is_read_on_a_fifth(nodes: Nodes) -> None:
    nodes.start(STORAGE, "storage", "-m", "moto.server", "-H", nodes.network.address(STORAGE), "-p", str(S3_PORT))
    bucket = f"import boto3; boto3.client('s3').create_bucket(Bucket='{BUCKET}')"
    nodes.until(lambda: nodes.on_reader("-c", bucket).returncode == 0, "the bucket")
    launchers = [nodes.train(node) for node in range(NODES)]

    seen = nodes.until(lambda: (found := nodes.read()) and found["stragglers"] and found, "the slow rank", 200)
    assert seen["stragglers"] == [[SLOW]]
    assert seen["goodput"]
    assert seen["ranks"] == list(range(NODES)), "all ranks by step, from disks that the reader does not see"

    before = seen["steps"]
    nodes.network.cut(STORAGE)
    nodes.until(lambda: nodes.events(0, "publish_failed"), "word that nothing could be published")
    nodes.network.restore(STORAGE)
    nodes.until(
        lambda: (found := nodes.read()) and min(found["steps"].values()) > max(before.values()), "newer steps of all"
    )
    (nodes.folder / "stop").touch()
    assert [launcher.wait(120) for launcher in launchers] == [0] * NODES, str(nodes)
    assert not [node for node in range(NODES) if nodes.events(node, "culprit_killed")], "training went on"

    recorded = nodes.on_reader("-c", READ)
    steps = json.loads(recorded.stdout)["steps"]
    assert len(set(steps.values())) == 1, steps
    told = nodes.on_reader("-m", "rankscope", "analyze", f"{ADDRESS}/one")
    assert f"{NODES} ranks" in told.stdout, told.stdout + told.stderr
    assert "incomplete" not in told.stdout
    assert {rank: _local_steps(nodes, int(rank)) for rank in steps} == steps, "no row is lost"


def _local_steps(nodes: Nodes, node: int) -> int:
    count = "SELECT count(*) AS steps FROM steps WHERE duration_ns > 0"
    done = nodes.on_reader("-m", "rankscope", "sql", f"node-{node}/one", count, "--format", "json")
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout)[0]["steps"])
