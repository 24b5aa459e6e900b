"""Send spans, metrics and logs to an OpenTelemetry collector: OTLP over HTTP, from a thread of `watch`.

    if is_configured():                            # OTEL_EXPORTER_OTLP_ENDPOINT or a similar variable is set
        with otlp(run_id="demo", node_rank=0) as collector:
            collector.spans(rows); collector.metrics(samples, now_ns); collector.logs(findings, now_ns)

OpenTelemetry's environment variables set the endpoint, headers, certificates, compression and timeouts. The caller is
never blocked: batches for a slow or dead collector wait in a bounded queue, and are dropped and counted if it is full.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from watch.exporting.metrics.catalogue import METRICS, Sample
from watch.exporting.otel.step_spans import SpanRow

__all__ = ["Otlp", "is_configured", "otlp"]

_SIGNALS = ("", "_TRACES", "_METRICS", "_LOGS")
_MAX_WAITING = 64
_BATCH = 512
CLOSE_S = 5.0
_SEVERITY = {"info": 9, "warning": 13, "critical": 21}  # INFO, WARN, FATAL on OpenTelemetry's scale


def is_configured(environment: Mapping[str, str] | None = None) -> bool:
    """True if OpenTelemetry's variables set an endpoint and do not disable the SDK."""
    variables = os.environ if environment is None else environment
    if variables.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    return any(variables.get(f"OTEL_EXPORTER_OTLP{signal}_ENDPOINT") for signal in _SIGNALS)


class Otlp:
    """Encodes and sends in a separate thread. `num_dropped` counts batches that failed or did not fit the queue."""

    def __init__(self, *, run_id: str, node_rank: int) -> None:
        from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        attributes: dict[str, Any] = {
            "service.name": "rankscope", "rankscope.run_id": run_id, "rankscope.node": node_rank,
            "host.name": os.uname().nodename,
        }  # fmt: skip
        self._resource = Resource(attributes).merge(Resource.create())  # OTEL_RESOURCE_ATTRIBUTES take precedence
        self._scope = InstrumentationScope("rankscope")
        self._exporters: dict[str, Any] = {}
        self._factories: dict[str, Callable[[], Any]] = {
            "spans": OTLPSpanExporter, "metrics": OTLPMetricExporter, "logs": OTLPLogExporter,
        }  # fmt: skip
        self.num_sent = self.num_dropped = 0
        self._since_ns = time.time_ns()
        self._waiting: queue.Queue[tuple[str, Callable[[], Any]] | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._send_all, name="otlp", daemon=True)
        self._thread.start()

    def spans(self, rows: Sequence[SpanRow]) -> None:
        """Send spans, in batches."""
        for first in range(0, len(rows), _BATCH):
            part = rows[first : first + _BATCH]
            self._offer("spans", lambda part=part: [self._span(row) for row in part])  # type: ignore[misc]

    def metrics(self, samples: Iterable[Sample], now_ns: int) -> None:
        """Send one snapshot of all metrics."""
        snapshot = tuple(samples)
        self._offer("metrics", lambda: self._metrics(snapshot, now_ns))

    def logs(self, findings: Sequence[Mapping[str, Any]], now_ns: int) -> None:
        """Send findings (in the form of `Finding.to_json`) as log records."""
        sent = tuple(findings)
        if sent:
            self._offer("logs", lambda: [self._log(finding, now_ns) for finding in sent])

    def close(self) -> None:
        """Send what is queued, for at most `CLOSE_S`."""
        try:
            self._waiting.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def _offer(self, signal: str, encode: Callable[[], Any]) -> None:
        try:
            self._waiting.put_nowait((signal, encode))
        except queue.Full:
            self.num_dropped += 1

    def _send_all(self) -> None:
        while (offered := self._waiting.get()) is not None:
            signal, encode = offered
            try:
                if signal not in self._exporters:
                    self._exporters[signal] = self._factories[signal]()
                result = self._exporters[signal].export(encode())
                sent = getattr(result, "name", "") == "SUCCESS"
            except Exception:  # any error of the collector, the network or the SDK is counted, and the run continues
                sent = False
            self.num_sent += sent
            self.num_dropped += not sent

    def _span(self, row: SpanRow) -> Any:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, TraceFlags
        from opentelemetry.trace.status import Status, StatusCode

        def context(span_id: int) -> SpanContext:
            return SpanContext(row.trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

        return ReadableSpan(
            name=row.name,
            context=context(row.span_id),
            parent=None if row.parent_id is None else context(row.parent_id),
            resource=self._resource,
            attributes=dict(row.attributes),
            status=Status(StatusCode.ERROR) if row.is_error else Status(StatusCode.UNSET),
            start_time=row.start_ns,
            end_time=row.end_ns,
            instrumentation_scope=self._scope,
        )

    def _metrics(self, samples: Sequence[Sample], now_ns: int) -> Any:
        from opentelemetry.sdk.metrics.export import (
            AggregationTemporality,
            Gauge,
            Metric,
            MetricsData,
            NumberDataPoint,
            ResourceMetrics,
            ScopeMetrics,
            Sum,
        )

        points: dict[str, list[NumberDataPoint]] = {}
        for sample in samples:
            attributes = {f"rankscope.{name}": value for name, value in sample.labels.items()}
            points.setdefault(sample.name, []).append(
                NumberDataPoint(attributes, self._since_ns, now_ns, float(sample.value))
            )
        metrics = []
        for name, found in points.items():
            metric = METRICS[name]
            data: Gauge | Sum = Gauge(found)
            if metric.kind == "counter":
                data = Sum(found, AggregationTemporality.CUMULATIVE, True)
            metrics.append(Metric(metric.otel_name, metric.help, metric.otel_unit, data))
        scope = ScopeMetrics(self._scope, metrics, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])

    def _log(self, finding: Mapping[str, Any], now_ns: int) -> Any:
        from opentelemetry._logs import LogRecord, SeverityNumber
        from opentelemetry.sdk._logs import ReadableLogRecord

        attributes: dict[str, Any] = {
            f"rankscope.{name}": value for name, value in finding.items() if isinstance(value, (str, int, float))
        }
        if finding.get("ranks"):
            attributes["rankscope.ranks"] = list(finding["ranks"])
        severity = str(finding.get("severity", "info"))
        record = LogRecord(
            timestamp=now_ns,
            observed_timestamp=now_ns,
            severity_text=severity.upper(),
            severity_number=SeverityNumber(_SEVERITY.get(severity, 9)),
            body=str(finding.get("summary", "")),
            attributes=attributes,
            event_name="rankscope.finding",
        )
        return ReadableLogRecord(record, self._resource, self._scope)


@contextmanager
def otlp(*, run_id: str, node_rank: int) -> Iterator[Otlp]:
    """A connection to a collector until the block ends. Raises ImportError without the `otel` extra."""
    collector = Otlp(run_id=run_id, node_rank=node_rank)
    try:
        yield collector
    finally:
        collector.close()
