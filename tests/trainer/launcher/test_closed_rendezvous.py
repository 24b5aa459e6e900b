"""A rendezvous that another node has closed, as one does whose restarts are spent: the launch ends with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec

from probes.tape.events import EventWriter
from probes.tape.rundir import NODE_RANK, RunDir
from tests.factories import empty_run
from tests.trainer.launcher.stop_actions import NoActions
from trainer.config.config import Config
from trainer.exit_codes import EXIT_FAILED, EXIT_PREEMPTED
from trainer.launcher.agent import Agent
from trainer.launcher.launch import _outcome
from trainer.launcher.node import Node
from trainer.launcher.nodes.devices import Devices
from trainer.launcher.nodes.rendezvous import NodeRendezvous
from trainer.launcher.processes.rank_processes import RankProcesses
from trainer.launcher.stop_signals import StopSignals


def agent_of(run: RunDir, events: EventWriter, stop: StopSignals) -> Agent:
    node = Node(nproc=1)
    handler = NodeRendezvous(node, rejoin_s=1.0).handler
    handler.set_closed()  # type: ignore[no-untyped-call]  # torch: no types
    spec = WorkerSpec(role="trainer", local_world_size=1, entrypoint="trainer.rank.worker", rdzv_handler=handler)
    ranks = RankProcesses(run.path, arguments=[], zygote=None)
    devices = Devices(node.nproc)
    return Agent(spec, run=run, config=Config(), node=node, events=events, ranks=ranks, devices=devices, stop=stop)


@pytest.mark.parametrize("was_asked", [False, True])
def test_a_launch_that_cannot_start_its_ranks_again_says_so(was_asked: bool, tmp_path: Path) -> None:
    """Ranks that stopped as agreed, because another node was asked to stop, are no failure."""
    run = empty_run(tmp_path)
    run.node_dir(0).mkdir(parents=True)
    events = EventWriter(run.node_dir(0) / "events.jsonl", attempt=0, rank=NODE_RANK)
    stop = StopSignals(NoActions(), grace_s=lambda: 20.0)
    agent = agent_of(run, events, stop)
    agent.failure, agent.continues_without_node = "Rank 0 ended with SIGKILL", was_asked
    outcome = _outcome(agent, stop)
    events.close()
    if was_asked:
        assert (outcome.reason, outcome.exit_code) == ("preempted", EXIT_PREEMPTED)
        assert outcome.message.startswith("Another node was asked to stop, and this one ended with it.")
    else:
        assert (outcome.reason, outcome.exit_code) == ("failed", EXIT_FAILED)
        assert outcome.message.startswith("Rank 0 ended with SIGKILL. Another node has ended the run")
