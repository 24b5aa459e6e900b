"""All exporters of one watch: `/metrics`, OpenTelemetry, webhook and experiment trackers.

with exports(run, node_rank=0, stall=policy, events=events, listen=None) as exporting:
    exporting.tick(store, facts, measure_now=False)     # once a tick, while the store is open
    exporting.report(findings)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from analyzers.finding import Finding
from analyzers.run.policy import StallPolicy
from analyzers.source import Source
from probes.tape.events import EventWriter
from probes.tape.rundir import RunDir
from watch.exporting.otel.export import OtelExport, otel_export
from watch.exporting.prometheus.endpoint import Metrics, TickFacts, metrics_endpoint
from watch.exporting.prometheus.server import Listen
from watch.exporting.trackers.processes import TrackerProcesses, trackers
from watch.exporting.webhook import FindingHook, finding_hook

__all__ = ["Exports", "exports"]


class Exports:
    """The exporters that the run's configuration asks for."""

    def __init__(
        self,
        metrics: Metrics | None,
        tracking: TrackerProcesses | None,
        hook: FindingHook | None,
        otel: OtelExport | None,
    ) -> None:
        self._metrics, self._tracking, self._hook, self._otel = metrics, tracking, hook, otel
        self._reporting = threading.Lock()

    def tick(self, source: Source, facts: TickFacts, *, measure_now: bool) -> None:
        """Measure and send what is new; `measure_now` does not wait for the next interval."""
        if self._metrics is not None:
            self._metrics.tick(source, time.time_ns(), facts, measure_now=measure_now)
        if self._otel is not None and self._metrics is not None:
            self._otel.tick(source, time.time_ns(), self._metrics.samples)

    def report(self, findings: Sequence[Finding]) -> None:
        """Send findings, from any thread. Returns at once."""
        with self._reporting:
            for receiver in (self._hook, self._otel):
                if receiver is not None:
                    receiver.report(findings)

    def poll(self) -> None:
        """Restart trackers that died."""
        if self._tracking is not None:
            self._tracking.poll()

    def finish(self) -> None:
        """After the run, with the store released: wait for the trackers, and for a last scrape."""
        if self._tracking is not None:
            self._tracking.close()
        if self._metrics is not None:
            self._metrics.linger()


@contextmanager
def exports(
    run: RunDir,
    *,
    node_rank: int,
    stall: StallPolicy,
    events: EventWriter,
    listen: Listen | None,
    bare: bool = False,
) -> Iterator[Exports]:
    """Open all of them until the block ends; `listen` goes before the run's configuration. `bare`: none of them."""
    if bare:
        yield Exports(None, None, None, None)
        return
    with ExitStack() as stack:
        tracking = stack.enter_context(trackers(run, node_rank, events))
        metrics = stack.enter_context(metrics_endpoint(run, node_rank, stall=stall, events=events, listen=listen))
        hook = stack.enter_context(finding_hook(run.private_manifest(), run_id=run.run_id, events=events))
        otel = stack.enter_context(otel_export(run, node_rank, events))
        yield Exports(metrics, tracking, hook, otel)
