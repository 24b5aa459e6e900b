"""Launches a run's workers through torch's own elastic agent and records how they end.

    outcome = launch(run, nproc_per_node=4, max_restarts=3)
    outcome.exit_code

The agent is the engine behind torchrun. Ours differs in one thing: every failed worker and every restart is written as
an event of the node, with the signal or exit code, before the agent acts on it, so that a post-mortem knows who died
first. A restart is a new attempt: TORCHELASTIC_RESTART_COUNT.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry

from probes.events import EventWriter
from probes.rundir import NODE_RANK, RunDir
from trainer.exit_codes import EXIT_FAILED, NOT_RESTARTED

__all__ = ["Outcome", "launch"]

SHUTDOWN_TIMEOUT_S = 30
"""How long workers may take after SIGTERM to finish their step and save, before SIGKILL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended: `reason` is finished, interrupted or failed; `attempts` counts lives of the worker group."""

    reason: str
    exit_code: int
    attempts: int
    message: str = ""


class _RecordingAgent(LocalElasticAgent):
    """The local elastic agent, with an event for each worker that failed and each group that started."""

    def __init__(self, events: EventWriter, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.events = events
        self.attempt = 0
        self.failure = ""
        self.exit_code = EXIT_FAILED

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        self.attempt = self.events.attempt = spec.max_restarts - self._remaining_restarts
        self.events.write("attempt_started", world_size=worker_group.group_world_size * spec.local_world_size)
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            for rank, failure in sorted(result.failures.items(), key=lambda item: item[1].timestamp):
                name = failure.signal_name() if failure.exitcode < 0 else None
                self.events.write(
                    "rank_exit",
                    exit_rank=rank,
                    pid=failure.pid,
                    exit_code=failure.exitcode,
                    signal=None if name in (None, "<N/A>") else name,
                    message=str(failure.message)[:4000],
                )
                if failure.exitcode in NOT_RESTARTED:
                    self._remaining_restarts = 0
                    self.exit_code = failure.exitcode
                self.failure = self.failure or f"rank {rank} ended with {name or f'exit code {failure.exitcode}'}"
        return result


def launch(
    run: RunDir,
    *,
    nproc_per_node: int,
    max_restarts: int,
    worker_arguments: list[str],
    rendezvous_endpoint: str = "localhost:0",
) -> Outcome:
    """Run the workers to their end. Must be called from the main thread: the agent handles signals there."""
    _quiet(run)
    directory = run.node_dir(0)
    directory.mkdir(parents=True, exist_ok=True)
    events = EventWriter(directory / "events.jsonl", attempt=0, rank=NODE_RANK)
    os.environ["RANKSCOPE_RUN_DIR"] = str(run.path.resolve())
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    spec = WorkerSpec(
        role="trainer",
        local_world_size=nproc_per_node,
        entrypoint=sys.executable,
        args=("-u", "-m", "trainer.worker", *worker_arguments),
        rdzv_handler=rendezvous_registry.get_rendezvous_handler(
            RendezvousParameters(
                backend="c10d",
                endpoint=rendezvous_endpoint,
                run_id=run.run_id,
                min_nodes=1,
                max_nodes=1,
                local_addr="localhost",
                timeout=900,
            )
        ),
        max_restarts=max_restarts,
        monitor_interval=0.1,
    )
    agent = _RecordingAgent(
        events,
        spec=spec,
        logs_specs=DefaultLogsSpecs(log_dir=str(_logs(run)), redirects=Std.ALL),
        start_method="spawn",
        exit_barrier_timeout=30,
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
    )
    events.write("run_started", nproc_per_node=nproc_per_node, max_restarts=max_restarts, launcher_pid=os.getpid())
    try:
        outcome = _outcome(agent)
        events.write("run_ended", reason=outcome.reason, exit_code=outcome.exit_code, message=outcome.message)
    finally:
        spec.rdzv_handler.shutdown()
        events.close()
    return outcome


def _outcome(agent: _RecordingAgent) -> Outcome:
    try:
        result = agent.run()
    except SignalException as interruption:
        name = signal.Signals(interruption.sigval).name
        return Outcome(
            reason="interrupted",
            exit_code=128 + interruption.sigval,
            attempts=agent.attempt + 1,
            message=f"{name} received: the ranks finished their step and saved a checkpoint",
        )
    if result.is_failed():
        message = f"{agent.failure or 'a worker failed'}; no restart is left"
        return Outcome(reason="failed", exit_code=agent.exit_code, attempts=agent.attempt + 1, message=message)
    return Outcome(reason="finished", exit_code=0, attempts=agent.attempt + 1)


def _logs(run: RunDir) -> Path:
    logs = run.path / "logs"
    logs.mkdir(exist_ok=True)
    return logs


def _quiet(run: RunDir) -> None:
    """torch's launcher logs go to a file: what they say in pages, our events and findings say in a line."""
    handler = logging.FileHandler(_logs(run) / "launcher.log")
    for name in ("torch.distributed", "torch.distributed.elastic"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
