"""A subclass of torch's elastic agent that launches a user's script and records how each of its ranks ends.

    with recorded(exits, stop):             # in `rankscope run`: torch creates its agent within the block
        torchrun(options)

Only the parent knows an exit code or signal: a rank that is killed, or exits with 0 while others wait for it, cannot
record it. The agent behaves like torch's, and reports each end before torch stops the other ranks. Signals are handled
by `StopSignals`, because torch's handler would interrupt the orderly end on a second signal.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch.distributed.elastic.multiprocessing.api as processes
import torch.distributed.launcher.api as launcher
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import PContext, SubprocessContext

from trainer.launcher.nodes.round_stores import follow_rounds
from trainer.launcher.stop_signals import StopSignals
from trainer.torch_compat import TERMINATE_HANDLER

__all__ = ["Exits", "recorded"]


CLOSE_S = 30.0
"""Seconds that torch waits for its ranks after signalling them."""
KILLED_S = 0.5
"""Minimum timeout (seconds) passed to torch for ending its ranks, even if their grace period is over. Torch waits this
long before it kills the ranks, and again this long until the killed ranks have ended.
"""


class Exits(Protocol):
    """Receives the starts and ends of ranks."""

    def started(self, pids: Mapping[int, int]) -> None:
        """The ranks of an attempt have been started. `pids`: {rank: pid}."""

    def ended(self, *, rank: int, pid: int, code: int, is_stopped: bool) -> None:
        """A rank has ended with `code`, which is negative for a signal. `is_stopped`: this launcher stopped it."""


@contextlib.contextmanager
def recorded(exits: Exits, stop: StopSignals, *, many_nodes: bool = False) -> Iterator[None]:
    """Make torch's launcher create agents that report ends to `exits`, and that end on the signals of `stop`.

    With `many_nodes`, nodes may leave and return.
    """

    class Agent(_RecordedAgent):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(exits, stop, *arguments, **options)
            handler = self._worker_group.spec.rdzv_handler
            if many_nodes and handler.get_backend() == "c10d":
                follow_rounds(handler)

    original = launcher.LocalElasticAgent  # type: ignore[attr-defined]  # where torch's launcher looks its agent up
    handler = getattr(processes, TERMINATE_HANDLER)
    launcher.LocalElasticAgent = Agent  # type: ignore[attr-defined]
    setattr(processes, TERMINATE_HANDLER, stop.received)  # torch installs this handler when it starts the ranks
    try:
        yield
    finally:
        launcher.LocalElasticAgent = original  # type: ignore[attr-defined]
        setattr(processes, TERMINATE_HANDLER, handler)


class _RecordedAgent(LocalElasticAgent):
    def __init__(self, exits: Exits, stop: StopSignals, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._exits, self._stop = exits, stop
        self._reported: set[int] = set()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with self._stop.raising(None):  # raise no exception for a signal before the pids of the new ranks are known
            started: dict[int, Any] = super()._start_workers(worker_group)
            self._stop.take_over()
            if self._pcontext is not None:
                workers = worker_group.workers
                self._exits.started({workers[i].global_rank: pid for i, pid in self._pcontext.pids().items()})
                self._report_before_close(self._pcontext, worker_group)
        return started

    def _report_before_close(self, context: PContext, worker_group: WorkerGroup) -> None:
        """Just before torch kills the other ranks, report those that have ended: if a signal ended them, torch did not
        send it.
        """
        close = context.close

        def report_and_close(death_sig: signal.Signals | None = None, timeout: float = CLOSE_S) -> None:
            self._report(worker_group, is_stopped=False)
            self._stop.wait_announced()
            if (left_s := self._stop.ranks_left_s()) is not None:
                timeout = min(timeout, max(left_s, KILLED_S))
            close(death_sig, timeout)  # type: ignore[arg-type]  # torch waits for fractions, too
            if self._stop.number:
                self._report(worker_group, is_stopped=True, only=(-signal.SIGKILL,))

        context.close = report_and_close  # type: ignore[method-assign]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._report(worker_group, is_stopped=False)
        result: RunResult = super()._monitor_workers(worker_group)
        # If a rank has failed, torch has stopped the others by now.
        self._report(worker_group, is_stopped=True)
        return result

    def _stop_workers(self, worker_group: WorkerGroup, *arguments: Any, **options: Any) -> None:
        super()._stop_workers(worker_group, *arguments, **options)
        self._report(worker_group, is_stopped=True)

    def _report(self, worker_group: WorkerGroup, *, is_stopped: bool, only: Sequence[int] = ()) -> None:
        """Report the ranks that have ended since the last report. `only`: exit codes to report; empty: all."""
        codes = _exit_codes(self._pcontext)
        # If several ranks have ended since the last poll, one that died by a signal was first: the others failed on the
        # broken connection.
        for local_rank, (pid, code) in sorted(codes.items(), key=lambda item: item[1][1] >= 0):
            if pid not in self._reported and (not only or code in only):
                self._reported.add(pid)
                rank = worker_group.workers[local_rank].global_rank
                by_us = is_stopped and code in (-signal.SIGTERM, -signal.SIGKILL, -signal.SIGINT)
                self._exits.ended(rank=rank, pid=pid, code=code, is_stopped=by_us)


def _exit_codes(context: PContext | None) -> dict[int, tuple[int, int]]:
    """{local rank: (pid, exit code)} of the ranks that have ended."""
    if not isinstance(context, SubprocessContext):
        return {}
    polled = {
        local_rank: (handler.proc.pid, handler.proc.poll())
        for local_rank, handler in context.subprocess_handlers.items()
    }
    return {local_rank: (pid, code) for local_rank, (pid, code) in polled.items() if code is not None}
