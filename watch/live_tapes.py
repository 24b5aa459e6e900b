"""State of the newest attempt on one node, from its tapes and events: running ranks, and time since the last record.

    tapes = LiveTapes(run, node_rank=0)
    tapes.poll()                       # once a tick: a few small reads
    tapes.attempt, tapes.pids, tapes.quiet_s
    source = tapes.source()            # the newest records, for judging hangs
    tapes.read_ns()                    # when they were read, by the same clock as their times

It needs no store, so neither a reader that keeps the store's file open nor a full disk can delay decisions. It needs no
wall clock: `quiet_s`, the source's times, `read_ns` and `now_ns` come from the monotonic clock, which all processes of
a machine share. `quiet_s` and `read_ns` refer to the time at which the tapes were read. On a busy machine they may be
judged seconds later, and records written in between must not look like silence.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from probes.tape import event_kinds
from probes.tape.rundir import RunDir
from store import Store
from store.ingest.newest_folders import NewestFolders
from store.ingest.read_positions import ReadState
from store.ingest.tail import NewEvents, NewRecords, Tail
from watch.processes import is_alive
from watch.recent_records import RecentRecords

__all__ = ["LiveTapes", "RankProcess"]

MAX_ROWS = 400_000
"""Maximum rows of a cached source. A larger one is rebuilt from the newest segments."""
_LAUNCHER_KINDS = (event_kinds.RUN_STARTED, event_kinds.STOP_REQUESTED, event_kinds.RUN_ENDED)
STATE_CHANGE_KINDS = frozenset({
    event_kinds.RANK_STATE, event_kinds.RANK_EXIT, event_kinds.RANK_CLOSED, event_kinds.EXCEPTION,
    event_kinds.RUN_ENDED, event_kinds.RANK_STOPPED, event_kinds.CULPRIT_KILLED,
})  # fmt: skip
"""Events after which a standstill or a loss may have to be reported, even if the newest record is recent."""
_EXITS = (event_kinds.RANK_EXIT, event_kinds.RUN_ENDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """The process of one rank. `start_ticks` 0: not recorded."""

    pid: int
    start_ticks: int = 0

    @property
    def is_alive(self) -> bool:
        """True if the process is running and its pid was not reused."""
        return is_alive(self.pid, self.start_ticks)


@dataclass(slots=True)
class _Attempt:
    """Processes and ends of this node's ranks in one attempt, from their events."""

    number: int = 0
    processes: dict[int, RankProcess] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    num_ranks: int = 0
    """World size over all nodes, as reported by a rank; 0 before the first report."""
    has_failed: bool = False
    """True if a rank ended without closing."""
    anchor_ns: int | None = None
    is_of_this_boot: bool = False
    """True once its monotonic times are known to come from this machine's current boot."""


