"""Progress of a run under `rankscope train`: a bar and the table of ranks on a terminal, plain lines elsewhere.

The bar reads rank 0's tape and the node's events like any other reader: it does not involve the ranks, and the last
step shown is the last step recorded.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

from analyzers.deaths.recovery_response import Response
from analyzers.report.terminal.time_left import TimeLeftColumn
from analyzers.wording import counted
from probes.tape import event_kinds
from probes.tape.events import read_events
from probes.tape.format.reader import TapeError, read_segment, segment_paths
from probes.tape.format.schema import UNSET
from probes.tape.format.writer import COMPLETE
from probes.tape.rundir import RunDir, RunError
from trainer.launcher.terminal.advice_line import advice_line
from trainer.launcher.terminal.live_lines import FindingLines, print_wrapped
from trainer.layout.plan import Plan

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["PLAIN_LINE_S", "LiveRanks", "ProgressView"]

REFRESH_S = 0.25
MIN_TABLE_HEIGHT = 30
"""Minimum terminal height in lines for the table of ranks below the bar. It leaves space for reports above the bar."""
MIN_BAR_WIDTH = 118
"""Minimum terminal width in columns for the bar next to the figures. Below `MIN_MEMORY_WIDTH`, memory is left out,
too."""
MIN_MEMORY_WIDTH = 94
PLAIN_LINE_S = 5.0
"""Seconds between two plain lines, so that the log of a long run stays readable."""
REST_S = 2.0
MAX_REST_S = 15.0
REST_PER_READING = 50
"""Ratio of the pause after a reading to the reading's CPU time, and the bounds of the pause in seconds."""
READINGS_AFTER_EVENT = 3
"""Readings after an event at intervals of `REST_S`: `watch` stores it some seconds after it was written."""
MAX_LINES = 20
JOIN_S = 5.0


