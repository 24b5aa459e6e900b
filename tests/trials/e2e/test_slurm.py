"""The recipe on Slurm's own daemons: submitted, preempted, requeued without a host, a node lost, evidence collected."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from analyzers.fleet.exclude_list import exclude_list
from analyzers.fleet.fleet import fleet
from analyzers.fleet.history import Incident, RunHistory
from probes.tape.events import read_events
from probes.tape.rundir import RunDir
from store import Store
from tests.e2e.launched import LAYOUTS, SOURCE, TINY, analysis_of, train
from tests.trials.e2e.slurm_cluster import DEADLINE_S, SlurmCluster, why_not
from tests.waiting import wait_for

RECIPE = str(Path(__file__).parents[3] / "examples" / "launch" / "slurm.sbatch")
NODES = ("n1", "n2", "n3", "n4")
STEPS = 120
SETTINGS = (f"train.steps={STEPS}", "recovery.hang_floor_s=1000", "recovery.grace_s=10")
PACE = "slow_data@step=1,rank=0,seconds=1"
"""In the first attempt, which is preempted long before `GATE`; a fault fires once in a run."""
GATE = "hang@step=100,rank=0"
"""Where the second attempt stands still until it loses a node."""


pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.timeout(900)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path, NODES) as running:
        yield running


def test_slurm_preemption_and_a_lost_node_change_no_bit(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = _Job(cluster, tmp_path)
    assert job.nodes() == "n[1-2]"
    job.wait_for_step(3)

    # A job of a higher priority takes all nodes: Slurm sends SIGTERM and requeues.
    urgent = cluster.submit("--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=true")
    cluster.wait_for_state(urgent, "COMPLETED")
    cluster.wait_for_state(job.number, "PENDING")
    (first_end,) = job.ends()
    assert first_end["reason"] == "preempted"
    assert "The ranks finished their step and saved a checkpoint." in first_end["message"]

    option, _, hosts = exclude_list(fleet(_past()), "slurm").partition("=")
    assert option == "--exclude"
    job.start_now(f"ExcNodeList={hosts}")
    assert job.nodes() == "n[2-3]"
    wait_for(job.stands_still, "the gate", cluster, DEADLINE_S)
    cluster.kill("n3")
    cluster.wait_for_state(job.number, "PENDING")
    assert "saved a checkpoint" not in job.ends()[-1]["message"]
    job.start_now()
    assert job.nodes() == "n[2,4]"
    at = f"--jobid={job.number}", "--overlap", "--nodes=2", "--ntasks-per-node=1"
    cluster.ask("srun", *at, "rankscope", "collect-evidence", "--into", str(tmp_path / "evidence"))
    asked = _slurm_texts(tmp_path / "evidence")
    assert {host: f"JobId={job.number}" in text for host, text in asked.items()} == {"n2": True, "n4": True}
    assert cluster.wait_for_state(job.number, "COMPLETED")["Restarts"] == "2"
    assert job.ends()[-1]["reason"] == "finished"

    (tmp_path / "whole").mkdir()
    whole = train(tmp_path / "whole", "two", settings=SETTINGS)
    assert _trained(job.run) == _trained(whole.run)
    found = analysis_of(job.log)
    assert [f["summary"] for f in found["findings"] if f["status"] in ("fired", "suspect")] == []
    ends = [(end["cause"], end["host"]) for end in found["run"]["logs"]["earlier_ends"]]
    assert ends == [("preempted", "n1"), ("node_failed", "n3")]
    (lost,) = (f for f in analysis_of(job.run.path)["findings"] if f["cause"] == "node_failed")
    assert (lost["attempt"], lost["evidence"]["host"]) == (1, "n3")


class _Job:
    """The recipe, submitted with one rank a node."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        (folder / "text.txt").write_text(SOURCE * 4)
        settings = [*TINY, *LAYOUTS["two"], *SETTINGS, f"data.path=['{folder / 'text.txt'}']"]
        (folder / "my.toml").write_text("")
        changed = [part for setting in settings for part in ("--set", setting)]
        cluster.environment |= {"NPROC_PER_NODE": "1", "OMP_NUM_THREADS": "1", "RANKSCOPE_FAIL_LOUD": "1"}
        self.cluster = cluster
        self.number = cluster.submit("--gpus-per-node=0", RECIPE, "my.toml", *changed, "--fault", PACE, "--fault", GATE)
        self.log = folder / f"slurm-{self.number}.log"
        self._latest = folder / "runs" / self.number / "latest"

    @property
    def run(self) -> RunDir:
        return RunDir.open(self._latest)

    def nodes(self) -> str:
        """Nodes on which it runs."""
        return self.cluster.wait_for_state(self.number, "RUNNING")["NodeList"]

    def start_now(self, *changes: str) -> None:
        """Slurm lets a requeued job wait for two minutes."""
        self.cluster.ask("scontrol", "update", f"JobId={self.number}", "StartTime=now", *changes)

    def last_step(self) -> int:
        """Newest step that rank 0 has trained."""
        if not self._latest.exists() or not self.run.stores():
            return 0
        with Store.open(self.run) as store:
            return int(store.rows("SELECT coalesce(max(step), 0) FROM steps WHERE rank = 0 AND committed")[0][0])

    def wait_for_step(self, step: int) -> None:
        wait_for(lambda: self.last_step() >= step, f"step {step}", self.cluster, DEADLINE_S)

    def stands_still(self) -> bool:
        """True once rank 0 hangs at the gate."""
        events = (e for _, _, folder in self.run.rank_dirs() for e in read_events(folder / "events.jsonl")[0])
        return any(e["kind"] == "fault_injected" and e["fault"] == "hang" for e in events)

    def ends(self) -> list[dict[str, str]]:
        """How the launches of node 0 ended."""
        events = read_events(self.run.node_dir(0) / "events.jsonl")[0]
        return [event for event in events if event["kind"] == "run_ended"]


def _past() -> list[RunHistory]:
    """Runs of ten hours, each on one of thirty nodes: n1 hung in each of its own."""
    hung = (Incident(kind="hang", cause="", host="n1"),)
    return [
        RunHistory(run_id=f"n{node}-{number}", hours=10.0, hosts=(f"n{node}",), incidents=hung if node == 1 else ())
        for node in range(1, 31)
        for number in range(10)
    ]


def _trained(run: RunDir) -> list[tuple[int, list[int], list[float]]]:
    """(step, its batches, its losses): one batch and one loss, also of a step that was trained again."""
    with Store.open(run) as store:
        return store.rows(
            "SELECT step, list(DISTINCT batch_index), list(DISTINCT loss) FROM steps WHERE rank = 0 AND committed "
            "GROUP BY step ORDER BY step"
        )


def _slurm_texts(evidence: Path) -> dict[str, str]:
    """{host: what Slurm said of the job} of the archives."""
    texts = {}
    for archive in evidence.iterdir():
        with tarfile.open(archive) as members:
            (name,) = (name for name in members.getnames() if name.endswith("slurm.txt"))
            file = members.extractfile(name)
            assert file is not None
            texts[name.partition("/")[0]] = file.read().decode()
    return texts
