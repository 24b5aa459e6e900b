"""torch's elastic agent over Rankscope's rank processes: rendezvous with other nodes, start and restart of the ranks.

    agent = Agent(spec, run=run, config=config, node=node, events=events, ranks=ranks, devices=devices, stop=stop)
    result = agent.run()

The agent is the engine behind torchrun: rendezvous, rank numbering, restarts and their budget are torch's. This
subclass differs in three ways:
1. It claims an attempt (`trainer.checkpoint.attempt_fence`) before any rank starts, and puts its number into the store.
2. It records which rank ended first, as an event, before it acts on that.
3. Once a rank has died, the others get only a short grace period, because they cannot finish the current step.

The world is the largest number of available ranks for which the configuration has a valid layout, and the global batch
is divided among them. A node without any of these ranks waits until the world changes, or ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, cast

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import ProcessFailure

from probes.attach.launch.parent_death import VARIABLE as LAUNCHER_PID
from probes.tape import event_kinds
from probes.tape.events import EventWriter
from probes.tape.rundir import RunDir
from probes.tape.signal_names import signal_name
from trainer.checkpoint import attempt_fence as fence
from trainer.checkpoint.disk_tier.manifest import StorageError
from trainer.config.config import Config
from trainer.exit_codes import EXIT_EXCLUDED, EXIT_FAILED, EXIT_MISTAKE, EXIT_PREEMPTED, EXIT_STORAGE, NOT_RESTARTED
from trainer.launcher.device_at_fault import Death, find_culprit, log_tail, xids_by_rank
from trainer.launcher.node import Node
from trainer.launcher.nodes.devices import Devices
from trainer.launcher.nodes.node_exclusion import NODE_FAILURES, exclude_node
from trainer.launcher.processes.rank_processes import RankProcesses
from trainer.launcher.processes.shortage import shortage
from trainer.launcher.recorded_ends import failure_of, mistake_in, record_exit, record_stop, was_stopped
from trainer.launcher.requested_exclusion import refusal
from trainer.launcher.stop_signals import StopSignals
from trainer.layout.resolve import fitting_world
from trainer.stop_budget import rank_grace_s
from trainer.torch_compat import Store
from watch.exclusion.request import RequestFile
from watch.health.oom_kills import OomCounter

__all__ = ["Agent"]

STRANDED_S = 3.0
"""Grace period (s) after a rank died: the others see the broken connection within milliseconds, or never."""
EXITING_S = 5.0
"""Time limit (s) for the process at the other end of a lost connection: the kernel frees its memory before it exits."""
EXIT_BARRIER_S, MARGIN_S = 30.0, 3.0
"""MARGIN_S: ranks that are still there this many seconds after the end of their grace period are killed."""
_OVER = "rankscope/over"
_REGROUP = "rankscope/regroup"
"""Key set before a node stops its ranks to exclude devices. All ranks save and exit as if preempted, then restart."""


class Agent(SimpleElasticAgent):
    """torch's agent for one node. `exit_code` and `failure`: outcome of a failed run."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        run: RunDir,
        config: Config,
        node: Node,
        events: EventWriter,
        ranks: RankProcesses,
        devices: Devices,
        stop: StopSignals,
    ) -> None:
        super().__init__(spec, exit_barrier_timeout=EXIT_BARRIER_S)
        self._grace_s = rank_grace_s(config.recovery.grace_s) + MARGIN_S
        self.run_dir = run
        self.config = config
        self.node, self.devices, self.ranks = node, devices, ranks
        self.events = events
        self._stop = stop
        self.attempts: list[int] = []
        self.failure = ""
        self.exit_code = EXIT_FAILED
        self._requests = RequestFile(run, node.rank)
        self._oom = OomCounter()
        self.continues_without_node = False  # ranks were stopped by agreement; the launch continues with one node less
        self._node_failures = node.failures
        limit = config.recovery.max_failures_per_node
        self._most_node_failures = limit if limit >= 0 else NODE_FAILURES if devices.has_gpus else 0

    @property
    def is_dispensable(self) -> bool:
        """True if the other nodes can continue without this one."""
        return self.node.rank != 0 and _group_size(self._worker_group) > self.node.min_nodes

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        attempt = self._agree_on_attempt(worker_group)
        self.attempts.append(attempt)
        self._oom = OomCounter()
        self.continues_without_node, self.failure, self.exit_code = False, "", EXIT_FAILED
        self.events.attempt = attempt
        num_available = worker_group.workers[0].world_size
        world_size = fitting_world(self.config, num_available)
        self.events.write(
            event_kinds.ATTEMPT_STARTED,
            world_size=world_size,
            node_rank=self.node.rank,
            ranks_left_over=num_available - world_size,
        )
        environments = {
            worker.local_rank: self._environment(worker_group, worker, attempt, world_size)
            for worker in worker_group.workers
            if worker.global_rank < world_size
        }
        with self._stop.raising(None):  # raise no exception for a signal before the pids of the new ranks are known
            return dict(self.ranks.start(attempt=attempt, environments=environments))

    def _agree_on_attempt(self, worker_group: WorkerGroup) -> int:
        """The first node of this round claims the attempt; the others wait for its number."""
        store = _store_of(worker_group)
        if _group_rank(worker_group) == 0:
            try:
                attempt = fence.claim(self.run_dir, nodes=worker_group.group_world_size)
            except OSError as error:
                if shortage(error):
                    raise  # no matter of the disk
                reason = error.strerror or type(error).__name__
                raise StorageError(f"{self.run_dir.path}: the attempt cannot be claimed ({reason})") from None
            store.set("rankscope/attempt", str(attempt))
        return int(store.get("rankscope/attempt"))

    def _environment(self, worker_group: WorkerGroup, worker: Any, attempt: int, world_size: int) -> dict[str, str]:
        spec = worker_group.spec
        return {
            "RANK": str(worker.global_rank),
            "LOCAL_RANK": str(worker.local_rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(min(spec.local_world_size, world_size - worker.global_rank + worker.local_rank)),
            "GROUP_RANK": str(worker_group.group_rank),
            "GROUP_WORLD_SIZE": str(worker_group.group_world_size),
            "MASTER_ADDR": str(worker_group.master_addr),
            "MASTER_PORT": str(worker_group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(spec.max_restarts - self._remaining_restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
            "TORCHELASTIC_ERROR_FILE": str(self._error_file(attempt, worker.global_rank)),
            "RANKSCOPE_RUN_DIR": str(self.run_dir.path),
            "RANKSCOPE_ATTEMPT": str(attempt),
            LAUNCHER_PID: str(os.getpid()),
            "RANKSCOPE_NODE_RANK": str(self.node.rank),
            **self.devices.environment(),
        }

    def _error_file(self, attempt: int, rank: int) -> Path:
        """The file to which torch's `record` writes the exception of a rank."""
        return self.ranks.logs / f"attempt-{attempt}" / f"rank-{rank:05d}.error.json"

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = self.ranks.exit_codes()
        store = _store_of(worker_group)
        if not codes and not store.check([_OVER]):
            return RunResult(state=WorkerState.HEALTHY)  # this node has no ranks; the other nodes report the end
        if all(code == 0 for code in codes.values()):
            store.set(_OVER, "")
            return RunResult(
                state=WorkerState.SUCCEEDED,
                return_values={worker.global_rank: None for worker in worker_group.workers},
            )
        if not any(codes.values()) and self._follow_request(worker_group):
            return RunResult(state=WorkerState.FAILED)
        if any(codes.values()):  # the failed ranks may have lost a connection to a rank that is still ending
            self.ranks.wait_for_exiting(EXITING_S)
            codes = self.ranks.exit_codes()
        # If several ranks ended within one poll, the rank that died of a signal was first, and broken connections ended
        # the others.
        first = sorted(
            (local_rank for local_rank, code in codes.items() if code), key=lambda rank: (codes[rank] or 0) > 0
        )
        if not first:
            return RunResult(state=WorkerState.HEALTHY)
        blamed = self._rank_at_fault(worker_group, {local_rank: codes[local_rank] or 0 for local_rank in first})
        failures = {
            local_rank: self._failed(worker_group, local_rank, codes[local_rank] or 0, is_blamed=local_rank == blamed)
            for local_rank in first
        }
        if blamed is not None:
            self._judge_device(blamed, codes[blamed] or 0, worker_group)
            self._judge_node(codes[blamed] or 0, worker_group)
        if EXIT_PREEMPTED in (self.exit_code, *codes.values()):
            self.ranks.wait(self._grace_s)  # all ranks have agreed to stop and are exiting
        self.ranks.stop(signal.SIGTERM, STRANDED_S)
        for local_rank, code in self.ranks.exit_codes().items():
            if local_rank not in first and was_stopped(code, is_killed=self.ranks.was_killed(local_rank)):
                worker = worker_group.workers[local_rank]
                record_stop(self.events, rank=worker.global_rank, pid=worker.id, code=code)
            elif local_rank not in first and code:
                failures[local_rank] = self._failed(worker_group, local_rank, code, is_blamed=False)
        return RunResult(
            state=WorkerState.FAILED,
            failures={
                worker_group.workers[local_rank].global_rank: failure for local_rank, failure in failures.items()
            },
        )

    def _failed(self, worker_group: WorkerGroup, local_rank: int, code: int, *, is_blamed: bool) -> ProcessFailure:
        """Record how a rank ended, and decide what follows for the run. `is_blamed`: the death counts against the
        rank's device and node."""
        worker = worker_group.workers[local_rank]
        error_file = self._error_file(self.attempts[-1], worker.global_rank)
        failure = failure_of(local_rank=local_rank, pid=int(worker.id), code=code, error_file=error_file)
        name = signal_name(code)
        ended_by = f"Rank {worker.global_rank} ended with {name or f'exit code {code}'}"
        if code == EXIT_PREEMPTED or (code == -signal.SIGTERM and not self.failure):
            # SIGTERM before the rank could handle it: the machine is being preempted.
            regroups = _store_of(worker_group).check([_REGROUP])
            if regroups or _group_size(worker_group) > self.node.min_nodes:
                # A node is preempted, and all ranks agreed on the last step: continue without it, and count no restart.
                self._remaining_restarts += not self.continues_without_node
                self.continues_without_node = True
            else:
                self.exit_code, self._remaining_restarts = EXIT_PREEMPTED, 0
            record_stop(self.events, rank=worker.global_rank, pid=worker.id, code=code)
        else:
            not_started = self.ranks.not_started.get(local_rank)
            self._record_exit(worker, code, message=not_started or str(failure.message), is_blamed=is_blamed)
            if not_started:
                ended_by = f"Rank {worker.global_rank} could not be started: {not_started}"
            if code == EXIT_STORAGE:
                self.exit_code = code  # exit code of the launch, once no restart is left
            if code in NOT_RESTARTED:
                self.exit_code, self._remaining_restarts = code, 0
            if code == EXIT_MISTAKE and (why := mistake_in(self._log(worker.global_rank))):
                self.failure = f"{ended_by}: {why}"
        self.failure = self.failure or ended_by
        return failure

    def _record_exit(self, worker: Any, code: int, *, message: str = "", is_blamed: bool = False) -> None:
        out_of_memory = self._oom.since() if code == -signal.SIGKILL else ""
        record_exit(
            self.events, rank=worker.global_rank, pid=worker.id, code=code, message=message,
            out_of_memory=out_of_memory, is_blamed=is_blamed,
        )  # fmt: skip

    def _log(self, rank: int) -> Path:
        """The file to which a rank of the newest attempt prints its errors."""
        return self.ranks.logs / f"attempt-{self.attempts[-1]}" / f"rank-{rank:05d}.err.log"

    def _rank_at_fault(self, worker_group: WorkerGroup, codes: dict[int, int]) -> int | None:
        """Local rank of the device and node that these deaths count against; None if no device is to blame."""
        attempt, deaths = self.attempts[-1], {}
        ranks = {local_rank: int(worker_group.workers[local_rank].global_rank) for local_rank in codes}
        for local_rank, code in codes.items():
            text = log_tail(self._log(ranks[local_rank])) + log_tail(self._error_file(attempt, ranks[local_rank]))
            killed_for_memory = code == -signal.SIGKILL and bool(self._oom.since())
            deaths[local_rank] = Death(code=code, text=text, out_of_memory=killed_for_memory)
        return find_culprit(deaths, xids_by_rank(self.run_dir, attempt, self.node.rank, ranks))

    def _judge_device(self, local_rank: int, code: int, worker_group: WorkerGroup) -> None:
        """Exclude the device from the next attempt if it failed too often and a smaller world is possible."""
        device = self.devices.in_use[local_rank]
        if not self.devices.count_failure(local_rank) or not self._remaining_restarts:
            return
        others = worker_group.workers[0].world_size - 1
        if not fitting_world(self.config, others):
            return  # the configuration does not fit on fewer ranks: using this device is better than stopping
        self.devices.exclude(device)
        worker_group.spec.local_world_size = len(self.devices.in_use)
        self.events.write(
            event_kinds.EXCLUDED,
            node_rank=self.node.rank,
            device=self.devices.name(device),
            excluded_rank=worker_group.workers[local_rank].global_rank,
            failures=self.devices.failures(device),
            reason=f"{self.devices.failures(device)} deaths, the last by {_ending(code)}",
        )
        if not self.devices.in_use:
            self._remaining_restarts = 0  # no device is left here: this node leaves, the others continue
            self.exit_code = EXIT_EXCLUDED if self.is_dispensable else self.exit_code

    def _judge_node(self, code: int, worker_group: WorkerGroup) -> None:
        """Count a failure of this node. If there were too many and the others can continue, this node leaves; node 0,
        which hosts the rendezvous, never does."""
        self._node_failures += 1
        if not 0 < self._most_node_failures <= self._node_failures:
            return
        others = worker_group.workers[0].world_size - len(worker_group.workers)
        if not self.is_dispensable or not fitting_world(self.config, others):
            return
        reason = f"{self._node_failures} failures, the last by {_ending(code)}"
        exclude_node(self.run_dir, self.node.rank, reason)
        self.events.write(
            event_kinds.EXCLUDED,
            node_rank=self.node.rank,
            device=None,
            excluded_rank=None,
            failures=self._node_failures,
            reason=reason,
        )
        self.exit_code, self._remaining_restarts = EXIT_EXCLUDED, 0
        self.failure = f"This node is excluded after {reason}"

    def _follow_request(self, worker_group: WorkerGroup) -> bool:
        """Exclude devices at the request of `watch`; returns True if the ranks must be restarted without them.

        As when a node joins, all ranks save first, and the restart does not count against the budget of restarts."""
        request = self._requests.poll(self.attempts[-1])
        if request is None:
            return False
        leaving = [worker for worker in worker_group.workers if worker.global_rank in request.ranks]
        if not leaving:
            return False
        is_whole_node = len(leaving) == len(worker_group.workers)
        num_available = worker_group.workers[0].world_size
        refused_because = refusal(self.config, request, num_available=num_available, leaving=len(leaving))
        if is_whole_node and not self.is_dispensable:
            refused_because = f"node {self.node.rank} has no other device, and the run cannot go on without it"
        devices = [self.devices.in_use[worker.local_rank] for worker in leaving]
        names = [self.devices.name(device) for device in devices]
        if refused_because or request.dry_run:
            would = f"dry run: {', '.join(names)} of node {self.node.rank} would have been excluded"
            self.events.write(
                event_kinds.EXCLUSION_WITHHELD,
                node_rank=self.node.rank,
                ranks=list(request.ranks),
                dry_run=not refused_because,
                reason=refused_because or f"{would}: {request.reason}",
            )
            return False
        _store_of(worker_group).set(_REGROUP, "")
        for worker, device, name in zip(leaving, devices, names, strict=True):
            self.devices.exclude(device)
            self.events.write(
                event_kinds.EXCLUDED,
                node_rank=self.node.rank,
                device=name,
                excluded_rank=worker.global_rank,
                failures=0,
                cause=request.cause,
                reason=request.reason,
            )
        worker_group.spec.local_world_size = len(self.devices.in_use)
        if is_whole_node:
            exclude_node(self.run_dir, self.node.rank, request.reason)
            self.exit_code, self._remaining_restarts = EXIT_EXCLUDED, 0
            self.failure = f"This node is excluded: {request.reason.rstrip('.')}"
        else:
            self._remaining_restarts += 1  # torch subtracts 1 for each restart, but a requested restart does not count
        return True

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Stop the ranks before a restart; ranks that still run save first.

        This happens if a node joins, or if the ranks of a node have ended and the node waits to start again. The stop
        is recorded, because otherwise it would look like a kill from outside."""
        running = [local_rank for local_rank, code in self.ranks.exit_codes().items() if code is None]
        self._shutdown()
        codes = self.ranks.exit_codes()
        for local_rank in running:
            worker, code = worker_group.workers[local_rank], codes[local_rank] or 0
            if was_stopped(code, is_killed=self.ranks.was_killed(local_rank)):
                record_stop(self.events, rank=worker.global_rank, pid=worker.id, code=code)
            elif code:
                self._record_exit(worker, code)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0) -> None:
        """Give ranks `_grace_s`, whatever `timeout` torch passes (2.11 and older pass none)."""
        self._stop.wait_announced()
        left_s = self._stop.ranks_left_s()
        number = signal.SIGTERM if death_sig == signal.SIGHUP else death_sig  # a rank would die of SIGHUP unsaved
        self.ranks.stop(signal.Signals(number), self._grace_s if left_s is None else min(self._grace_s, left_s))


def _ending(code: int) -> str:
    return signal_name(code) or "an error of its device"


# torch annotates these as None, which they are only before the rendezvous.


def _store_of(worker_group: Any) -> Store:
    return cast(Store, worker_group.store)


def _group_rank(worker_group: Any) -> int:
    return int(worker_group.group_rank)


def _group_size(worker_group: Any) -> int:
    return int(worker_group.group_world_size or 0)
