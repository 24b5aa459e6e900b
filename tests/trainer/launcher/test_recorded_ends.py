"""What the launcher does to its ranks before a new start is recorded: their end is no kill from outside."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerGroup, WorkerSpec

from probes.tape.events import EventWriter, read_events
from probes.tape.rundir import NODE_RANK
from tests.factories import empty_run
from tests.trainer.launcher.stop_actions import NoActions
from tests.waiting import wait_for
from trainer.config.config import Config
from trainer.launcher.agent import Agent
from trainer.launcher.node import Node
from trainer.launcher.nodes.devices import Devices
from trainer.launcher.nodes.rendezvous import NodeRendezvous
from trainer.launcher.processes.rank_processes import RankProcesses
from trainer.launcher.recorded_ends import failure_of
from trainer.launcher.stop_signals import StopSignals

WAITS = "echo ready; while :; do sleep 0.1; done"
RANKS = {
    "echo ready; exec sleep 60": -signal.SIGTERM,
    f"trap '' TERM; {WAITS}": -signal.SIGKILL,  # waits in a call of C
    f"trap 'exit 143' TERM; {WAITS}": 143,  # saved
    f"trap 'exit 1' TERM; {WAITS}": 1,  # its peers are gone
    f"trap 'exit 0' TERM; {WAITS}": 0,  # was through
    "echo ready; exit 3": 3,  # before it was told to end
}
"""What a rank runs -> its exit code."""


class Scripts(RankProcesses):
    """Ranks that run a script of the shell each."""

    def __init__(self, logs: Path, scripts: Sequence[str]) -> None:
        super().__init__(logs, arguments=[], zygote=None)
        self._scripts = scripts

    def _start(self, local_rank: int, environment: Mapping[str, str], stdout: Path, stderr: Path) -> int:
        process = subprocess.Popen(
            ["sh", "-c", self._scripts[local_rank]], stdout=subprocess.PIPE, start_new_session=True
        )
        assert process.stdout is not None
        with process.stdout as output:
            assert output.readline() == b"ready\n"
        self._interpreters[local_rank] = process
        return process.pid


def _without_shutdown_timeout(agent: SimpleElasticAgent, spec: WorkerSpec, exit_barrier_timeout: float = 300) -> None:
    """`SimpleElasticAgent.__init__` as torch 2.11 and older have it."""
    agent._worker_group = WorkerGroup(spec)
    agent._remaining_restarts = spec.max_restarts
    agent._store = None
    agent._exit_barrier_timeout = exit_barrier_timeout
    agent._total_execution_time = 0


@pytest.mark.parametrize("has_shutdown_timeout", [True, False], ids=["torch 2.12 and newer", "torch 2.11 and older"])
def test_ranks_that_are_ended_for_a_new_start_are_recorded_as_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_shutdown_timeout: bool
) -> None:
    if not has_shutdown_timeout:
        monkeypatch.setattr(SimpleElasticAgent, "__init__", _without_shutdown_timeout)
    run, node = empty_run(tmp_path), Node(nproc=len(RANKS))
    run.node_dir(0).mkdir(parents=True)
    # Rank 11 takes all of it; the shells need some for their traps, which run once a `sleep` has ended.
    config = Config.model_validate({"recovery": {"grace_s": 4.0}})
    spec = WorkerSpec(
        role="trainer",
        local_world_size=node.nproc,
        entrypoint="sh",
        rdzv_handler=NodeRendezvous(node, rejoin_s=1.0).handler,
    )
    ranks = Scripts(tmp_path, [*RANKS])
    events = EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=NODE_RANK)
    stop, devices = StopSignals(NoActions(), grace_s=lambda: 4.0), Devices(node.nproc)
    agent = Agent(spec, run=run, config=config, node=node, events=events, ranks=ranks, devices=devices, stop=stop)
    group = agent.get_worker_group()
    pids = ranks.start(attempt=0, environments={rank: {"RANK": str(10 + rank)} for rank in range(node.nproc)})
    for worker in group.workers:
        worker.global_rank, worker.id = 10 + worker.local_rank, pids[worker.local_rank]
    wait_for(lambda: ranks.exit_codes()[5] == 3, "the end of rank 15")
    agent._stop_workers(group)
    assert [*ranks.exit_codes().values()] == [*RANKS.values()]
    agent._stop_workers(group)  # none is left
    events.close()
    said = read_events(events.path)[0]
    stopped = {event["exit_rank"]: event["exit_code"] for event in said if event["kind"] == "rank_stopped"}
    assert stopped == {10: -signal.SIGTERM, 11: -signal.SIGKILL, 12: 143}
    ended = {event["exit_rank"]: event["exit_code"] for event in said if event["kind"] == "rank_exit"}
    assert ended == {13: 1}
    assert len(said) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"message": {"message": "ValueError: bad sample", "extraInfo": {"timestamp": "1795000000"}}}', "bad sample"),
        ('{"message": "killed by its driver", "timestamp": 1795000000}', "killed by its driver"),
        ("", "To enable traceback"),  # a full disk
        ('{"message": {"mess', "To enable traceback"),
        ('{"message": []}', "To enable traceback"),
        ("[]", "To enable traceback"),
    ],
)
def test_what_a_rank_left_of_its_exception_may_be_torn(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rank-00000.error.json"
    path.write_text(text)
    failure = failure_of(local_rank=0, pid=7, code=1, error_file=path)
    assert message in str(failure.message)


def test_a_rank_may_have_left_nothing_of_its_exception(tmp_path: Path) -> None:
    failure = failure_of(local_rank=0, pid=7, code=-9, error_file=tmp_path / "rank-00000.error.json")
    assert "SIGKILL" in failure.message
