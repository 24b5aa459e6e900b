"""Launch the ranks of one node and wait for the end of the run.

    outcome = launch(run, config, node=Node(nproc=4), rendezvous=None, events=events, stop=stop, ranks=ranks)
    outcome.exit_code

`trainer.launcher.agent` does the work; this module reports the outcome.
"""

from __future__ import annotations

import logging
import os
import signal

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousConnectionError

from probes.tape import event_kinds
from probes.tape.events import EventWriter, read_events
from probes.tape.rundir import RunDir
from trainer.checkpoint.disk_tier.manifest import StorageError
from trainer.config.config import Config
from trainer.exit_codes import EXIT_EXCLUDED, EXIT_FAILED, EXIT_FENCED, EXIT_GIVEN_UP, EXIT_PREEMPTED, EXIT_STORAGE
from trainer.host_threads import threads_of_rank
from trainer.launcher.agent import Agent
from trainer.launcher.node import Node, Outcome
from trainer.launcher.nodes.devices import Devices
from trainer.launcher.nodes.rendezvous import NodeRendezvous
from trainer.launcher.processes.rank_processes import RankProcesses
from trainer.launcher.stop_signals import StopSignals

__all__ = ["launch"]

MONITOR_INTERVAL_S = 0.05
_REASONS = {EXIT_GIVEN_UP: "given_up", EXIT_FENCED: "fenced", EXIT_EXCLUDED: "left_out"}
_ENDS = {
    EXIT_FENCED: "A later launch has taken over the run.",
    EXIT_EXCLUDED: "The other nodes continue.",
    EXIT_STORAGE: "The disk is full or does not answer; no checkpoint was changed. Repair it, then resume.",
    EXIT_GIVEN_UP: "To try again with a fresh budget: --resume RUN --force.",
}
_STOPS = (event_kinds.PREEMPTED, event_kinds.INTERRUPTED)
_FAILED = "A rank failed"


def launch(
    run: RunDir,
    config: Config,
    *,
    node: Node,
    rendezvous: NodeRendezvous | None,
    events: EventWriter,
    stop: StopSignals,
    ranks: RankProcesses,
) -> Outcome:
    """Run the ranks to their end. Must be called from the main thread: signals are handled there."""
    _quiet(run, node.rank)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_of_rank(config, node.nproc)))
    rendezvous = rendezvous or NodeRendezvous(node, rejoin_s=config.recovery.rejoin_s)
    spec = WorkerSpec(
        role="trainer",
        local_world_size=node.nproc,
        entrypoint="trainer.rank.worker",
        rdzv_handler=rendezvous.handler,
        max_restarts=config.recovery.max_restarts if config.recovery.enabled else 0,
        monitor_interval=MONITOR_INTERVAL_S,
    )
    devices = Devices(node.nproc, max_failures=config.recovery.max_failures_per_device)
    agent = Agent(spec, run=run, config=config, node=node, events=events, ranks=ranks, devices=devices, stop=stop)
    outcome = None
    try:
        outcome = _outcome(agent, stop)
        return outcome
    finally:
        # A preempted or excluded node must not close the rendezvous for the others.
        is_over = outcome is None or outcome.reason not in ("preempted", "interrupted", "left_out")
        if is_over or not agent.is_dispensable:
            spec.rdzv_handler.shutdown()


def _outcome(agent: Agent, stop: StopSignals) -> Outcome:
    try:
        with stop.raising(_stopped):
            result = agent.run()
    except SignalException as interruption:
        name = signal.Signals(interruption.sigval).name
        preempted = interruption.sigval == signal.SIGTERM
        return Outcome(
            reason="preempted" if preempted else "interrupted",
            exit_code=128 + interruption.sigval,
            restarts=_restarts(agent),
            message=f"Received {name}. {_what_was_saved(agent)}",
        )
    except StorageError as error:
        before = f"{agent.failure}. " if agent.failure else ""
        message = f"{before}{error}. Nothing was changed: free or repair the disk, then resume."
        return Outcome(reason="failed", exit_code=EXIT_STORAGE, restarts=_restarts(agent), message=message)
    except RendezvousConnectionError as error:
        message = f"{agent.failure or _FAILED}. {error}. Resume at another --rdzv-endpoint."
        return Outcome(reason="failed", exit_code=EXIT_FAILED, restarts=_restarts(agent), message=message)
    except RendezvousClosedError:
        # the node that was asked to stop hosted the rendezvous, so nothing can continue
        if agent.continues_without_node:
            message = f"Another node was asked to stop, and this one ended with it. {_what_was_saved(agent)}"
            return Outcome(reason="preempted", exit_code=EXIT_PREEMPTED, restarts=_restarts(agent), message=message)
        message = f"{agent.failure or _FAILED}. Another node has ended the run, so that it cannot start again."
        return Outcome(reason="failed", exit_code=EXIT_FAILED, restarts=_restarts(agent), message=message)
    if result is not None and not result.is_failed():
        return Outcome(reason="finished", exit_code=0, restarts=_restarts(agent))
    if agent.exit_code == EXIT_PREEMPTED:
        message = f"{agent.failure or 'A rank was asked to stop'}. {_what_was_saved(agent)}"
        return Outcome(reason="preempted", exit_code=EXIT_PREEMPTED, restarts=_restarts(agent), message=message)
    end = _ENDS.get(agent.exit_code, "No restart is left.")
    message = f"{agent.failure or _FAILED}. {end}"
    reason = _REASONS.get(agent.exit_code, "failed")
    return Outcome(reason=reason, exit_code=agent.exit_code, restarts=_restarts(agent), message=message)


def _what_was_saved(agent: Agent) -> str:
    """Text on what was saved at a stop, from the exit codes and records of this node's ranks, and from the records of
    rank 0."""
    codes = agent.ranks.exit_codes().values()
    try:
        if codes and all(code in (0, EXIT_PREEMPTED) for code in codes) and not _left_without_checkpoint(agent):
            return "The ranks finished their step and saved a checkpoint."
    except OSError as error:
        return f"What was saved is unknown: {error.strerror}."
    return "No checkpoint was saved at this stop: a resume starts from the newest checkpoint, or else from step 0."


def _left_without_checkpoint(agent: Agent) -> bool:
    """True if a rank of this node, or rank 0, recorded that it stopped without a checkpoint."""
    folders = [agent.run_dir.rank_dir(agent.attempts[-1], rank) for rank in {0, *agent.ranks.ranks}]
    events = (event for folder in folders for event in read_events(folder / "events.jsonl")[0])
    return any(event["kind"] in _STOPS and event.get("checkpoint_step") is None for event in events)


def _restarts(agent: Agent) -> int:
    return max(0, len(agent.attempts) - 1)


def _stopped(number: int) -> SignalException:
    return SignalException(f"signal {number}", sigval=signal.Signals(number))


def _quiet(run: RunDir, node_rank: int) -> None:
    """Redirect the logs of torch's launcher to a file, because events and findings say the same in one line."""
    logs = run.path / "logs"
    logs.mkdir(exist_ok=True)
    handler = logging.FileHandler(logs / ("launcher.log" if node_rank == 0 else f"launcher-node{node_rank}.log"))
    for name in ("torch.distributed", "torch.distributed.elastic"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
