"""The `/metrics` endpoint of a watch: measured after a tick, served from a thread, announced in `runs/targets.json`.

    with metrics_endpoint(run, node_rank=0, stall=policy, events=events) as metrics:
        metrics.tick(store, now_ns, facts)          # while the store is open

If the endpoint cannot be opened (its port is in use), an event reports this and the run continues without it. A
measurement takes several queries, so a node that is not scraped is measured only every `UNSCRAPED_EVERY_S`. Names,
units and help of the metrics are in `watch.exporting.metrics.catalogue`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analyzers.run.policy import StallPolicy
from analyzers.source import Source
from probes.settings.section import read
from probes.settings.sections import MetricsSettings
from probes.tape import event_kinds
from probes.tape.events import EventWriter
from probes.tape.rundir import RunDir
from watch.exporting.metrics.catalogue import Sample
from watch.exporting.metrics.node_metrics import NodeMetrics
from watch.exporting.otel.otlp import is_configured
from watch.exporting.prometheus.server import Endpoint, Listen, ListenError, Snapshot, serve

__all__ = ["TARGETS_FILE", "Metrics", "TickFacts", "announced", "listen_address", "metrics_endpoint"]

TARGETS_FILE = "targets.json"
MAX_BYTES = 4 << 20

UNSCRAPED_EVERY_S = 15.0
SCRAPED_FOR_S = 60.0
"""Seconds after a scrape during which a node counts as scraped. A scraper with a longer interval would miss the end of
a run in any case.
"""
COST_FACTOR = 9.0
"""Minimum pause after a measurement, relative to its duration, so that watch spends at most a tenth of its time
measuring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TickFacts:
    """Telemetry of the watch itself."""

    tick_s: float
    rows: int
    failed_ticks: int
    analyzer_errors: Mapping[str, int]


class Metrics:
    """Measures a node and keeps the snapshot that scrapes read."""

    def __init__(self, run: RunDir, node_rank: int, stall: StallPolicy) -> None:
        self._run = run
        self._node = NodeMetrics(run.manifest(), node_rank=node_rank, stall=stall)
        self.snapshot = Snapshot(self._node.common)
        self.endpoint: Endpoint | None = None
        self.samples: tuple[Sample, ...] = ()
        """The newest measurement."""
        self.is_wanted = is_configured()
        """True if someone may read the metrics: a collector or a scraper."""
        self._measured_ns, self._scraped_ns, self._num_scrapes = 0, 0, 0
        self._cost_s = 0.0
        self._num_scrapes_before = 0
        """Number of scrapes at the newest measurement."""

    def tick(self, source: Source, now_ns: int, facts: TickFacts, *, measure_now: bool = False) -> None:
        """Within the cost limit, measure at each tick while the node is scraped, and otherwise every
        `UNSCRAPED_EVERY_S`."""
        pause_s = COST_FACTOR * self._cost_s if self.is_scraped(now_ns) else UNSCRAPED_EVERY_S
        if not self.is_wanted or not (measure_now or now_ns - self._measured_ns >= pause_s * 1e9):
            return
        start = time.monotonic()
        self._measured_ns = now_ns
        samples = self._node.measure(source, now_ns)
        if not any(sample.name == "rankscope_disk_free_bytes" for sample in samples):
            samples.append(Sample("rankscope_disk_free_bytes", shutil.disk_usage(self._run.path).free))
        self.samples = (*samples, *_telemetry(facts, now_ns))
        self.snapshot.replace(self.samples)
        self._num_scrapes_before = self.snapshot.num_scrapes
        self._cost_s = time.monotonic() - start

    def is_scraped(self, now_ns: int) -> bool:
        """Return True if a scrape came since the last call or within `SCRAPED_FOR_S`."""
        if self.snapshot.num_scrapes != self._num_scrapes:
            self._num_scrapes, self._scraped_ns = self.snapshot.num_scrapes, now_ns
        return now_ns - self._scraped_ns < SCRAPED_FOR_S * 1e9

    def linger(self) -> None:
        """Wait until the end of the run has been scraped, if the node was scraped recently. Called after the run."""
        deadline = time.monotonic() + SCRAPED_FOR_S
        if self.endpoint is None or time.time_ns() - self._scraped_ns > SCRAPED_FOR_S * 1e9:
            return
        while self.snapshot.num_scrapes == self._num_scrapes_before and time.monotonic() < deadline:
            time.sleep(0.1)


