"""`watch`: the node process beside the ranks. It alone writes the store, says what is wrong, and unsticks the run.

    python -m watch.node_process runs/latest --node-rank 0     (started by the launcher, or by local rank 0)

Once a tick:

1. look at the ranks' processes in /proc and write changes of state as events,
2. ingest what is new on the tapes into the store,
3. run the live analyzers over the store and write new findings as events,
4. on a hang: take all ranks' stacks, let the analyzers look again, kill the culprit so that torch elastic restarts.

With several nodes each watch also sends a digest of its ranks to that of node 0, which judges the whole job
(`watch.digests.exchange`); each acts on the ranks of its own node only.

It ends when the run has ended, or when every process of the run is gone. It takes no part in any collective and holds
no lock that a rank could wait for: it can die at any moment and be started again.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from analyzers.finding import Finding
from analyzers.live import LiveState, live_findings, remembered
from analyzers.run.live_ranks import has_ended, placed_on_node, ranks_on_node, stale_ranks
from analyzers.run.policy import stall_policy
from probes.tape import event_kinds
from probes.tape.attempts import newest as newest_attempt
from probes.tape.events import EventWriter, read_events
from probes.tape.rundir import NODE_RANK, RunDir, RunError
from probes.tape.shared_memory import remove_shared
from store import Ingester, Store, StoreError, StoreLockedError
from watch.digests.exchange import JobWatch
from watch.digests.link import DigestLink, Verdict
from watch.exporting.otel.export import OtelExport, otel_export
from watch.exporting.prometheus.endpoint import Metrics, TickFacts, listen_address, metrics_endpoint
from watch.exporting.prometheus.server import ListenError
from watch.exporting.trackers.processes import TrackerProcesses, trackers
from watch.exporting.webhook import FindingHook, finding_hook
from watch.health.node_sources import node_health
from watch.processes import ProcessTracker, is_alive, kill, os_state
from watch.stacks.gil_holders import holders
from watch.stacks.signal_dump import take_stacks

__all__ = ["Watch", "main"]

logger = logging.getLogger("rankscope.watch")
TICK_S = 1.0
READER_PATIENCE_S = 10.0
CLOSE_TRIES = 3
ORPHAN_GRACE_S = 10.0
"""How long a run with no living process and no `run_ended` is waited for: between attempts all ranks are gone."""


OTHERS_S = 15.0
"""How long a hang whose culprit is on another node is left to that node's watch."""


