"""The loop of one node's watch: ingest the tapes, judge, act, export; once a second.

1. Ingest what is new on the tapes into the node's store.
2. Poll the ranks' processes in /proc and write changes of state as events.
3. Run the live analyzers over the store and write new findings as events.
4. On a hang: take stacks and kill the culprit (`watch.culprit`), so that the launcher restarts the ranks.

With several nodes each watch also sends a digest of its ranks to that of node 0, which judges the whole job
(`watch.digests.exchange`); each acts on the ranks of its own node only.
"""

from __future__ import annotations

import os
import time

from analyzers.run.live_ranks import has_ended, placed_on_node, ranks_on_node, stale_ranks
from analyzers.source import Source
from probes.tape import event_kinds
from probes.tape.attempts import newest as newest_attempt
from probes.tape.events import EventWriter
from probes.tape.rundir import RunDir
from store import Ingester, Store
from watch.culprit import CulpritKiller, kill_stale
from watch.digests.exchange import JobWatch
from watch.digests.link import Verdict
from watch.exporting.exports import Exports
from watch.exporting.prometheus.endpoint import TickFacts
from watch.live import LiveJudge
from watch.processes import ProcessTracker, is_alive
from watch.stacks.line_sampling import LineSampler

__all__ = ["IngestLoop"]

ORPHAN_GRACE_S = 10.0
"""How long to wait for a run without a living process and without `run_ended`: between attempts all ranks are gone."""


class IngestLoop:
    """One node's watch; `tick` does one round. `job` is given where the job has several nodes."""

    def __init__(
        self,
        run: RunDir,
        ingester: Ingester,
        events: EventWriter,
        exports: Exports,
        *,
        node_rank: int = 0,
        launcher_pid: int = 0,
        job: JobWatch | None = None,
    ) -> None:
        manifest = run.manifest()
        self.failed_ticks = 0
        self._run, self._ingester, self._events, self._exports = run, ingester, events, exports
        self._node_rank, self._job = node_rank, job
        self._launcher_pid = launcher_pid or int(manifest.get("launcher_pid", 0) or 0)
        self._tracker = ProcessTracker()
        self._judge = LiveJudge(manifest, events, exports)
        recovers = bool(manifest.get("config", {}).get("recovery", {}).get("enabled", True))
        self._culprits = CulpritKiller(run, events, may_kill=recovers)
        samples = bool(manifest.get("config", {}).get("probes", {}).get("sample_stacks", True))
        self._lines = LineSampler(run, events, enabled=samples)
        self._pids: dict[int, int] = {}
        self._is_closing = False
        self._has_ended = False
        self._gone_since_s: float | None = None
        self._num_rows = 0
        self._tick_s = 0.0
        self._ingested_ns = time.time_ns()
        """Until when the store holds what was written. A reader of the store may delay the next ingest, and no rank
        counts as silent for that."""

    def tick(self) -> None:
        """One round. Raises StoreError if the store cannot be read or written at the moment."""
        start = time.monotonic()
        self._ingest()
        findings = None
        with self._open() as store:
            attempt, self._pids = ranks_on_node(store, self._node_rank)
            placed = set(placed_on_node(store, self._node_rank, attempt))
            self._has_ended = has_ended(store, self._node_rank)
            stale = stale_ranks(store, self._node_rank)
            self._events.attempt = attempt
            if self._job is not None:
                self._job.exchange(store, attempt, placed)
                self._judge.add_nodes(self._job.digests, self._job.offsets_ns)
            changes = self._tracker.poll(self._pids)
            if not changes:  # nearly always; the store is open and complete, and opening it again costs as much
                findings = self._judge.findings(store, self._ingested_ns)
            self._export(store, measure_now=bool(findings))
        kill_stale(stale, self._events)
        for change in changes:
            self._events.write(
                event_kinds.RANK_STATE,
                state_rank=change.rank,
                pid=change.pid,
                state=change.state,
                os_state=change.os_state,
            )
        if findings is None:
            self._ingest()
            with self._open() as store:
                findings = self._judge.findings(store, self._ingested_ns)
        if self._judge.report(findings):
            self._ingest()
        # A finding may be about how a former attempt ended: no rank of this one may be killed for it.
        fired = [finding for finding in findings if finding.kind == "hang" and finding.status == "fired"]
        hangs = [finding for finding in fired if finding.attempt == attempt]
        verdicts = [Verdict(attempt=attempt, ranks=hang.ranks, summary=hang.summary) for hang in hangs]
        stands = self._judge.has_open_hang
        if self._job is not None:
            self._job.publish(hangs, attempt, stands=stands)
            received = self._job.verdict(attempt)
            verdicts += [received] if received is not None else []
            stands |= received is not None
        for finding in findings:
            if finding.attempt == attempt:
                self._lines.sample(finding, self._pids)
        if not self._has_ended:
            self._culprits.act(verdicts, attempt, self._pids, placed, stands=stands)
        self._exports.poll()
        self._tick_s = time.monotonic() - start

    def close(self) -> None:
        """Ingest the last records and close. Raises StoreError if a reader held the store for too long."""
        if not self._is_closing:
            self._events.write(event_kinds.WATCH_STOPPED, pid=os.getpid())
            self._is_closing = True
            if self._job is not None:
                self._job.close()
        self._ingest(thorough=True)
        with self._open() as store:
            kill_stale(stale_ranks(store, self._node_rank), self._events)
        for _ in range(2):  # how an attempt ended is reported by the second run of the analyzers that sees the next one
            with self._open() as store:
                findings = self._judge.findings(store, self._ingested_ns)
            if self._judge.report(findings):
                self._ingest()
        self._ingest()
        with self._open() as store:
            self._export(store, measure_now=True)

    def is_needed(self) -> bool:
        """Return True while there is something to watch, by the last good tick."""
        if not self._run.path.is_dir():
            return False  # the run was deleted
        if any(is_alive(pid) for pid in self._pids.values()):
            self._gone_since_s = None
            return True
        if self._has_ended:
            return False
        if self._launcher_pid and is_alive(self._launcher_pid):
            self._gone_since_s = None
            return True
        self._gone_since_s = self._gone_since_s or time.monotonic()
        return time.monotonic() - self._gone_since_s < ORPHAN_GRACE_S

    def _ingest(self, *, thorough: bool = False) -> None:
        """Take what is on the tapes into the store."""
        now_ns = time.time_ns()
        result = self._ingester.tick(thorough=thorough)
        self._num_rows += result.num_rows
        if not result.lag:
            self._ingested_ns = now_ns

    def _open(self) -> Store:
        """The store with all that this watch can see; with its own node alone while another watch leads, unless the
        other nodes train on in an attempt without this one."""
        is_led = self._job is not None and self._job.is_led
        own_only = is_led and newest_attempt(self._run, default=0) <= self._events.attempt
        return Store.open(self._run, catch_up=False, node=self._node_rank if own_only else None)

    def _export(self, store: Source, *, measure_now: bool) -> None:
        facts = TickFacts(
            tick_s=self._tick_s,
            rows=self._num_rows,
            failed_ticks=self.failed_ticks,
            analyzer_errors=self._judge.errors,
        )
        self._exports.tick(store, facts, measure_now=measure_now)
