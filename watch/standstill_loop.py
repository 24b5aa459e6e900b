"""Detect hangs once a second and act on them, from tapes and a monotonic clock alone.

1. Poll this node's tapes and events (`watch.live_tapes`), the launcher, and the ranks' processes in /proc.
2. With several nodes, send a digest of this node's ranks, or judge the digests of all nodes (`watch.digests.exchange`).
3. If nothing is recorded, or a rank has ended, run the analyzers of hangs and deaths on the newest records.
4. On a hang take stacks and kill the culprit (`watch.culprit`), so that the launcher restarts the ranks.
5. After a restart, report how the previous attempt ended.

Time in which this process did not run is no silence: a suspended job or machine suspends the ranks, too.

No store is opened and no wall clock is read here, so neither a reader that keeps the store open nor a change of the
clock can hide a hang or kill a healthy rank. The store is written in another thread (`watch.ingest_loop`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from analyzers.finding import Finding
from analyzers.run.calls.snapshot import SNAPSHOT_EVENTS, take_snapshot
from analyzers.run.policy import stall_policy
from analyzers.run.records.event_log import EventLog
from analyzers.source import Source
from probes.settings.section import read
from probes.settings.sections import RecoverySettings
from probes.tape import event_kinds
from probes.tape.attempts import newest as newest_attempt
from probes.tape.events import EventWriter
from probes.tape.files.held_folder import HeldFolder
from probes.tape.rundir import RunDir
from watch.culprit import CulpritKiller
from watch.digests.exchange import JobWatch
from watch.digests.link import Verdict
from watch.health.silent_work import SilentWork
from watch.launcher_loss import LauncherLoss
from watch.live import LiveJudge
from watch.live_tapes import LiveTapes
from watch.processes import ProcessTracker, is_alive, start_ticks

__all__ = ["StandstillLoop"]

logger = logging.getLogger("rankscope.watch")
ORPHAN_GRACE_S = 10.0
"""Seconds to wait for a run without live processes and without `run_ended`: between attempts no rank runs."""
QUIET_S = 2.0
"""Seconds without records after which hangs are judged; at most half of the shortest hang threshold."""
STATE_CHANGE_S = 20.0
"""Seconds after a rank's end during which records are judged, because the launcher reports later how the rank died."""


