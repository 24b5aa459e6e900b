"""Follow the run recorded by the ranks of a user's script, in their launcher: folder, ends of ranks, findings.

    followed = FollowedRun(console)
    with StopSignals(followed, grace_s=followed.grace_s) as stop, followed.following(stop):
        with recorded(followed, stop): torchrun(options)
    followed.conclude(exit_code=1, reason="failed")     # print the verdict, after the last records were read

The launcher keeps this node's `watch` running, and replaces it if it dies or does not answer
(`trainer.launcher.watch_keeper`).

On the terminal it prints the run's folder when the ranks have chosen it, each finding when `watch` reports it, and at
the end the verdict. It also reports if nothing was recorded because the script failed before training.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from analyzers.hangs.summary import SO_FAR
from analyzers.verdict.verdict import without_unjudged
from probes.attach.launch.announcement import VARIABLE, Announcement, Watch, announced
from probes.attach.started_ranks import has_started_ranks
from probes.settings.section import read
from probes.settings.sections import RecoverySettings
from probes.tape import event_kinds
from probes.tape.events import EventWriter, read_events
from probes.tape.files.held_folder import HeldFolder
from probes.tape.rundir import NODE_RANK, RunDir, RunError
from probes.tape.signal_names import signal_name
from probes.tape.typed_path import analyze_command, as_typed
from store import StoreError
from trainer.launcher.node import Node
from trainer.launcher.stop_signals import StopSignals
from trainer.launcher.terminal.advice_line import advice_line
from trainer.launcher.terminal.live_lines import FindingLines, print_wrapped
from trainer.launcher.terminal.stop_report import STOPPING, VERDICT_INDENT, last_verdict, open_verdict, verdict_lines
from trainer.launcher.watch_keeper import WatchKeeper
from watch.health.oom_kills import OomCounter
from watch.verdicts.diagnosed_run import diagnosed_run

__all__ = ["FollowedRun"]

logger = logging.getLogger("rankscope.trainer")
POLL_S = 0.25
WATCH_CHANGE_S = 10.0
"""Seconds that a watch has for its last ingestion before another one replaces it."""


class FollowedRun:
    """Follows a run in a thread. Implements `Exits` for the agent, and `StopActions` for signals."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._node_rank = 0
        self._folder = tempfile.TemporaryDirectory(prefix="rankscope-")
        self._file = Path(self._folder.name) / "announcement.json"
        self._run: RunDir | None = None
        self._held: HeldFolder | None = None
        self._is_replaced = False
        self._event_bytes = 0
        self._keeper: WatchKeeper | None = None
        self._watch_asked: Watch | None = None
        self._memory = OomCounter()
        self._pids: dict[int, int] = {}
        """{rank: pid} of the ranks that have not ended."""
        self._shown: list[str] = []
        self._is_verdict_last = False
        """True while the verdict printed at a stop is still the last output on the terminal."""
        self.has_started = False
        """True once ranks have been started."""
        self._is_over = False
        """True once the ranks have ended."""
        self._has_concluded = False
        self._findings = FindingLines()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="followed-run", daemon=True)

    @contextlib.contextmanager
    def following(self, stop: StopSignals) -> Iterator[None]:
        """Follow the run while the block runs; then wait for the last ingestion of its watch."""
        os.environ[VARIABLE] = str(self._file)
        self._thread.start()
        try:
            yield
        finally:
            self._is_over = True
            self._stop.set()
            self._thread.join(timeout=10)
            if self._keeper is not None:
                self._keeper.end(stop=True, within_s=stop.records_left_s())

    def grace_s(self) -> float:
        """Seconds from a signal until the remaining processes are killed, as set by the script or `--set`."""
        return (read(RecoverySettings, self._run.manifest()) if self._run is not None else RecoverySettings()).grace_s

    def started(self, pids: Mapping[int, int]) -> None:
        """Note the processes of an attempt."""
        self._pids = {**pids}
        self.has_started = True

    def announce(self, number: int) -> None:
        """Record a stop."""
        name = signal.Signals(number).name
        self._write(announced(self._file), event_kinds.STOP_REQUESTED, node_rank=self._node_rank, signal=name)

    def report(self, number: int) -> None:
        """Print the findings that are open at the time of a stop."""
        self._shown = open_verdict(self._run) if self._run is not None else []
        # Ctrl-C also reaches the ranks, which print tracebacks below the verdict.
        self._is_verdict_last = bool(self._shown) and number != signal.SIGINT
        # start a new line after the terminal's ^C
        begin = [""] if number == signal.SIGINT and self._console.is_terminal else []
        print_wrapped(self._console, *begin, *self._shown, STOPPING, indent=VERDICT_INDENT)

    def end_at_once(self, number: int, reason: str) -> None:
        """Kill ranks and watch, and record the end."""
        found = announced(self._file)
        for rank, pid in self._pids.items():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # torch starts each rank in a new session
                self._write(found, event_kinds.RANK_STOPPED, exit_rank=rank, pid=pid, exit_code=-signal.SIGKILL)
        self._write(
            found, event_kinds.RUN_ENDED, node_rank=self._node_rank, reason="interrupted", exit_code=128 + number,
            message=f"Received {signal.Signals(number).name}. {reason}",
        )  # fmt: skip
        if self._keeper is not None:
            self._keeper.kill()
        self._folder.cleanup()
        if not self._is_over:
            self._print(f"Killed the remaining processes. {reason}")
        if self._run is not None:
            if not self._has_concluded:
                print_wrapped(self._console, *last_verdict(self._run), indent=VERDICT_INDENT)
            self._print_uncut(self._report_line(self._run))

    def ended(self, *, rank: int, pid: int, code: int, is_stopped: bool) -> None:
        """Record the end of a rank (a method of `Exits`)."""
        self._pids.pop(rank, None)
        # A rank that ended in another way may have printed an error below the verdict.
        self._is_verdict_last &= code in (0, -signal.SIGTERM, -signal.SIGKILL)
        found = announced(self._file)
        if found is not None and has_started_ranks(RunDir(found.run), found.attempt, rank, pid):
            return  # the handler of the stop signal has already recorded how the ranks ended
        name = signal_name(code) or None
        if is_stopped:
            self._write(found, event_kinds.RANK_STOPPED, exit_rank=rank, pid=pid, exit_code=code)
            return
        self._write(
            found, event_kinds.RANK_EXIT, exit_rank=rank, pid=pid, exit_code=code, signal=name, message="",
            out_of_memory=self._memory.since() or None if code == -signal.SIGKILL else None, blamed=False,
        )  # fmt: skip

    def conclude(self, *, exit_code: int, reason: str) -> bool:
        """Record the end of the launch, then print the verdict, the evidence and the next step.

        If they were already printed at a stop, only the verdict is repeated, unless it is still the last output.

        Returns False if the ranks never recorded anything.
        """
        found = announced(self._file)
        self._folder.cleanup()
        if self._run is None:
            return False
        if exit_code:  # after a clean end, local rank 0 of the script has written the event
            self._write(found, event_kinds.RUN_ENDED, node_rank=self._node_rank, reason=reason, exit_code=exit_code)
        final = [line.replace(SO_FAR, "") for line in self._shown[:1]]
        lines = [] if self._is_verdict_last else final or self._verdict(self._run)
        self._has_concluded = True
        for line in lines:
            print_wrapped(self._console, line, indent=VERDICT_INDENT)
        self._print_uncut(self._report_line(self._run))
        return True

    def _verdict(self, run: RunDir) -> list[str]:
        try:
            with diagnosed_run(run, is_over=True) as (_, diagnosis):
                pass
        except (RunError, StoreError, OSError) as error:
            return [f"The run cannot be analyzed: {escape(str(error))}."]
        worst = diagnosis.fired[0] if diagnosis.fired else None
        return verdict_lines(worst, without_unjudged(diagnosis.verdict), as_typed(run.path))

    def _report_line(self, run: RunDir) -> str:
        return f"[bold]Report[/]   {escape(analyze_command(run.path))}"

    def _print(self, line: str) -> None:
        self._is_verdict_last = False
        print_wrapped(self._console, line)

    def _print_uncut(self, line: str) -> None:
        """Print a line for copying without wrapping, since a line break within a path would be copied, too."""
        self._console.print(line, highlight=False, soft_wrap=True)

    def _follow(self) -> None:
        last = False
        while not last:
            last = self._stop.wait(POLL_S)
            found = announced(self._file)
            if found is None:
                continue
            if self._run is None:
                self._run = RunDir(found.run)
                self._event_bytes = _size(self._node_events(self._run))  # an earlier launch has printed these events
                self._print_uncut(f"Recording to [bold]{escape(as_typed(found.run))}[/]")
                # the script's output fills this terminal, so point to the live table for another one
                if self._console.is_terminal:
                    top = f"rankscope top {escape(shlex.quote(as_typed(found.run)))}"
                    self._print_uncut(f"[dim]Ranks live, in another terminal: {top}[/]")
            if self._held is None:
                self._held = HeldFolder(self._run.path)
            if (problem := self._held.problem()) and not self._is_replaced:
                self._is_replaced = True
                self._print(f"[red]{escape(problem[:1].upper() + problem[1:])}. The ranks record into the old one.[/]")
            if not self._is_replaced:
                self._print_news(self._run)
                self._keep_watch(self._run, found)

    def _keep_watch(self, run: RunDir, found: Announcement) -> None:
        """Start the watch that the ranks requested, and replace it if needed."""
        try:
            if self._keeper is not None and found.watch not in (None, self._watch_asked) and not self._stop.is_set():
                # Nodes joined or left. The watches of the current nodes communicate, perhaps at a new address.
                self._keeper.end(stop=True, within_s=WATCH_CHANGE_S)
                if self._stop.is_set():
                    return
                self._keeper = None
            if self._keeper is None and found.watch is not None:
                self._watch_asked = found.watch
                if found.watch.node_rank != self._node_rank:
                    self._node_rank = found.watch.node_rank
                    self._event_bytes = _size(self._node_events(run))
                run.node_dir(self._node_rank).mkdir(parents=True, exist_ok=True)
                node = Node(
                    nproc=1,  # any number will do, because `watch` does not read it
                    rank=found.watch.node_rank,
                    max_nodes=found.watch.num_nodes,
                    endpoint=found.watch.digests,
                )
                events = EventWriter(self._node_events(run), attempt=found.attempt, rank=NODE_RANK)
                self._keeper = WatchKeeper(run, node, events)
            elif self._keeper is not None:
                self._keeper.check()
        except OSError as error:  # full disk or limit of processes: try again later
            logger.warning("the watch process cannot be started: %s", error)

    def _print_news(self, run: RunDir) -> None:
        events, self._event_bytes, _ = read_events(self._node_events(run), self._event_bytes)
        for event in events:
            line = advice_line(event) if event["kind"] == event_kinds.ADVICE else self._findings.line(event)
            if line:
                self._print(line)

    def _write(self, found: Announcement | None, kind: str, **detail: Any) -> None:
        """Write an event. If a rank ended before any rank recorded, there is no run to write it to."""
        if found is None:
            return
        directory = RunDir(found.run).node_dir(self._node_rank)
        directory.mkdir(parents=True, exist_ok=True)
        events = EventWriter(directory / "events.jsonl", attempt=found.attempt, rank=NODE_RANK)
        try:
            events.write(kind, **detail)
        finally:
            events.close()

    def _node_events(self, run: RunDir) -> Path:
        return run.node_dir(self._node_rank) / "events.jsonl"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
