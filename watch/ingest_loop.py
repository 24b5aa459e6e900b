"""Ingest the tapes of one node into its store, run the analyzers that need it, and export; in a separate thread.

    loop = IngestLoop(run, ingester, tapes, judge, exports, events)
    with loop.running():                # a tick every second or few seconds (`watch.records.tick_pace`)
        ...
    loop.close()

1. Ingest what is new on the tapes into the node's store.
2. Run the live analyzers that need more than the newest records, and write new findings and advice as events.
3. Measure and export; end processes of older attempts.

If only health readings are new and no exporter is read, steps 2 and 3 are skipped for up to `MAX_REST_S`.

A reader that keeps the store's file open, or a full disk, delays only this thread. Hangs are detected in another thread
(`watch.standstill_loop`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

from analyzers.finding import Finding
from analyzers.run.live.live_ranks import stale_ranks
from analyzers.run.records.cached_source import CachedSource
from analyzers.source import Source
from probes.settings.section import read
from probes.settings.sections import ProbesSettings
from probes.tape import event_kinds
from probes.tape.attempts import newest as newest_attempt
from probes.tape.events import EventWriter
from probes.tape.rundir import RunDir
from store import Ingester, Store, StoreError
from store.runs.cached_store import CachedStore
from watch.background_loop import background_loop
from watch.culprit import kill_stale
from watch.digests.exchange import JobWatch
from watch.exclusion.requester import ExclusionRequester
from watch.exporting.exports import Exports
from watch.exporting.prometheus.endpoint import TickFacts
from watch.live import LiveJudge
from watch.live_tapes import LiveTapes
from watch.profiling.requester import CaptureRequester
from watch.profiling.trace_reader import TraceReader
from watch.records.publishing import Publishing
from watch.records.retention import Retention
from watch.records.tick_pace import MAX_REST_S, TICK_S, TickPace, yield_to_ranks
from watch.stacks.line_sampling import LineSampler

__all__ = ["IngestLoop"]

logger = logging.getLogger("rankscope.watch")
EAGER_S = 10.0
"""Seconds after a rank's end with a tick every second."""
EAGER_START_S = 4.0
"""Seconds after the start of a run or attempt in which there is a tick every second, so that the first records are
shown soon. Later the cores are left to the ranks.
"""
QUIET_S = 2.0
"""Seconds without a record after which there is a tick every second again, since idle ranks need no cores."""