class ProgressView:
    """Follows a run in a separate thread between `__enter__` and `__exit__`."""

    def __init__(
        self, run: RunDir, *, steps: int, plan: Plan, console: Console, node_rank: int = 0, has_faults: bool = False
    ) -> None:
        """`has_faults`: also show faults that are injected into ranks other than 0."""
        self.run = run
        self.node_rank = node_rank
        self.console = console
        self.steps = steps
        self.plan = plan
        self._findings = FindingLines()
        self._reader = _StepReader(run, has_faults=has_faults)
        self._node_events = run.node_dir(node_rank) / "events.jsonl"
        self._event_bytes = _size(self._node_events)  # an earlier launch has already shown these events
        self._plain_at = 0.0
        self._plain_step = -1.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)
        self._live = console.is_terminal
        self._drawn: Live | None = None
        self._ranks: LiveRanks | None = None
        self._num_ranks = plan.world_size
        """World size of the newest attempt; smaller than planned if nodes or devices are missing."""
        bar = [BarColumn(bar_width=24)] if console.width >= MIN_BAR_WIDTH else []
        self._bar = Progress(
            TextColumn("{task.description}"),
            *bar,
            TextColumn("{task.completed:>5.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[figures]}"),
            TimeLeftColumn(),
            console=console,
        )
        self._task = self._bar.add_task("starting", total=steps, figures="")
        self._replays: dict[Any, dict[str, Any]] = {}
        """{step: replay event} read in the last refresh. The rollback of the step may be read only in the next
        refresh."""
        self._tick: Callable[[], None] = lambda: None

    def every_tick(self, action: Callable[[], None]) -> None:
        """At each refresh, call `action`, with which the launcher keeps `watch` alive."""
        self._tick = action

    def __enter__(self) -> ProgressView:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def clear(self) -> None:
        """Erase the bar and the table, for a process that exits without the end of this block."""
        if self._drawn is not None:
            self._drawn.stop()

    def _follow(self) -> None:
        if not self._live:
            self._loop(self._plain)
            return
        ranks = self._ranks = LiveRanks(self.run) if self.console.height >= MIN_TABLE_HEIGHT else None
        if ranks:
            ranks.begin()
        with Live(
            console=self.console, refresh_per_second=8, transient=True, get_renderable=self._shown
        ) as self._drawn:
            self._loop(self._draw)
        if ranks:
            ranks.end()

    def _shown(self) -> Group:
        table = self._ranks.table() if self._ranks else None
        return Group(self._bar, table) if table else Group(self._bar)

    def _loop(self, show: Callable[[dict[str, float], bool], None]) -> None:
        last = False
        while not last:
            last = self._stop.wait(REFRESH_S)
            self._tick()
            self._print_events()
            latest = self._reader.latest()
            if latest:
                show(latest, last)

    def _draw(self, latest: dict[str, float], last: bool) -> None:
        if self._ranks:
            self._ranks.note_step(self._reader.attempt)
        self._bar.update(
            self._task,
            completed=latest["step"],
            description=counted(self._num_ranks, "rank"),
            figures=self._figures(latest),
        )

    def _plain(self, latest: dict[str, float], last: bool) -> None:
        due = time.monotonic() - self._plain_at >= PLAIN_LINE_S
        if latest["step"] != self._plain_step and (due or last):
            self._plain_at, self._plain_step = time.monotonic(), latest["step"]
            self.console.print(
                f"step {latest['step']:>5.0f}/{self.steps}  {self._figures(latest)}", highlight=False, soft_wrap=True
            )

    def _figures(self, latest: dict[str, float]) -> str:
        data_size = self.plan.data_size * self._num_ranks / self.plan.world_size
        tokens = latest["tokens_per_s"] * data_size  # not times all ranks: those of one data rank read the same tokens
        count = self._findings.count
        found = f"  [yellow]{count} finding{'s' * (count != 1)}[/]" if count else ""
        has_place = not self._live or self.console.width >= MIN_MEMORY_WIDTH
        memory = f"  {latest['memory_bytes'] / 2**20:.0f} MiB/rank" if has_place else ""
        return f"loss {latest['loss']:.3f}  {_short(tokens)} tokens/s  {latest['step_ms']:.0f} ms/step{memory}{found}"

    def _fewer(self, num_spare: object) -> str:
        """Line about a first attempt with fewer ranks than planned, otherwise ""."""
        if self._num_ranks >= self.plan.world_size:
            return ""
        spare = f" {counted(num_spare, 'rank')} left over." if isinstance(num_spare, int) and num_spare else ""
        return f"[cyan]Started {counted(self._num_ranks, 'rank')} of {self.plan.world_size}.[/]{spare}"

    def _print_events(self) -> None:
        events, self._event_bytes, _ = read_events(self._node_events, self._event_bytes)
        new = sorted([*events, *self._reader.new_events()], key=lambda e: e.get("wall_ns", 0))
        earlier, self._replays = self._replays, {}
        for event in new:
            if event["kind"] == event_kinds.REPLAY and event.get("state") == "same":
                self._replays[event.get("step")] = event
                continue
            replay = None
            if event["kind"] == event_kinds.ROLLBACK:  # replay and rollback are shown in one line
                step = event.get("from_step")
                replay = self._replays.pop(step, None) or earlier.pop(step, None)
                self._findings.note_rollback(event)
            line = _line(event, replay)
            if event["kind"] == event_kinds.ATTEMPT_STARTED and isinstance(event.get("world_size"), int):
                self._num_ranks = event["world_size"]
                line = line or self._fewer(event.get("ranks_left_over"))
            if line := line or self._findings.line(event):
                print_wrapped(self.console, line)
                if self._ranks:
                    self._ranks.note_event()
        for replay in earlier.values():  # replays that no rollback followed
            print_wrapped(self.console, escape(f"{_where(replay)}{_replayed(replay)}."))


