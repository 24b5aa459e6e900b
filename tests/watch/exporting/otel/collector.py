"""A small OpenTelemetry collector: takes OTLP over HTTP and decodes the protobuf with the SDK's own messages."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

__all__ = ["Collector", "collector"]

_MESSAGES = {"/v1/traces": ExportTraceServiceRequest, "/v1/metrics": ExportMetricsServiceRequest,
             "/v1/logs": ExportLogsServiceRequest}  # fmt: skip


_GROUPS = {"/v1/traces": "resource_spans", "/v1/metrics": "resource_metrics", "/v1/logs": "resource_logs"}


class Collector:
    """Received data: `spans`, `metrics` (name -> metric, the newest), `logs`; `resource` as a dict."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.metrics: dict[str, Any] = {}
        self.logs: list[Any] = []
        self.resource: dict[str, Any] = {}
        self.holds = False  # requests wait for `released`
        self.released = threading.Event()
        self.answered = 0
        self.url = ""

    def take(self, path: str, body: bytes) -> None:
        message = _MESSAGES[path]()
        message.ParseFromString(body)
        for group in getattr(message, _GROUPS[path]):
            self.resource = attributes(group.resource)
            if path == "/v1/traces":
                self.spans += [span for scope in group.scope_spans for span in scope.spans]
            elif path == "/v1/metrics":
                self.metrics |= {metric.name: metric for scope in group.scope_metrics for metric in scope.metrics}
            else:
                self.logs += [record for scope in group.scope_logs for record in scope.log_records]


def attributes(holder: Any) -> dict[str, Any]:
    """An OTLP list of key and value as a dict."""
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in holder.attributes}


@contextmanager
def collector() -> Iterator[Collector]:
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if found.holds:
                found.released.wait(60)
            found.answered += 1
            found.take(self.path, body)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    found.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield found
    finally:
        found.released.set()
        server.shutdown()
        server.server_close()