def _telemetry(facts: TickFacts, now_ns: int) -> Iterator[Sample]:
    yield Sample("rankscope_telemetry_last_tick_timestamp_seconds", now_ns / 1e9)
    yield Sample("rankscope_telemetry_tick_seconds", facts.tick_s)
    yield Sample("rankscope_telemetry_rows_total", facts.rows)
    yield Sample("rankscope_telemetry_failed_ticks_total", facts.failed_ticks)
    for analyzer, count in facts.analyzer_errors.items():
        yield Sample("rankscope_telemetry_analyzer_errors_total", count, {"analyzer": analyzer})


@contextmanager
def metrics_endpoint(
    run: RunDir, node_rank: int, *, stall: StallPolicy, events: EventWriter, listen: Listen | None = None
) -> Iterator[Metrics]:
    """Serve until the block ends; `listen` overrides the run's configuration."""
    metrics = Metrics(run, node_rank, stall)
    with ExitStack() as stack:
        try:
            listen = listen or listen_address(run.manifest())
            if listen is not None:
                metrics.endpoint = endpoint = stack.enter_context(serve(metrics.snapshot, listen))
                metrics.is_wanted = True
                stack.enter_context(
                    announced(run.path.parent, run.run_id, node_rank, endpoint.address, is_tls=endpoint.is_tls)
                )
                events.write(event_kinds.METRICS_SERVED, url=endpoint.url)
        except ListenError as error:
            events.write(event_kinds.METRICS_REFUSED, reason=str(error))
        yield metrics


def listen_address(manifest: Mapping[str, Any]) -> Listen | None:
    """Configured address of the metrics; None if they are not served. Raises ListenError."""
    settings = read(MetricsSettings, manifest)
    if not settings.listen:
        return None
    return Listen.parse(
        settings.listen,
        certificate=Path(settings.tls_cert) if settings.tls_cert else None,
        key=Path(settings.tls_key) if settings.tls_key else None,
        token=read_token(Path(settings.token_file)) if settings.token_file else "",
    )


def read_token(path: Path) -> str:
    """Read the token in a file, without the line end. Raises ListenError."""
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not ASCII text"
        raise ListenError(f"token file {path}: {reason}") from None
    if not token:
        raise ListenError(f"token file {path} is empty: write the bearer token into it")
    return token


@contextmanager
def announced(runs_dir: Path, run_id: str, node_rank: int, address: str, *, is_tls: bool = False) -> Iterator[None]:
    """Keep an entry for this endpoint in the targets file until the block ends. Write errors are ignored.

    A killed watch leaves its entry behind. Prometheus then sees `up == 0`, which is right while the run should be
    alive. The next watch of the same folder removes entries of processes on this machine that have exited.
    """
    entry = {
        "targets": [address],
        "labels": {
            "__meta_rankscope_run": run_id,
            "__meta_rankscope_node": str(node_rank),
            "__meta_rankscope_pid": str(os.getpid()),
            "__meta_rankscope_host": os.uname().nodename,
            "__scheme__": "https" if is_tls else "http",
            "job": "rankscope",
        },
    }
    with contextlib.suppress(OSError):
        _change(runs_dir, lambda entries: [*entries, entry])
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            _change(runs_dir, lambda entries: [other for other in entries if other != entry])


def _change(runs_dir: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    path = runs_dir / TARGETS_FILE
    with (runs_dir / f".{TARGETS_FILE}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries = change([entry for entry in _read(path) if _is_alive(entry)])
        fresh = path.with_name(f".{TARGETS_FILE}-{os.getpid()}")
        fresh.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
        fresh.replace(path)


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            loaded = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return []
    return [entry for entry in loaded if isinstance(entry, dict)] if isinstance(loaded, list) else []


def _is_alive(entry: dict[str, Any]) -> bool:
    labels = entry.get("labels")
    if not isinstance(labels, dict) or labels.get("__meta_rankscope_host") != os.uname().nodename:
        return True  # an entry of another machine, or not written by Rankscope
    pid = str(labels.get("__meta_rankscope_pid", ""))
    return not pid.isdecimal() or Path(f"/proc/{pid}").exists()
