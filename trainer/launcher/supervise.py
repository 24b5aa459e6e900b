"""Supervise one node of a run: start watch, launch the ranks, show progress, report the outcome.

exit_code = supervise(run, config, plan=plan, node=Node(nproc=4), faults=[], console=console)
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from rich.markup import escape

from probes.tape import event_kinds
from probes.tape.events import EventWriter
from probes.tape.rundir import NODE_RANK, RunDir
from probes.tape.unwritten import restore_unwritten
from trainer.config.config import Config
from trainer.exit_codes import EXIT_PREEMPTED
from trainer.launcher.node import Node, Outcome
from trainer.launcher.progress import ProgressView
from trainer.launcher.remote_checkpoints import RemoteCheckpoints
from trainer.launcher.watch_keeper import WatchKeeper
from trainer.launcher.zygote import Zygote
from trainer.layout.plan import Plan

if TYPE_CHECKING:
    from rich.console import Console

    from trainer.launcher.nodes.rendezvous import NodeRendezvous

__all__ = ["supervise"]

_TITLES = {
    "preempted": "Preempted",
    "interrupted": "Interrupted",
    "given_up": "Stopped by the guard",
    "fenced": "Replaced by a later launch",
    "left_out": "Node excluded",
    "failed": "Failed",
}
"""How the outcome of a launch is shown, by its reason."""


class _StopRequested(BaseException):
    """SIGTERM or SIGINT before there was any rank to pass it on to."""


class _EarlySignals:
    """Holds SIGTERM and SIGINT back until the launch can act on them; the launcher's own handlers follow."""

    def __init__(self) -> None:
        self._pending = 0
        self._listening = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._received)

    def listen(self) -> None:
        """From here on a signal raises _StopRequested; so does one that came before."""
        self._listening = True
        if self._pending:
            raise _StopRequested(self._pending)

    def _received(self, number: int, frame: FrameType | None) -> None:
        self._pending = number
        if self._listening:
            raise _StopRequested(number)


def supervise(
    run: RunDir,
    config: Config,
    *,
    plan: Plan,
    node: Node,
    faults: list[str],
    console: Console,
    rendezvous: NodeRendezvous | None = None,
) -> int:
    """Train to the end; returns the exit code of `rankscope train`."""
    signals = _EarlySignals()
    os.environ["RANKSCOPE_CONFIG"] = config.model_dump_json()
    arguments = [text for fault in faults for text in ("--fault", fault)]
    directory = run.node_dir(node.rank)
    directory.mkdir(parents=True, exist_ok=True)
    (run.path / "logs").mkdir(exist_ok=True)
    restore_unwritten(run.event_files())
    events = EventWriter(directory / "events.jsonl", attempt=0, rank=NODE_RANK)
    events.write(
        event_kinds.RUN_STARTED,
        node_rank=node.rank,
        nproc_per_node=node.nproc,
        max_restarts=config.recovery.max_restarts,
        launcher_pid=os.getpid(),
    )
    keeper = WatchKeeper(run, node, events)  # first: it begins while torch is imported
    remote = RemoteCheckpoints(run, config.checkpoint, events, is_used=node.rank == 0)
    zygote = None

    def keep_up() -> None:
        keeper.check()
        events.retry()

    def start() -> Outcome:
        from trainer.launcher.launch import launch  # imports torch: only after the checks

        if (failed := remote.begin(console)) is not None:
            return failed
        return launch(run, config, node=node, rendezvous=rendezvous, arguments=arguments, events=events, zygote=zygote)

    try:
        if console.is_terminal:
            console.print("importing torch", style="dim", end="\r")  # the progress bar takes its place
        zygote = Zygote(run.path / "logs" / f"zygote-node{node.rank}.log")
        with ProgressView(run, steps=config.train.steps, plan=plan, console=console, node_rank=node.rank) as view:
            view.every_tick(keep_up)
            outcome = _unless_stopped(signals, start)
            not_sent = remote.end()
            events.write(
                event_kinds.RUN_ENDED,
                node_rank=node.rank,
                reason=outcome.reason,
                exit_code=outcome.exit_code,
                message=outcome.message,
            )
            keeper.end(stop=events.has_unwritten)
    finally:
        if zygote is not None:
            zygote.close()
        keeper.end()
        events.close()
    _print_outcome(run, outcome, console)
    if not_sent:
        console.print(f"[red]{not_sent}[/]", highlight=False, soft_wrap=True)
    if events.saved_to is not None:
        saved = f"Events that the disk did not take are in {events.saved_to}."
        until = "The next launch or `rankscope analyze` on this machine puts them into the run."
        console.print(f"{saved} {until}", highlight=False, soft_wrap=True)
    return outcome.exit_code


def _unless_stopped(signals: _EarlySignals, start: Callable[[], Outcome]) -> Outcome:
    """The outcome of a launch, or of a signal that came before it had started any rank."""
    try:
        signals.listen()
        return start()
    except _StopRequested as request:
        (number,) = request.args
        reason = "preempted" if 128 + number == EXIT_PREEMPTED else "interrupted"
        message = f"Received {signal.Signals(number).name} before any rank had started."
        return Outcome(reason=reason, exit_code=128 + number, message=message)


def _print_outcome(run: RunDir, outcome: Outcome, console: Console) -> None:
    count = outcome.restarts
    restarted = f" after {count} restart{'s' * (count > 1)}" if count else ""
    if outcome.exit_code == 0:
        console.print(f"[green]Finished[/]{restarted}. Next: [bold]rankscope analyze {run.path}[/]", highlight=False)
        return
    title, message = _TITLES[outcome.reason], escape(outcome.message)
    console.print(f"[red]{title}[/]{restarted}. {message}", highlight=False, soft_wrap=True)
    if outcome.reason in ("preempted", "interrupted"):
        console.print(f"To continue: [bold]rankscope train --resume {run.path}[/]", highlight=False, soft_wrap=True)
        return
    console.print(
        f"Next: [bold]rankscope analyze {run.path}[/]. Logs: {run.path / 'logs'}", highlight=False, soft_wrap=True
    )
