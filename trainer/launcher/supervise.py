"""Supervise one node of a run: start watch, launch the ranks, show progress, report the outcome.

exit_code = supervise(run, config, plan=plan, node=Node(nproc=4), faults=[], console=console)
"""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.markup import escape

from probes.tape import event_kinds
from probes.tape.events import EventWriter
from probes.tape.rundir import NODE_RANK, RunDir
from probes.tape.typed_path import analyze_command, as_typed
from probes.tape.unwritten import restore_unwritten
from trainer.config.config import Config
from trainer.exit_codes import EXIT_FAILED, EXIT_MISTAKE, EXIT_PREEMPTED
from trainer.launcher.node import Node, Outcome
from trainer.launcher.processes.rank_processes import RankProcesses
from trainer.launcher.processes.shortage import shortage
from trainer.launcher.processes.zygote import Zygote
from trainer.launcher.remote_checkpoints import RemoteCheckpoints
from trainer.launcher.stop_signals import StopSignals
from trainer.launcher.terminal.live_lines import print_wrapped
from trainer.launcher.terminal.progress import ProgressView
from trainer.launcher.terminal.stop_report import STOPPING, VERDICT_INDENT, open_verdict
from trainer.launcher.watch_keeper import WatchKeeper
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
"""Text for the outcome of a launch, by its reason."""
SAVED_NOTHING = "No checkpoint was saved at this stop: a resume starts from the newest checkpoint, or else from step 0."


class _StopRequested(BaseException):
    """A signal arrived before any rank was started."""


class _Stop:
    """Actions of `train` on a signal: record it, print findings, end ranks and watch when due."""

    def __init__(
        self, run: RunDir, node: Node, events: EventWriter, keeper: WatchKeeper, ranks: RankProcesses, console: Console
    ) -> None:
        self._run, self._node, self._events, self._keeper = run, node, events, keeper
        self._ranks, self._console = ranks, console
        self.outcome: Outcome | None = None
        """Outcome of the launch, once its ranks have ended."""
        self.view: ProgressView | None = None

    def announce(self, number: int) -> None:
        name = signal.Signals(number).name
        self._events.write(event_kinds.STOP_REQUESTED, node_rank=self._node.rank, signal=name)

    def report(self, number: int) -> None:
        print_wrapped(self._console, *open_verdict(self._run), STOPPING, indent=VERDICT_INDENT)

    def end_at_once(self, number: int, reason: str) -> None:
        self._ranks.kill()
        outcome = self.outcome or _stopped(number, f"{reason} {SAVED_NOTHING}")
        _record_end(self._events, self._node, outcome)
        self._keeper.kill()
        if self.view is not None:
            self.view.clear()
        self._console.show_cursor()
        _print_outcome(self._run, outcome, self._console)


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
    os.environ["RANKSCOPE_CONFIG"] = config.model_dump_json()
    directory = run.node_dir(node.rank)
    directory.mkdir(parents=True, exist_ok=True)
    (run.path / "logs").mkdir(exist_ok=True)
    restore_unwritten(run.event_files())
    events = EventWriter(directory / "events.jsonl", attempt=0, rank=NODE_RANK)
    keeper = WatchKeeper(run, node, events)  # created first, so that `watch` starts while torch is being imported
    ranks = RankProcesses(run.path / "logs", arguments=[text for fault in faults for text in ("--fault", fault)])
    remote = RemoteCheckpoints(run, config.checkpoint, events, is_used=node.rank == 0)
    zygote = None
    actions = _Stop(run, node, events, keeper, ranks, console)
    stop = StopSignals(actions, grace_s=lambda: config.recovery.grace_s)

    def keep_up() -> None:
        keeper.check()
        events.retry()

    def start() -> Outcome:
        from trainer.launcher.launch import launch  # imports torch: only after the checks

        if (failed := remote.begin(console)) is not None:
            return failed
        return launch(run, config, node=node, rendezvous=rendezvous, events=events, stop=stop, ranks=ranks)

    with stop:
        try:
            # From here on, signals are handled by `stop`, so that the end of a started run is recorded. An earlier
            # signal ends this process immediately.
            events.write(
                event_kinds.RUN_STARTED,
                node_rank=node.rank,
                nproc_per_node=node.nproc,
                max_restarts=config.recovery.max_restarts,
                launcher_pid=os.getpid(),
            )
            if console.is_terminal:
                console.print("importing torch", style="dim", end="\r")  # the progress bar takes its place
            zygote = ranks.zygote = Zygote(run.path / "logs" / f"zygote-node{node.rank}.log")
            stop.listen()
            with ProgressView(
                run,
                steps=config.train.steps,
                plan=plan,
                console=console,
                node_rank=node.rank,
                has_faults=bool(faults),
            ) as view:
                actions.view = view
                view.every_tick(keep_up)
                outcome = actions.outcome = _unless_stopped(stop, start)
                not_sent = remote.end()
                _record_end(events, node, outcome)
                keeper.end(stop=events.has_unwritten, within_s=stop.records_left_s())
        except Exception as error:
            if actions.outcome is None:  # record the run's end after any error, such as a missing package
                code = EXIT_MISTAKE if isinstance(error, ImportError) else EXIT_FAILED
                _record_end(
                    events,
                    node,
                    Outcome(reason="failed", exit_code=code, message=shortage(error) or _error_line(error)),
                )
            raise
        finally:
            if zygote is not None:
                zygote.close()
            keeper.end(within_s=stop.records_left_s())
            events.close()
        _print_outcome(run, outcome, console)
    if not_sent:
        console.print(f"[red]{not_sent}[/]", highlight=False, soft_wrap=True)
    if events.saved_to is not None:
        saved = f"Events that could not be written to the disk are in {events.saved_to}."
        until = "The next launch or `rankscope analyze` on this machine puts them into the run."
        console.print(f"{saved} {until}", highlight=False, soft_wrap=True)
    stop.end_process(outcome.exit_code)
    return outcome.exit_code