class _StepReader:
    """Reads the newest finished steps and the events of rank 0, across attempts; each call reads only new records.

    `has_faults`: also read the events of all other ranks: 70 ms of CPU time at each refresh with 1,000 ranks.
    """

    def __init__(self, run: RunDir, *, has_faults: bool = False) -> None:
        self.run = run
        self._only = None if has_faults else 0
        self.attempt = -1
        """Attempt of the newest step."""
        self._recent: deque[dict[str, float]] = deque(maxlen=20)
        self._place: tuple[int, str, int] = (-1, "", 0)  # where to read on: attempt, name of the segment, record
        files = [folder / "events.jsonl" for _, _, folder in run.rank_dirs(self._only)]
        self._event_bytes = {path: _size(path) for path in files}
        self.latest()  # skip the steps that an earlier launch has shown
        self._recent.clear()

    def latest(self) -> dict[str, float]:
        try:
            self._read_on()
        except (OSError, TapeError):
            return {}  # the tape is being created
        if not self._recent:
            return {}
        step_ms = sorted(step["duration_ns"] for step in self._recent)[len(self._recent) // 2] / 1e6
        newest = self._recent[-1]
        return {
            "step": newest["step"],
            "loss": newest["loss"],
            "step_ms": step_ms,
            "tokens_per_s": newest["tokens"] / (step_ms / 1e3) if step_ms else 0.0,
            "memory_bytes": newest["memory_bytes"],
        }

    def new_events(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for _, rank, directory in self.run.rank_dirs(self._only):
            path = directory / "events.jsonl"
            events, self._event_bytes[path], _ = read_events(path, self._event_bytes.get(path, 0))
            found += [event for event in events if rank == 0 or event["kind"] == event_kinds.FAULT_INJECTED]
        return found

    def _read_on(self) -> None:
        attempts = [attempt for attempt, _, _ in self.run.rank_dirs(0)]
        if not attempts:
            return
        attempt, name, start = self._place
        if attempts[-1] != attempt:
            attempt, name = attempts[-1], ""
        for path in segment_paths(self.run.rank_dir(attempt, 0), "steps"):
            if path.name < name:
                continue
            if path.name > name:  # the previous segment is full, and retention may have removed it
                name, start = path.name, 0
            segment = read_segment(path, start)
            complete = segment.records[segment.records["state"] == COMPLETE]
            for record in complete:
                self._recent.append({name: float(record[name]) for name in _SHOWN if record[name] != UNSET["i64"]})
            start += len(complete)
            self.attempt = attempts[-1] if len(complete) else self.attempt
        self._recent = deque((step for step in self._recent if len(step) == len(_SHOWN)), maxlen=20)
        self._place = (attempt, name, start)


_SHOWN = ("step", "loss", "duration_ns", "tokens", "memory_bytes")


def _where(event: dict[str, Any]) -> str:
    step = event.get("step")
    return f"step {step:>5}  " if isinstance(step, int) and step > 0 else ""


def _replayed(event: dict[str, Any]) -> str:
    """Text on the result of a replay. What to suspect is in the finding."""
    what = "NaN or Inf" if event.get("verdict") == "non_finite" else "Loss spike"
    return f"{what}, which a replay {'reproduced' if event.get('came_back') else 'did not reproduce'}"


def _line(event: dict[str, Any], replay: dict[str, Any] | None = None) -> str:
    """One line for the user, or "" for an event that needs none. `replay`: the replay of the rolled-back step."""
    kind, where = event["kind"], _where(event)
    if kind == event_kinds.ADVICE:
        return advice_line(event)
    if kind == event_kinds.ROLLBACK:
        response = Response(  # makes the line use the same words and digits as the finding
            refused=None,
            restored_step=event.get("to_step"),
            tier=str(event.get("tier") or ""),
            skipped_batches=tuple(event.get("skipped_batches") or ()),
            replayed_batches=tuple(event.get("replayed_batches") or ()),
            duration_s=float(event.get("duration_s") or 0),
        )
        return escape(f"{where}{f'{_replayed(replay)}. ' if replay else ''}{response.text}")
    if kind == event_kinds.FAULT_INJECTED:
        return f"[dim]{where}Injected {escape(str(event.get('fault')))} on rank {event.get('rank')}.[/]"
    if kind == event_kinds.CULPRIT_KILLED:
        return f"[red]{where}Killed rank {event.get('killed_rank')}[/] to restart the ranks."
    if kind == event_kinds.EXCLUDED:
        what, reason = event.get("device") or "this node", str(event.get("reason")).rstrip(".")
        return f"[yellow]Excluded {escape(str(what))}[/]: {escape(reason)}."
    if kind == event_kinds.EXCLUSION_WITHHELD:
        return f"[yellow]Not excluded[/]: {escape(str(event.get('reason')).rstrip('.'))}."
    if kind == event_kinds.RANK_EXIT:
        how = event.get("signal") or f"exit code {event.get('exit_code')}"
        return f"[red]{where}Rank {event.get('exit_rank')} ended with {escape(str(how))}.[/]"
    if kind == event_kinds.ATTEMPT_STARTED and event.get("attempt"):
        return f"[cyan]Started {counted(event.get('world_size') or 0, 'rank')} (attempt {event.get('attempt')}).[/]"
    if kind == event_kinds.CHECKPOINT and event.get("state") == "condemned" and event.get("tier") == "disk":
        reason = str(event.get("reason")).rstrip(".")
        return f"[yellow]{where}The checkpoint of this step is not used[/]: {escape(reason)}."
    if kind in (event_kinds.PREEMPTED, event_kinds.INTERRUPTED) and event.get("checkpoint_step") is not None:
        return f"[cyan]{where}Stopped as requested; saved step {event.get('checkpoint_step')}.[/]"
    return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _short(number: float) -> str:
    return f"{number / 1e6:.2f} M" if number >= 1e6 else f"{number / 1e3:.1f} k" if number >= 1e3 else f"{number:.0f}"


class LiveRanks:
    """Redraws the ranks of a run repeatedly between `begin` and `end`.

    A reading takes some hundredths of a second of CPU time. The thread pauses between readings so that it uses at most
    a few percent of a core, except until the first step of an attempt is in the store, and after an event.
    """

    def __init__(self, run: RunDir) -> None:
        self._drawn: tuple[RenderableType | None, tuple[int, bool]] = (None, (-1, False))
        self._known = (-1, False)  # newest attempt, and whether a step of it has ended
        self._run = run
        self._is_over = False
        self._num_soon = 0
        self._due = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="live-ranks", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._is_over = True
        self._due.set()
        self._thread.join(timeout=JOIN_S)

    def note_step(self, attempt: int) -> None:
        """Note that a step of this attempt has ended: a table without one is no longer shown."""
        if (attempt, True) > self._known:
            self._known = (attempt, True)
            self._due.set()

    def note_event(self) -> None:
        """Note that an event was printed: the table shows it as soon as `watch` has stored it."""
        self._num_soon = READINGS_AFTER_EVENT
        self._due.set()

    def table(self) -> RenderableType | None:
        """The newest table; None if there is none, or if a step is known to have ended since."""
        table, shown = self._drawn
        return table if shown >= self._known else None

    def _draw(self) -> None:
        rest_s = REST_S
        while True:
            self._due.wait(rest_s)
            self._due.clear()
            if self._is_over:
                return
            begin_s = time.thread_time()
            self._read()
            rest_s = min(max(REST_S, REST_PER_READING * (time.thread_time() - begin_s)), MAX_REST_S)
            if self._drawn[1] < self._known or self._num_soon:
                rest_s = REST_S
            self._num_soon = max(0, self._num_soon - 1)

    def _read(self) -> None:
        import duckdb

        from analyzers.report.terminal.ranks_now import draw_ranks
        from store import StoreError

        try:
            drawn = draw_ranks(self._run, name=os.path.relpath(self._run.path), height=MAX_LINES, now_ns=time.time_ns())
        except (RunError, StoreError, OSError, duckdb.Error):
            return  # the store is being created or replaced, so the last table stays
        self._drawn = (drawn.table if drawn.is_live else None, drawn.newest)