class IngestLoop:
    """The writer of one node's store; `tick` does one round."""

    def __init__(
        self,
        run: RunDir,
        ingester: Ingester,
        tapes: LiveTapes,
        judge: LiveJudge,
        exports: Exports,
        events: EventWriter,
        *,
        node_rank: int = 0,
        job: JobWatch | None = None,
    ) -> None:
        manifest = run.manifest()
        self.failed_ticks = 0
        self.retention: Retention | None = None
        """Removes records older than the configured window; None if none is configured."""
        self.publishing: Publishing | None = None
        """Publishes ingested records to the configured address; None if no address is configured."""
        self.exclusions: ExclusionRequester | None = None
        """Asks the launcher to exclude ranks; None unless configured."""
        self.captures: CaptureRequester | None = None
        """Asks suspect ranks to profile their next steps; None unless configured."""
        self._run, self._ingester, self._tapes, self._judge = run, ingester, tapes, judge
        self._exports, self._events = exports, events
        self._node_rank, self._job = node_rank, job
        self._lines = LineSampler(run, events, enabled=read(ProbesSettings, manifest).sample_stacks)
        self._traces = TraceReader(run, events)
        self._has_left = self._is_closing = False
        self._round = threading.Lock()
        self._cached_store = CachedStore(run)
        self._num_rows = 0
        self._pace = TickPace()
        self._unjudged_ticks = 0
        """Ticks covered by all rounds since the last round that ran the analyzers."""
        self._eager_attempt, self._eager_since_s = -1, 0.0
        self._tick_s = 0.0
        self._ingested_ns = tapes.recorded_now_ns()
        """Time up to which the store has all records. A reader may delay the next ingest, which must not make ranks
        count as silent.
        """

    def running(self) -> AbstractContextManager[None]:
        """Tick in a thread while the block runs; at the end of the block, wait for the current tick."""
        return background_loop(self._run_until, name="ingest")

    def tick(self) -> None:
        """One round. Raises StoreError if the store cannot be read or written at the moment."""
        start = time.monotonic()
        has_news = self._ingest()
        self._unjudged_ticks += self._pace.num_ticks
        if has_news or self._judge.is_behind or self._exports.is_read or self._unjudged_ticks * TICK_S >= MAX_REST_S:
            self._judge_records()
        self._exports.poll()
        if self.publishing is not None:
            self.publishing.poll()
        if self.retention is not None and (self.publishing is None or self.publishing.allows_folding()):
            self.retention.poll()
        self._tick_s = time.monotonic() - start

    def _judge_records(self) -> None:
        with self._cached_store.opened(node=self._own_node()) as opened:
            store = CachedSource(opened)  # analyses and exporters share many queries
            stale = stale_ranks(store, self._node_rank) if self._tapes.attempt else []
            findings = self._judge.record_findings(store, self._ingested_ns, num_ticks=self._unjudged_ticks)
            self._unjudged_ticks = 0
            try:
                self._judge.report_advice(self._advice(store))
                self._export(store, measure_now=bool(findings))
                self._follow_up(store, findings)
                self._traces.poll(store, self._tapes.ranks)
            finally:  # the judge returns a finding once, so a failure in this block must not lose it
                has_news = self._judge.report(findings)
        kill_stale(self._run, stale, self._events)
        self._judge.report_failures()
        if has_news:
            self._ingest()

    def _follow_up(self, store: Source, findings: Sequence[Finding]) -> None:
        """Ask the launcher and the ranks for more about what was found: exclusions, stacks, profiles."""
        if self.exclusions is not None and not self._tapes.has_ended:
            self.exclusions.poll(store, self._tapes.attempt, self._ingested_ns)
        for finding in findings:
            if finding.attempt == self._tapes.attempt:
                self._lines.sample(finding, self._tapes.pids)
        if self.captures is not None and not self._tapes.has_ended:
            # Never sample stacks and capture a profile at the same time, because the stacks would show the profiler.
            now_ns = self._tapes.recorded_now_ns()
            self.captures.poll(findings, store, self._tapes.attempt, now_ns, is_paused=self._lines.is_sampling)

    def leave(self) -> None:
        """Record that ranks are no longer watched. The current tick may last many seconds on a busy machine, and ranks
        of an interrupted job end in that time, which must not count as silence.
        """
        if not self._has_left:
            self._has_left = True
            self._events.write(event_kinds.WATCH_STOPPED, pid=os.getpid())

    def close(self) -> None:
        """Ingest the last records and close. Raises StoreError if a reader kept the store open for too long, or the
        thread is still in a round.
        """
        self.leave()
        if not self._round.acquire(blocking=False):
            raise StoreError("the last round has not ended")
        try:
            self._close()
        finally:
            self._round.release()

    def _close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            if self._job is not None:
                self._job.close()
        self._cached_store.close()
        self._ingest(thorough=True)
        # `_judge_last` runs twice: the end of an attempt is reported only by the second run that sees the next attempt.
        steps = [self._end_ranks, self._judge_last, self._judge_last, self._advise_last]
        while steps:
            has_written = False
            with self.open_store() as opened:
                store = CachedSource(opened)
                while steps and not has_written:
                    has_written = steps.pop(0)(store)
            if has_written:
                self._ingest()

    def _end_ranks(self, store: Source) -> bool:
        """End processes of older attempts and read the last traces. Returns True if events may have been written."""
        kill_stale(self._run, stale_ranks(store, self._node_rank), self._events)
        return self._traces.finish(store, self._tapes.ranks)

    def _judge_last(self, store: Source) -> bool:
        return self._judge.report(self._judge.findings(store, self._ingested_ns))

    def _advise_last(self, store: Source) -> bool:
        if self._exports.is_read:
            self._export(store, measure_now=True)
        return self._judge.report_advice(self._advice(store, is_last=True))

    def _run_until(self, stop: threading.Event) -> None:
        yield_to_ranks()
        while not stop.is_set():
            try:
                with self._round, self._pace.round():
                    self.tick()
            except StoreError as error:  # a reader has the store open, or the disk is full; no record is lost
                self.failed_ticks += 1
                logger.warning("%s", error)
            except BaseException:  # a failed tick (even SystemExit) must not end the thread; each failure is logged
                self.failed_ticks += 1
                logger.exception("Tick failed, trying again.")
            self._pace.rest(stop, is_eager=self._is_eager)

    def _is_eager(self) -> bool:
        """Return True if there should be a tick every second: at a start or an end, or during silence."""
        tapes, now_s = self._tapes, time.monotonic()
        if tapes.attempt != self._eager_attempt:
            self._eager_attempt, self._eager_since_s = tapes.attempt, now_s
        return now_s - self._eager_since_s < EAGER_START_S or tapes.since_change_s < EAGER_S or tapes.quiet_s >= QUIET_S

    def _ingest(self, *, thorough: bool = False) -> bool:
        """Ingest new records from the tapes into the store. Returns True if there were any besides health readings."""
        now_ns = self._tapes.recorded_now_ns()
        result = self._ingester.tick(thorough=thorough)
        self._num_rows += result.num_rows
        if self.publishing is not None:
            self.publishing.note(result.rows, until_ns=None if result.lag else now_ns)
        if not result.lag:
            self._ingested_ns = now_ns
            self._ingester.mark_ingested(now_ns)
        return bool(result.rows.keys() - {"health"}) or result.busy or result.quarantined is not None

    def _advice(self, store: Source, *, is_last: bool = False) -> list[Finding]:
        """New advice on the run's configuration; none while another node's watch leads."""
        if self._job is not None and self._job.is_led:
            return []
        return self._judge.advice(store, self._run.manifest, self._ingested_ns, is_last=is_last)

    def open_store(self) -> Store:
        """Open the stores that this watch judges."""
        return Store.open(self._run, catch_up=False, node=self._own_node(), threads=1)

    def _own_node(self) -> int | None:
        """The node to which the judged store belongs; None for the stores of all nodes in the run's folder.

        While another watch leads, it is this node, unless the other nodes have started an attempt without this node.
        """
        is_led = self._job is not None and self._job.is_led
        own_only = is_led and newest_attempt(self._run, default=0) <= self._tapes.attempt
        return self._node_rank if own_only else None

    def _export(self, store: Source, *, measure_now: bool) -> None:
        facts = TickFacts(
            tick_s=self._tick_s,
            rows=self._num_rows,
            failed_ticks=self.failed_ticks,
            analyzer_errors=self._judge.errors,
        )
        self._exports.tick(store, facts, measure_now=measure_now)
