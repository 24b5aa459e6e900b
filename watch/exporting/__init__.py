"""What leaves a node for other systems. Runs in `watch` or in a reader, never in a rank; forms no verdicts.

catalogue      every metric: name, kind, unit, labels, help; Prometheus, OpenTelemetry and Grafana take them from there
prometheus     `/metrics`, from the newest snapshot of the samples
targets        the file by which Prometheus discovers the runs that live
"""

from __future__ import annotations
