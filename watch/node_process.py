"""`watch`: the process next to the ranks of a node, and the only writer of the node's store.

    python -m watch.node_process runs/latest --node-rank 0     (started by the launcher, or by local rank 0)

The main thread detects hangs from the tapes alone (`watch.standstill_loop`), a second thread writes the store and runs
all other analyzers (`watch.ingest_loop`), and a third runs plug-ins (`watch.plugins.loop`); each ticks about once a
second. It exits when the run has ended, or when all of the run's processes have exited. It takes part in no collective
and holds no lock that a rank could wait for, so it can be killed and restarted at any time.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from analyzers.report.terminal.lost_terminal import leave_lost_terminal
from analyzers.run.policy import stall_policy
from probes.settings.section import read
from probes.settings.sections import ProbesSettings
from probes.tape import event_kinds
from probes.tape.events import EventWriter
from probes.tape.files.shared_memory import remove_shared
from probes.tape.pauses import rest
from probes.tape.redaction.printable import visible
from probes.tape.rundir import NODE_RANK, RunDir, RunError
from probes.tape.typed_path import as_typed
from store import Ingester, StoreError, StoreLockedError
from watch.background_loop import end_process
from watch.digests.exchange import JobWatch
from watch.digests.job_secret import job_secret
from watch.digests.link import DigestLink
from watch.exclusion.requester import ExclusionRequester
from watch.exporting.exports import exports
from watch.exporting.prometheus.endpoint import listen_address
from watch.exporting.prometheus.server import Listen, ListenError
from watch.health import nvml
from watch.health.dcgm import Dcgm
from watch.health.device import Source
from watch.health.host import Host
from watch.health.sampler import sampling
from watch.ingest_loop import IngestLoop
from watch.live import LiveJudge
from watch.live_tapes import LiveTapes
from watch.plugins.loop import PluginLoop
from watch.profiling.requester import CaptureRequester
from watch.records.publishing import Publishing
from watch.records.retention import Retention
from watch.records.tape_sync import TapeSync
from watch.standstill_loop import StandstillLoop

__all__ = ["Heartbeat", "main"]

logger = logging.getLogger("rankscope.watch")
TICK_S = 1.0
LOCK_WAIT_S = 10.0
"""Maximum number of seconds to wait while a reader has the store open for writing. A reader does so briefly, to add the
newest records."""
CLOSE_TRIES = 3
SIGNALLED = 128
"""Exit code after a signal is this plus the signal's number."""
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_EXAMPLES = """
examples:
  rankscope watch runs/latest                              # a run that was started without it
  rankscope watch runs/latest --listen 127.0.0.1:9400      # metrics on a fixed port
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point under a launcher. It differs from `run_watch` in that it returns 0 after a signal, because launchers
    end it with one."""
    code = run_watch(arguments)
    return code if code < SIGNALLED else 0