class Watch:
    """The state of one node's watch; `tick` does one round."""

    def __init__(self, run: RunDir, ingester: Ingester, node_rank: int = 0, launcher_pid: int = 0) -> None:
        self.run = run
        self.launcher_pid = launcher_pid or int(run.manifest().get("launcher_pid", 0) or 0)
        self.node_rank = node_rank
        directory = run.node_dir(node_rank)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "events.jsonl"
        said = remembered(read_events(path)[0]) if path.exists() else {}  # by a watch that was killed: not said again
        self.events = EventWriter(path, attempt=0, rank=NODE_RANK)
        self.ingester = ingester
        self.tracker = ProcessTracker()
        self.live = LiveState(stall=stall_policy(run.manifest()), manifest=run.manifest(), reported=said)
        self.recover = bool(run.manifest().get("config", {}).get("recovery", {}).get("enabled", True))
        self._handled: set[tuple[int, int]] = set()  # (attempt, rank) whose hang was acted upon
        self._gone_since: float | None = None
        self._closing = False
        self._ended = False
        self._pids: dict[int, int] = {}
        self._placed: set[int] = set()  # ranks of this node, those that have closed too
        self.metrics: Metrics | None = None
        self.hook: FindingHook | None = None
        self.otel: OtelExport | None = None
        self.trackers: TrackerProcesses | None = None
        self.job: JobWatch | None = None
        self._left_to_others: tuple[int, float] | None = None  # attempt, and since when (monotonic)
        self._rows = 0
        self._read_ns = time.time_ns()
        """Until when the store holds what was written: who reads it may keep us from that, and no rank is silent for
        it."""
        self._tick_s = 0.0
        self.failed_ticks = 0

    def tick(self) -> None:
        """One round. Raises StoreError if the store cannot be read or written at the moment."""
        start = time.monotonic()
        self._read()
        findings = None
        with self._open() as store:
            attempt, pids = ranks_on_node(store, self.node_rank)
            self._placed = set(placed_on_node(store, self.node_rank, attempt))
            self._ended = has_ended(store, self.node_rank)
            stale = stale_ranks(store, self.node_rank)
            self._pids = pids
            self.events.attempt = attempt
            if self.job is not None:
                self.job.exchange(store, attempt, self._placed)
                self.live.digests, self.live.clock_offsets_ns = self.job.digests, self.job.offsets_ns
            changes = self.tracker.look(pids)
            if not changes:  # nearly always: what was opened is what there is to judge, and to open costs as much
                findings = live_findings(store, self.live, self._read_ns)
            if self.metrics is not None:
                self.metrics.tick(store, time.time_ns(), self._facts(), anyway=bool(findings))
            if self.otel is not None:
                self.otel.tick(store, time.time_ns(), self.metrics.samples if self.metrics else ())
        self._kill_stale(stale)
        for change in changes:
            self.events.write(
                event_kinds.RANK_STATE,
                state_rank=change.rank,
                pid=change.pid,
                state=change.state,
                os_state=change.os_state,
            )
        if findings is None:
            self._read()
            findings = self._judge()
        self._say(findings)
        # How a former attempt ended may be told only now; nobody of this one is to be killed for it.
        fired = [finding for finding in findings if finding.kind == "hang" and finding.status == "fired"]
        hangs = [finding for finding in fired if finding.attempt == attempt]
        verdicts = [Verdict(attempt=attempt, ranks=hang.ranks, summary=hang.summary) for hang in hangs]
        stands = any(said.kind == "hang" and said.status == "fired" for said in self.live.reported.values())
        if self.job is not None:
            self.job.tell(hangs, attempt, stands=stands)
            told = self.job.told(attempt)
            verdicts += [told] if told is not None else []
            stands |= told is not None
        if not self._ended:
            self._unstick(verdicts, attempt, pids, stands=stands)
        if self.trackers is not None:
            self.trackers.look()
        self._tick_s = time.monotonic() - start

    def _read(self, *, thorough: bool = False) -> None:
        """Take what is on the tapes into the store."""
        now_ns = time.time_ns()
        result = self.ingester.tick(thorough=thorough)
        self._rows += result.num_rows
        if not result.lag:
            self._read_ns = now_ns

    def _open(self) -> Store:
        """What this watch judges: all that it can see; its own node alone while another watch leads, unless the others
        train on in an attempt without this node."""
        is_led = self.job is not None and self.job.is_led
        own = is_led and newest_attempt(self.run, default=0) <= self.events.attempt
        return Store.open(self.run, catch_up=False, node=self.node_rank if own else None)

    def _facts(self) -> TickFacts:
        return TickFacts(
            tick_s=self._tick_s, rows=self._rows, failed_ticks=self.failed_ticks, analyzer_errors=self.live.errors
        )

    def close(self) -> None:
        """Ingest the last records and close. Raises StoreError if a reader held the store for too long."""
        if not self._closing:
            self.events.write(event_kinds.WATCH_STOPPED, pid=os.getpid())
            self._closing = True
            if self.job is not None:
                self.job.close()
        self._read(thorough=True)
        with self._open() as store:
            self._kill_stale(stale_ranks(store, self.node_rank))
        for _ in range(2):  # how an attempt ended is told at the second look that sees the next one
            self._say(self._judge())
        self._read()
        if self.metrics is not None:
            with self._open() as store:
                self.metrics.tick(store, time.time_ns(), self._facts(), anyway=True)

    def _judge(self) -> list[Finding]:
        with self._open() as store:
            return live_findings(store, self.live, self._read_ns)

    def _say(self, findings: Sequence[Finding]) -> None:
        for finding in findings:
            self.events.write(event_kinds.FINDING, **_event_columns(finding))
        for listener in (self.hook, self.otel):
            if listener is not None:
                listener.tell(findings)
        if findings:
            self._read()

    def _kill_stale(self, stale: Sequence[tuple[int, int, int, int]]) -> None:
        """Who still lives from an older attempt is fenced already, but it keeps memory and a device."""
        for attempt, rank, pid, start_ticks in stale:
            if start_ticks and is_alive(pid, start_ticks) and kill(pid, signal.SIGKILL):
                self.events.write(event_kinds.STALE_KILLED, killed_rank=rank, pid=pid, killed_attempt=attempt)

    def _unstick(self, verdicts: Sequence[Verdict], attempt: int, pids: dict[int, int], *, stands: bool) -> None:
        """Take stacks and kill who keeps the others waiting, if it is here; else its own node's watch does, or, as long
        as the hang `stands`, this one after a while with the ranks that it has."""
        named = {rank for verdict in verdicts for rank in verdict.ranks}
        culprits = named & pids.keys()
        if not culprits and named - self._placed:
            self._left_to_others = self._left_to_others or (attempt, time.monotonic())
            if (attempt, NODE_RANK) not in self._handled:
                self._handled.add((attempt, NODE_RANK))
                self._take_stacks(attempt, pids)
        elif not culprits and verdicts:
            culprits = set(pids)
        if self._is_overdue(attempt, stands=stands):
            culprits = culprits or set(pids)
        culprits = {rank for rank in culprits if (attempt, rank) not in self._handled}
        if not culprits:
            return
        self._take_stacks(attempt, pids, {rank: pids[rank] for rank in culprits & pids.keys()})
        self._handled |= {(attempt, rank) for rank in culprits}
        reason = verdicts[0].summary if verdicts else "a rank hangs on another node, and nobody acts there"
        for rank in sorted(culprits) if self.recover else ():
            if kill(pids[rank], signal.SIGKILL):
                self.events.write(event_kinds.CULPRIT_KILLED, killed_rank=rank, pid=pids[rank], reason=reason)

    def _take_stacks(self, attempt: int, pids: dict[int, int], culprits: Mapping[int, int] | None = None) -> None:
        """Have all ranks here write their stacks, and look whether one of the {rank: pid} to blame holds the GIL."""
        taken = take_stacks(self.run, attempt, pids)
        holding = holders({rank: pid for rank, pid in (culprits or {}).items() if os_state(pid)[0] not in ("T", "t")})
        path = str(self.run.stacks.relative_to(self.run.path))
        self.events.write(event_kinds.STACKS, path=path, ranks=taken, gil_ranks=holding)

    def _is_overdue(self, attempt: int, *, stands: bool) -> bool:
        """Whether a hang of this attempt was left to another node that has done nothing about it since."""
        if self._left_to_others is None:
            return False
        of_attempt, since_s = self._left_to_others
        if of_attempt != attempt or not stands:
            self._left_to_others = None
            return False
        return time.monotonic() - since_s > OTHERS_S

    def is_needed(self) -> bool:
        """Whether there is anything left to watch, by what the last good tick saw."""
        if not self.run.path.is_dir():
            return False  # somebody deleted the run
        if any(is_alive(pid) for pid in self._pids.values()):
            self._gone_since = None
            return True
        if self._ended:
            return False
        if self.launcher_pid and is_alive(self.launcher_pid):
            self._gone_since = None
            return True
        self._gone_since = self._gone_since or time.monotonic()
        return time.monotonic() - self._gone_since < ORPHAN_GRACE_S


