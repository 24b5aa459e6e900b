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
from probes.settings.section import read
from probes.settings.sections import OtelSettings
from probes.tape import event_kinds
from probes.tape.events import EventWriter
from probes.tape.rundir import RunDir
from watch.exporting.metrics.catalogue import Sample
from watch.exporting.otel.otlp import Otlp, is_configured, otlp
from watch.exporting.otel.step_spans import StepSpans
from watch.exporting.prometheus.endpoint import Metrics, TickFacts, metrics_endpoint
from watch.exporting.prometheus.server import Listen
from watch.exporting.trackers.processes import TrackerProcesses, trackers
from watch.exporting.webhook import FindingHook, finding_hook

__all__ = ["Exports", "exports", "otel_export"]

METRICS_EVERY_S = 15.0


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

    @property
    def is_read(self) -> bool:
        """True if a last measurement will be read: by a collector, or by a scraper that has scraped recently."""
        return self._otel is not None or (self._metrics is not None and self._metrics.is_scraped(time.time_ns()))

    def tick(self, source: Source, facts: TickFacts, *, measure_now: bool) -> None:
        """Measure and send what is new. With `measure_now`, do not wait for the next interval."""
        if self._metrics is not None:
            self._metrics.tick(source, time.time_ns(), facts, measure_now=measure_now)
        if self._otel is not None and self._metrics is not None:
            self._otel.tick(source, time.time_ns(), self._metrics.samples)

    def report(self, findings: Sequence[Finding]) -> None:
        """Send findings, from any thread. Returns immediately."""
        with self._reporting:
            for receiver in (self._hook, self._otel):
                if receiver is not None:
                    receiver.report(findings)

    def poll(self) -> None:
        """Restart trackers that died."""
        if self._tracking is not None:
            self._tracking.poll()

    def finish(self) -> None:
        """Wait for the trackers and for a last scrape; called after the run, when the store is closed."""
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
    """Open all exporters until the block ends; `listen` overrides the run's setting. With `bare`, none is opened."""
    if bare:
        yield Exports(None, None, None, None)
        return
    with ExitStack() as stack:
        tracking = stack.enter_context(trackers(run, node_rank, events))
        metrics = stack.enter_context(metrics_endpoint(run, node_rank, stall=stall, events=events, listen=listen))
        hook = stack.enter_context(finding_hook(run.private_manifest(), run_id=run.run_id, events=events))
        otel = stack.enter_context(otel_export(run, node_rank, events))
        yield Exports(metrics, tracking, hook, otel)


class OtelExport:
    """Passes new data to the collector's thread without waiting.

    Section `otel` of the configuration sets the amount: `group` (default, per_step, all) and `ranks` (single_rank,
    first_rank_per_node, sampled, all_ranks).
    """

    def __init__(self, collector: Otlp, spans: StepSpans) -> None:
        self._collector, self._spans = collector, spans
        self._metrics_ns = 0

    def tick(self, source: Source, now_ns: int, samples: Sequence[Sample]) -> None:
        """Send spans of the steps that ended since the last tick, and all metrics every `METRICS_EVERY_S`."""
        rows = self._spans.take(source)
        if rows:
            self._collector.spans(rows)
        if samples and now_ns - self._metrics_ns >= METRICS_EVERY_S * 1e9:
            self._metrics_ns = now_ns
            self._collector.metrics(samples, now_ns)

    def report(self, findings: Sequence[Finding]) -> None:
        """Send findings as log records."""
        self._collector.logs([finding.to_json() for finding in findings], time.time_ns())


@contextmanager
def otel_export(run: RunDir, node_rank: int, events: EventWriter) -> Iterator[OtelExport | None]:
    """Open the export; None if no endpoint is set or the `otel` extra is not installed (reported as an event)."""
    if not is_configured():
        yield None
        return
    settings = read(OtelSettings, run.manifest())
    group, ranks = settings.group, settings.ranks
    with ExitStack() as stack:
        export: OtelExport | None = None
        try:
            collector = stack.enter_context(otlp(run_id=run.run_id, node_rank=node_rank))
            spans = StepSpans(run_id=run.run_id, group=group, ranks=ranks, is_first_node=node_rank == 0)
            export = OtelExport(collector, spans)
            events.write(event_kinds.OTEL_STARTED, group=group, ranks=ranks)
        except ImportError as error:
            events.write(event_kinds.OTEL_REFUSED, reason=f"{error}: pip install 'rankscope[otel]'")
        yield export
        if export is not None:
            events.write(event_kinds.OTEL_STOPPED, sent=collector.num_sent, dropped=collector.num_dropped)
