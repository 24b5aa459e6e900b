"""Export a node's telemetry to other systems. Runs in `watch` or in a reader, never in a rank, and makes no verdicts.

exports        all exporters of one watch
metrics        the catalogue of all metrics, and their samples from the store of a node
prometheus     `/metrics`, and the targets file, by which Prometheus discovers live runs
otel           spans, metrics and findings to an OpenTelemetry collector
trackers       TensorBoard and Weights & Biases
webhook        findings to a URL or a command
"""

from __future__ import annotations