def run_watch(arguments: Sequence[str] | None = None) -> int:
    """Watch a run to its end. Returns 0, 128 + the signal that ended it, or 2 if there is no run or another watch
    runs.
    """
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        run = RunDir.open(options.run)
        given = {name: getattr(options, name) for name in ("listen", "tls_cert", "tls_key", "token_file")}
        listen = listen_address({"config": {"metrics": given}}) if options.listen else None
        if listen is not None:
            listen.check()
            listen.refuse_taken_port()
        elif option := next((name for name, value in given.items() if value), ""):
            raise ListenError(f"--{option.replace('_', '-')} needs --listen HOST:PORT")
        return _watch(run, options, listen)
    except (RunError, ListenError, StoreLockedError) as error:
        message = str(error)
        if isinstance(error, StoreLockedError) and error.role == "watch":
            where = as_typed(run.path)
            message = (
                f"{where} is watched by process {error.pid}, as `train` and `run` start a watch: "
                f"`rankscope top {shlex.quote(where)}` shows the ranks"
            )
        sys.stderr.write(f"rankscope watch: {visible(message)}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rankscope watch",
        description="Record and supervise a running run.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="folder of the run, e.g. runs/latest")
    parser.add_argument("--node-rank", type=int, default=0, help="index of this node (0)")
    parser.add_argument(
        "--launcher-pid",
        type=int,
        default=0,
        help="launcher of the ranks on this node (from run.json)",
    )
    parser.add_argument("--bare", action="store_true", help="no exporters: metrics, hooks, OpenTelemetry, trackers")
    parser.add_argument("--heartbeat-fd", type=int, default=-1, help=argparse.SUPPRESS)  # a pipe to the launcher
    parser.add_argument("--num-nodes", type=int, default=1, help="maximum number of nodes in the job (1)")
    parser.add_argument("--digests", default="", help="HOST:PORT of the rendezvous store that the nodes' watches use")
    parser.add_argument("--listen", default="", help="HOST:PORT of /metrics (default: from the configuration)")
    parser.add_argument("--tls-cert", default="", help="PEM certificate, to listen beyond this machine")
    parser.add_argument("--tls-key", default="", help="PEM key of the certificate")
    parser.add_argument("--token-file", default="", help="file with the bearer token that a scrape must send")
    return parser


def _watch(run: RunDir, options: argparse.Namespace, listen: Listen | None) -> int:
    """Open what a watch needs, run its loops, return the exit code. Raises StoreLockedError if another watch runs."""
    node_rank, folder = options.node_rank, run.node_dir(options.node_rank)
    with contextlib.ExitStack() as serving:
        with _sole_writer(run, node_rank) as ingester:
            end = _EndRequest()  # installed before anything is opened that a signal could leave open
            folder.mkdir(parents=True, exist_ok=True)
            events = EventWriter(folder / "events.jsonl", attempt=0, rank=NODE_RANK)
            serving.callback(events.close)
            stall = stall_policy(run.manifest())
            exporting = serving.enter_context(
                exports(run, node_rank=node_rank, stall=stall, events=events, listen=listen, bare=options.bare)
            )
            job: JobWatch | None = None
            with contextlib.ExitStack() as sampling_health:
                tapes = LiveTapes(run, node_rank)
                if options.digests and options.num_nodes > 1:
                    nodes = options.num_nodes
                    secret = job_secret(run)
                    link = DigestLink(
                        options.digests, node=node_rank, num_nodes=nodes, secret=secret, clock=tapes.now_ns
                    )
                    serving.enter_context(link)
                    job = JobWatch(link, node_rank=node_rank, events=events, clock=tapes.now_ns)
                judge = LiveJudge(run.manifest(), events, exporting, stacks_dir=run.stacks)
                pid = options.launcher_pid
                loop = StandstillLoop(run, tapes, judge, events, launcher_pid=pid, job=job)
                if not loop.is_past():  # readings that are taken after the end of the run do not belong to it
                    sampling_health.enter_context(node_health(run, node_rank, events))
                ingest = IngestLoop(run, ingester, tapes, judge, exporting, events, node_rank=node_rank, job=job)
                events.write(event_kinds.WATCH_STARTED, pid=os.getpid())
                every_s = read(ProbesSettings, run.manifest()).sync_s
                syncing = TapeSync(
                    run, node_rank, every_s=every_s,
                    is_running=lambda: tapes.is_running, started=lambda: (tapes.attempt, len(tapes.ranks)),
                )  # fmt: skip
                ingest.exclusions = ExclusionRequester.of(run, judge, events, node_rank=node_rank)
                ingest.captures = CaptureRequester.of(run, events, node_rank=node_rank)
                ingest.retention = Retention.of(run, ingester, syncing, events)
                ingest.publishing = Publishing.of(run, events, node_rank=node_rank)
                plugins = PluginLoop(ingest.open_store, tapes, judge)
                with syncing.running():
                    signal_number = _run_until_needed(loop, ingest, plugins, Heartbeat(options.heartbeat_fd), end)
                _close(ingest, run, Heartbeat(options.heartbeat_fd))
                plugins.finish()
                syncing.finish()
                tapes.poll()  # the next launch may have begun in the meantime, and uses the same memory
                if not loop.is_needed():
                    remove_shared(run.path, node_rank)  # ranks that were killed have left copies in shared memory
        exporting.finish()  # the store is closed by now, so its readers do not wait for a tracker or a last scrape
        if ingest.publishing is not None:
            ingest.publishing.finish()
    return SIGNALLED + signal_number if signal_number else 0


def _sole_writer(run: RunDir, node_rank: int) -> Ingester:
    """Hold the node's writer lock. Raises StoreLockedError."""
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            return Ingester(run, node_rank)
        except StoreLockedError as error:
            if error.role == "watch" or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


class _EndRequest:
    """Stores the signal that asks the watch to end, because DuckDB would wrap an exception raised by a signal handler.

    Outside the loops nothing is interrupted, since opening and closing take only a moment.
    """

    def __init__(self) -> None:
        self.number = 0
        self.interrupts = False
        """True if a signal also raises KeyboardInterrupt. It is True during the loops, because a tick may take seconds.
        """
        for signal_number in END_SIGNALS:
            # `nohup` has set SIGHUP to be ignored, and that is respected.
            if signal.getsignal(signal_number) != signal.SIG_IGN or signal_number != signal.SIGHUP:
                signal.signal(signal_number, self._make)

    def _make(self, signal_number: int, frame: object) -> None:
        self.number = signal_number
        _leave_signals()  # a second signal must not interrupt the wait for the current rounds
        leave_lost_terminal()
        if self.interrupts:
            raise KeyboardInterrupt


def _run_until_needed(
    loop: StandstillLoop, ingest: IngestLoop, plugins: PluginLoop, heartbeat: Heartbeat, end: _EndRequest
) -> int:
    """Tick until the run has ended or a signal has arrived; return its number, or 0."""
    with contextlib.suppress(KeyboardInterrupt), plugins.running(), ingest.running():
        try:
            end.interrupts = True
            _tick_on(loop, heartbeat, end)
        finally:
            end.interrupts = False
            ingest.leave()
    _leave_signals()
    return end.number


def _leave_signals() -> None:
    """Let a second Ctrl-C end the process immediately, and ignore other signals. Records that are then missing from the
    store are added by the next reader."""
    for signal_number in END_SIGNALS:
        signal.signal(signal_number, signal.SIG_DFL if signal_number == signal.SIGINT else signal.SIG_IGN)


def _close(ingest: IngestLoop, run: RunDir, heartbeat: Heartbeat) -> None:
    """Ingest the last records."""
    for _ in range(CLOSE_TRIES if run.path.is_dir() else 0):  # no try if the run's folder has been deleted
        heartbeat.beat()
        with contextlib.suppress(StoreError):
            ingest.close()
            break


def _tick_on(loop: StandstillLoop, heartbeat: Heartbeat, end: _EndRequest) -> None:
    is_first = True
    while is_first or (loop.is_needed() and not end.number):
        is_first = False
        start = time.monotonic()
        try:
            loop.tick()
        except Exception:  # a failed tick must not end the watch; each failure is logged
            if end.number:
                return
            logger.exception("Tick failed, trying again.")
        else:  # no heartbeat after a failure, so that the launcher replaces this watch if it keeps failing
            heartbeat.beat()
        if paused_s := rest(max(0.05, TICK_S - (time.monotonic() - start))):
            loop.skip(paused_s)


class Heartbeat:
    """Heartbeat to the launcher: one byte per second through a pipe, which no disk can delay."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        if fd >= 0:
            os.set_blocking(fd, False)
            os.set_inheritable(fd, False)  # not inherited by trackers and commands started by watch

    def beat(self) -> None:
        """Write a byte. A full pipe or a dead launcher is ignored."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.write(self._fd, b".")


@contextmanager
def node_health(run: RunDir, node_rank: int, events: EventWriter) -> Iterator[None]:
    """Sample health until the block ends. A source that fails is reported as an event, and the run continues.

    Without NVML or DCGM, only the host is read. `probes.health = false` in the configuration turns sampling off.
    """
    probes = read(ProbesSettings, run.manifest())
    sources: list[Source] = [Host(run.path)]
    xids: nvml.Xids | None = None
    if probes.dcgm_url:
        sources.append(Dcgm(probes.dcgm_url))
    elif nvml.has_driver():
        sources.append(nvml.Nvml())
        xids = nvml.Xids()
    with ExitStack() as stack:
        if probes.health:
            try:
                stack.enter_context(sampling(run.node_dir(node_rank), sources, events, xids=xids))
            except OSError as error:  # for example a full disk: the run continues without readings
                events.write(event_kinds.HEALTH_FAILED, source="tape", reason=str(error))
        yield


if __name__ == "__main__":
    end_process(main())