def _event_columns(finding: Finding) -> dict[str, object]:
    columns = finding.to_json()
    columns["finding_ranks"] = columns.pop("ranks")
    columns["step"] = finding.first_step
    if finding.attempt is None:
        columns.pop("attempt")
    columns["finding_kind"] = columns.pop("kind")
    return columns


class _Stop(Exception):
    """SIGTERM or SIGINT arrived."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stop


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of the watch process: 0 after a run that ended, 2 if there is no such run or it is watched already."""
    parser = argparse.ArgumentParser(prog="rankscope watch", description="record and supervise a running run")
    parser.add_argument("run", type=Path, help="the run's folder, e.g. runs/latest")
    parser.add_argument("--node-rank", type=int, default=0, help="index of this node (0)")
    parser.add_argument("--launcher-pid", type=int, default=0, help="process that starts ranks here (run.json's)")
    parser.add_argument("--num-nodes", type=int, default=1, help="nodes of the job at most (1)")
    parser.add_argument("--digests", default="", help="HOST:PORT of the store over which the nodes' watches talk")
    parser.add_argument("--listen", default="", help="HOST:PORT of /metrics (the configuration's)")
    parser.add_argument("--tls-cert", default="", help="PEM file, to listen beyond this machine")
    parser.add_argument("--tls-key", default="", help="PEM file with its key")
    parser.add_argument("--token-file", default="", help="file with the bearer token that a scrape must show")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        run = RunDir.open(options.run)
        asked = {name: getattr(options, name) for name in ("listen", "tls_cert", "tls_key", "token_file")}
        listen = listen_address({"config": {"metrics": asked}}) if options.listen else None
        if listen is not None:
            listen.check()
    except (RunError, ListenError) as error:
        sys.stderr.write(f"rankscope watch: {error}\n")
        return 2
    try:
        with contextlib.ExitStack() as serving:
            with _sole_writer(run, options.node_rank) as ingester:
                watch = Watch(run, ingester, options.node_rank, options.launcher_pid)
                serving.callback(watch.events.close)
                watch.trackers = serving.enter_context(trackers(run, watch.node_rank, watch.events))
                watch.metrics = serving.enter_context(
                    metrics_endpoint(run, watch.node_rank, stall=watch.live.stall, events=watch.events, listen=listen)
                )
                with (
                    finding_hook(run.manifest(), run_id=run.run_id, events=watch.events) as watch.hook,
                    otel_export(run, watch.node_rank, watch.events) as watch.otel,
                    node_health(run, watch.node_rank, watch.events),
                ):
                    if options.digests and options.num_nodes > 1:
                        link = DigestLink(options.digests, node=options.node_rank, num_nodes=options.num_nodes)
                        serving.enter_context(link)
                        watch.job = JobWatch(link, node_rank=options.node_rank, events=watch.events)
                    _watch(watch)
            watch.trackers.close()  # the store is let go: nobody waits for a tracker or for a last scrape
            watch.metrics.linger()
    except StoreLockedError as error:
        sys.stderr.write(f"rankscope watch: {error}\n")
        return 2
    return 0


