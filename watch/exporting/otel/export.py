"""Export to an OpenTelemetry collector: spans of finished steps, metrics and findings, if an endpoint is set.

    with otel_export(run, node_rank=0, events=events) as otel:
        otel.tick(store, now_ns, metrics.samples)          # in watch's tick
        otel.report(findings)

Section `otel` of the configuration sets the amount: `group` (default, per_step, all) and `ranks` (single_rank,
first_rank_per_node, sampled, all_ranks).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from analyzers.finding import Finding
from analyzers.source import Source
from probes.settings.section import read
from probes.settings.sections import OtelSettings
from probes.tape import event_kinds
from probes.tape.events import EventWriter
from probes.tape.rundir import RunDir
from watch.exporting.metrics.catalogue import Sample
from watch.exporting.otel.otlp import Otlp, otlp, wanted
from watch.exporting.otel.step_spans import StepSpans

__all__ = ["OtelExport", "otel_export"]

METRICS_EVERY_S = 15.0


class OtelExport:
    """Hands new data to the collector's thread; never waits for it."""

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
    """None where no endpoint is set, or the `otel` extra is not installed (reported as an event)."""
    if not wanted():
        yield None
        return
    given = read(OtelSettings, run.manifest())
    group, ranks = given.group, given.ranks
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