class LiveTapes:
    """Polled by one thread. Returned mappings are never modified."""

    def __init__(self, run: RunDir, node_rank: int = 0) -> None:
        self.has_ended = False
        """True if the launcher has reported the end of the run on this node and has not started it again."""
        self.is_stopping = False
        """True if a signal has asked the launcher to end the run."""
        self.pids: Mapping[int, int] = {}
        """{rank: pid} of this node's ranks that have not closed."""
        self.launcher_pid = 0
        """Pid of the newest Rankscope launcher on this node; 0: none is recorded."""
        self._run, self.node_rank = run, node_rank
        self._anchor_ns = time.time_ns() - time.monotonic_ns()
        self._folders = NewestFolders(run, node_rank)
        self._tail = Tail(run, self._folders)
        self._state = ReadState()
        self._ticks = 0
        self._attempt = _Attempt()
        self._last_record_s = self._polled_s = time.monotonic()
        self._paused_s = 0.0
        """Seconds in which this process did not run, since the newest record was read."""
        self._state_change_s = -math.inf  # the first poll also reports ranks that ended before this process started
        self._recent: RecentRecords | None = None
        self._recent_key: tuple[int, int | None, bool] = (-1, None, False)
        """Attempt, clock anchor and `all_nodes` of `_recent`."""
        self._recent_tick = 0
        """Number of the poll (`_ticks`) after which `_recent` was last read."""
        self._read_ns = time.monotonic_ns()

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self._run.path

    @property
    def attempt(self) -> int:
        """The newest attempt of the run."""
        return self._attempt.number

    @property
    def ranks(self) -> set[int]:
        """All ranks of the attempt on this node, including closed ones."""
        return set(self._attempt.processes)

    @property
    def processes(self) -> dict[int, RankProcess]:
        """Processes of this node's ranks that have not closed."""
        return {rank: self._attempt.processes[rank] for rank in self.pids}

    @property
    def is_over(self) -> bool:
        """True if the launcher reported the end of the run, or every rank of the attempt on this node has closed."""
        return self.has_ended or bool(self.ranks and not self.pids)

    @property
    def has_closed_cleanly(self) -> bool:
        """True if all ranks of the attempt ran on this node and have closed, and no failure was reported."""
        attempt = self._attempt
        return not attempt.has_failed and 0 < attempt.num_ranks == len(attempt.closed)

    @property
    def is_running(self) -> bool:
        """True while the process of a rank that has not closed is alive on this node."""
        return any(self._attempt.processes[rank].is_alive for rank in self.pids)

    @property
    def quiet_s(self) -> float:
        """Seconds from the last record of this node's ranks to the last poll, less the pauses of this process."""
        return max(0.0, self._polled_s - self._last_record_s - self._paused_s)

    @property
    def since_change_s(self) -> float:
        """Seconds since an event of `STATE_CHANGE_KINDS` was last read; infinite if there was none."""
        return time.monotonic() - self._state_change_s

    def now_ns(self) -> int:
        """Current time by the clock of `source`, epoch nanoseconds. This clock never jumps."""
        return time.monotonic_ns() + self._anchor_ns

    def read_ns(self) -> int:
        """Time, by the same clock, at which the records of `source` were read. Judge these records as of this time."""
        return self._read_ns + self._anchor_ns

    def recorded_now_ns(self) -> int:
        """Current time by the clock of the attempt's tapes, which the store uses, too (epoch nanoseconds)."""
        anchor_ns = self._attempt.anchor_ns
        return time.monotonic_ns() + (self._anchor_ns if anchor_ns is None else anchor_ns)

    def skip(self, seconds: float) -> None:
        """Do not count the last `seconds` as silence, because this process did not run."""
        self._paused_s += seconds

    def poll(self) -> bool:
        """Read what is new. Returns True if a rank of this node has recorded anything since the last poll."""
        self._ticks += 1
        previous_record_s, self._polled_s = self._last_record_s, time.monotonic()
        self._folders.all()  # list the folders again, because a new attempt first appears as a folder
        if self._folders.attempt != self._attempt.number:
            self._attempt = _Attempt(number=self._folders.attempt)
            self._last_record_s = time.monotonic()
        changes = ReadState()
        for new in self._tail.changes(self._state, tick=self._ticks, thorough=False):
            if isinstance(new, NewEvents):
                changes.events[new.position.path] = new.position
                for event in new.events:
                    self._take_event(new.folder.rank, new.folder.attempt, new.folder.is_node, event)
            elif isinstance(new, NewRecords):
                known = self._state.segments.get(new.position.path)
                changes.segments[new.position.path] = new.position
                if self._attempt.anchor_ns is None:
                    self._attempt.anchor_ns = new.header.wall_minus_mono_ns
                if known is None or len(new.complete) or new.position.open_digest != known.open_digest:
                    self._last_record_s = time.monotonic()
        self._state = self._state.updated(changes)
        self.pids = {
            rank: process.pid
            for rank, process in sorted(self._attempt.processes.items())
            if rank not in self._attempt.closed
        }
        has_recorded = self._last_record_s != previous_record_s
        if has_recorded:
            self._paused_s = 0.0
        return has_recorded

    def source(self, *, all_nodes: bool = False) -> Store:
        """The newest records as of the last poll. `all_nodes`: of every node with tapes in the run's folder."""
        anchor_ns = self._anchor_ns if self._is_of_this_boot() else None
        key = (self.attempt, anchor_ns, all_nodes)
        if self._recent is not None and (self._recent_key != key or self._recent.num_rows > MAX_ROWS):
            self.forget()
        if self._recent is None:
            folders = NewestFolders(self._run, self.node_rank, all_nodes=all_nodes, with_health=True)
            self._recent, self._recent_key = RecentRecords(self._run, folders, anchor_ns=anchor_ns), key
        elif self._recent_tick == self._ticks:
            return self._recent.store
        self._read_ns = time.monotonic_ns()
        store = self._recent.read()
        self._recent_tick = self._ticks
        return store

    @contextmanager
    def source_since(self, attempt: int) -> Iterator[Store]:
        """The newest records of `attempt` and of all later attempts, from every node with tapes in the run's folder.
        `attempt` must have run since this process started.
        """
        folders = NewestFolders(self._run, self.node_rank, since=attempt, all_nodes=True, with_health=True)
        with RecentRecords(self._run, folders, anchor_ns=self._anchor_ns) as recent:
            yield recent.read()

    def _is_of_this_boot(self) -> bool:
        """Return False if all ranks had ended before they were first seen: their records may be from an earlier boot,
        with another monotonic clock. Return True while no rank has been seen: the ranks are just starting, and `source`
        may read their records first.
        """
        attempt = self._attempt
        attempt.is_of_this_boot |= not attempt.processes or any(p.is_alive for p in attempt.processes.values())
        return attempt.is_of_this_boot

    def forget(self) -> None:
        """Free the memory of `source`."""
        if self._recent is not None:
            self._recent.close()
            self._recent = None

    def _take_event(self, rank: int, attempt: int, is_node: bool, event: Mapping[str, Any]) -> None:
        kind = event["kind"]
        if kind in STATE_CHANGE_KINDS:
            self._state_change_s = time.monotonic()
            is_good = kind == event_kinds.RANK_CLOSED or (kind in _EXITS and event.get("exit_code") == 0)
            self._attempt.has_failed |= not is_good
        if is_node:
            if event.get("node_rank", 0) == self.node_rank and kind in _LAUNCHER_KINDS:
                # Events arrive in the order in which they were written, so the newest decides.
                self.has_ended = kind == event_kinds.RUN_ENDED
                self.is_stopping = kind == event_kinds.STOP_REQUESTED or (self.is_stopping and self.has_ended)
                pid = event.get("launcher_pid")
                self.launcher_pid = pid if isinstance(pid, int) and pid > 0 else self.launcher_pid
            return
        if attempt != self._attempt.number:
            return
        if kind == event_kinds.RANK:
            pid, ticks = event.get("pid"), event.get("start_ticks")
            if isinstance(pid, int) and pid > 0:
                self._attempt.processes[rank] = RankProcess(
                    pid=pid, start_ticks=max(0, ticks) if isinstance(ticks, int) else 0
                )
                self._last_record_s = time.monotonic()
            size = event.get("world_size")
            self._attempt.num_ranks = size if isinstance(size, int) else 0
        elif kind == event_kinds.RANK_CLOSED:
            self._attempt.closed.add(rank)