def _sole_writer(run: RunDir, node_rank: int) -> Ingester:
    """The right to write the node's store; a reader that catches a store up has it for a moment only."""
    deadline = time.monotonic() + READER_PATIENCE_S
    while True:
        try:
            return Ingester(run, node_rank)
        except StoreLockedError as error:
            if error.role == "watch" or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def _watch(watch: Watch) -> None:
    watch.events.write(event_kinds.WATCH_STARTED, pid=os.getpid())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    with contextlib.suppress(_Stop):
        while watch.is_needed():
            start = time.monotonic()
            try:
                watch.tick()
            except _Stop:
                raise
            except StoreError as error:  # a reader held the file, or the disk is full: the tapes keep everything
                watch.failed_ticks += 1
                logger.warning("%s", error)
            except Exception:  # a tick that fails must not end the watching; the log has each one
                watch.failed_ticks += 1
                logger.exception("tick failed, trying again")
            time.sleep(max(0.05, TICK_S - (time.monotonic() - start)))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    for _ in range(CLOSE_TRIES if watch.run.path.is_dir() else 0):
        with contextlib.suppress(StoreError):
            watch.close()
            break
    if not watch.is_needed():
        remove_shared(watch.run.path, watch.node_rank)  # of ranks that could not do it themselves


if __name__ == "__main__":
    sys.exit(main())