def _error_line(error: Exception) -> str:
    """First line of an error, with its type if that adds information."""
    first = (str(error).strip().splitlines() or [""])[0]
    return first if isinstance(error, ImportError) else f"{type(error).__name__}: {first}"


def _unless_stopped(stop: StopSignals, start: Callable[[], Outcome]) -> Outcome:
    """Launch and return the outcome; if a signal arrives before any rank was started, the outcome of the stop."""
    try:
        with stop.raising(_StopRequested):
            return start()
    except _StopRequested as request:
        (number,) = request.args
        return _stopped(number, "No rank had started.")


def _stopped(number: int, what: str) -> Outcome:
    """Outcome of a launch that was ended by a signal."""
    reason = "preempted" if 128 + number == EXIT_PREEMPTED else "interrupted"
    return Outcome(reason=reason, exit_code=128 + number, message=f"Received {signal.Signals(number).name}. {what}")


def _record_end(events: EventWriter, node: Node, outcome: Outcome) -> None:
    events.write(
        event_kinds.RUN_ENDED,
        node_rank=node.rank,
        reason=outcome.reason,
        exit_code=outcome.exit_code,
        message=outcome.message,
    )


def _print_outcome(run: RunDir, outcome: Outcome, console: Console) -> None:
    count, shown = outcome.restarts, escape(as_typed(run.path))
    analyze = escape(analyze_command(run.path))
    restarted = f" after {count} restart{'s' * (count > 1)}" if count else ""
    if outcome.exit_code == 0:
        console.print(f"[green]Finished[/]{restarted}. Next: [bold]{analyze}[/]", highlight=False, soft_wrap=True)
        return
    title, message = _TITLES[outcome.reason], escape(outcome.message)
    print_wrapped(console, f"[red]{title}[/]{restarted}. {message}")
    if outcome.reason in ("preempted", "interrupted"):
        quoted = escape(shlex.quote(as_typed(run.path)))
        console.print(f"To continue: [bold]rankscope train --resume {quoted}[/]", highlight=False, soft_wrap=True)
        return
    console.print(f"Next: [bold]{analyze}[/]. Logs: {shown}/logs", highlight=False, soft_wrap=True)