class StandstillLoop:
    """Detects hangs on one node; `tick` does one round. `job`: given if the job has several nodes."""

    def __init__(
        self,
        run: RunDir,
        tapes: LiveTapes,
        judge: LiveJudge,
        events: EventWriter,
        *,
        launcher_pid: int = 0,
        job: JobWatch | None = None,
    ) -> None:
        manifest = run.manifest()
        recovery = read(RecoverySettings, manifest)
        self._run, self._tapes, self._judge, self._events, self._job = run, tapes, judge, events, job
        self._held = HeldFolder(run.path)
        self._is_launched = bool(launcher_pid)
        self._launcher_pid = launcher_pid or int(manifest.get("launcher_pid", 0) or 0)
        self._launcher_ticks = start_ticks(self._launcher_pid)
        self._tracker = ProcessTracker()
        self._loss = LauncherLoss(
            tapes, events, node_rank=tapes.node_rank, launcher_pid=launcher_pid, grace_s=recovery.grace_s
        )
        self._culprits = CulpritKiller(run, events, may_kill=recovery.enabled)
        self._floor_s = stall_policy(manifest).floor_s
        self._work = SilentWork(events, floor_s=self._floor_s)
        self._gone_since_s: float | None = None
        self._refused: Verdict | None = None
        self._last_attempt: int | None = None
        """The newest attempt at the last round."""
        self._pauses: list[tuple[int, int]] = []
        """Begin by the tapes' clock, and length (ns), of times after the newest record in which this process did not
        run."""
        self._unjudged: int | None = None
        """The oldest attempt with an end that has not been judged yet, although another attempt has followed."""

    def tick(self) -> None:
        """Do one round. After an error the newest records are read again, because memory may hold only part of them."""
        try:
            self._round()
        except Exception:
            self._tapes.forget()
            raise

    def skip(self, seconds: float) -> None:
        """Take note that this process did not run for so many seconds before now."""
        self._tapes.skip(seconds)
        length_ns = round(seconds * 1e9)
        self._pauses.append((self._tapes.now_ns() - length_ns, length_ns))

    def _round(self) -> None:
        tapes = self._tapes
        self._events.retry()
        tapes.poll()
        self._events.attempt = attempt = tapes.attempt
        self._loss.poll()
        for change in self._tracker.poll(tapes.pids):
            self._events.write(
                event_kinds.RANK_STATE,
                state_rank=change.rank,
                pid=change.pid,
                state=change.state,
                os_state=change.os_state,
            )
            tapes.poll()  # poll again, so that the event just written is judged, too
        self._judge.is_stopping = tapes.is_stopping
        if self._work.poll(tapes.pids, quiet_s=tapes.quiet_s):
            tapes.poll()
        if self._job is not None:
            self._job.exchange(tapes.source(all_nodes=self._judges_all), attempt, tapes.ranks)
            self._judge.add_nodes(self._job.digests, self._job.offsets_ns)
        findings = self._findings()
        self._judge.report(findings)
        fired = [finding for finding in findings if finding.kind == "hang" and finding.status == "fired"]
        # A finding may be about the end of an earlier attempt, for which no rank of this attempt may be killed.
        self._act([finding for finding in fired if finding.attempt == attempt], attempt)
        self._report_ends()  # comes last, so that an error in it does not prevent judging the newest attempt

    def _report_ends(self) -> None:
        """Report how attempts ended, one round after the next attempt was first seen, because their last records may
        arrive until then. A leader reports for all nodes that it leads.
        """
        attempt, last = self._tapes.attempt, self._last_attempt
        self._last_attempt = attempt
        if last is not None and attempt > last:
            self._unjudged = last if self._unjudged is None else self._unjudged
        elif self._unjudged is not None:
            if self._job is None or self._job.leads:
                with self._tapes.source_since(self._unjudged) as source:
                    self._judge.report(self._judge.ended_findings(source, range(self._unjudged, attempt)))
            self._unjudged = None

    def is_needed(self) -> bool:
        """Return True while there is something to watch."""
        if not self._run.path.is_dir():
            return False  # the run was deleted
        if problem := self._held.problem():
            logger.error("%s%s. This watch ends and writes into neither folder.", problem[:1].upper(), problem[1:])
            return False
        if self._tapes.is_running:
            self._gone_since_s = None
            return True
        if self._tapes.has_ended:
            return False
        if self._has_launcher():
            self._gone_since_s = None
            return True
        self._gone_since_s = self._gone_since_s or time.monotonic()
        return time.monotonic() - self._gone_since_s < ORPHAN_GRACE_S

    def is_past(self) -> bool:
        """Return True if this watch was started by hand after the run had ended, or after the processes of the run had
        exited."""
        try:
            self._tapes.poll()
        except Exception:  # forget what was read, as after a failed tick; the next tick reads it again
            self._tapes.forget()
            return False
        if self._is_launched or self._tapes.is_running:
            return False
        return self._tapes.has_ended or bool(self._tapes.ranks and not self._has_launcher())

    def _has_launcher(self) -> bool:
        return bool(self._launcher_pid) and is_alive(self._launcher_pid, self._launcher_ticks)

    @property
    def _judges_all(self) -> bool:
        """True if the tapes of all nodes in this folder are judged here: this watch has no leader, or the other nodes
        have started an attempt without this node.
        """
        if self._job is None:
            return True
        if self._job.leads:
            return False  # the leader judges the other nodes' digests, which are newer than their files
        return not self._job.is_led or newest_attempt(self._run, default=0) > self._tapes.attempt

    def _findings(self) -> list[Finding]:
        tapes = self._tapes
        is_quiet = tapes.quiet_s >= min(QUIET_S, self._floor_s / 2)
        is_open = self._judge.has_open_hang(tapes.attempt)
        is_due = (is_quiet or tapes.since_change_s < STATE_CHANGE_S) and not tapes.has_closed_cleanly
        if not (is_due or is_open or self._job is not None):  # in a job of several nodes another node may hang
            tapes.forget()
            return []
        source = tapes.source(all_nodes=self._judges_all)
        return self._judge.standstill_findings(source, tapes.read_ns() - self._paused_ns(source))

    def _paused_ns(self, source: Source) -> int:
        """Nanoseconds since the newest record in which this process did not run."""
        if self._pauses:
            attempt = self._tapes.attempt
            last_ns = take_snapshot(source, attempt, EventLog.load(source, SNAPSHOT_EVENTS, attempt)).last_ns
            self._pauses = [pause for pause in self._pauses if pause[0] >= last_ns]
        return sum(length_ns for _, length_ns in self._pauses)

    def _act(self, hangs: Sequence[Finding], attempt: int) -> None:
        """Kill this node's ranks that are blamed by an open hang or by the leader's verdict. `hangs`: the findings of
        this round.
        """
        verdicts = [Verdict.of([hang], attempt) for hang in self._judge.open_findings("hang", attempt)]
        hang_is_open = bool(verdicts)
        if self._job is not None:
            self._job.publish(hangs, attempt, hang_is_open=hang_is_open)
            received = self._job.verdict(attempt)
            if received is not None and self._confirms(received):
                verdicts, hang_is_open = [*verdicts, received], True
        if (verdicts or hang_is_open) and self._tapes.poll():
            return  # a rank has recorded something since it was judged, so the next round judges again
        if not (self._tapes.has_ended or self._tapes.is_stopping):  # if the run is ending, the launcher ends the ranks
            # Ranks that still record are not waiting: do not kill them.
            hang_is_open &= self._is_quiet
            self._culprits.act(verdicts, attempt, self._tapes.processes, self._tapes.ranks, hang_is_open=hang_is_open)

    @property
    def _is_quiet(self) -> bool:
        """True if no rank of this node has recorded for half of the hang threshold."""
        return self._tapes.quiet_s >= self._floor_s / 2

    def _confirms(self, verdict: Verdict) -> bool:
        """Return True unless the ranks of this node are recording, which contradicts a hang.

        The verdict came over the network and asks for a kill, so it is verified.
        """
        if self._is_quiet:
            return True
        if verdict != self._refused:
            self._refused = verdict
            self._events.write(
                event_kinds.VERDICT_REFUSED, ranks=list(verdict.ranks), quiet_s=round(self._tapes.quiet_s, 1)
            )
        return False
