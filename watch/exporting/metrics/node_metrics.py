"""Metrics of a node for `/metrics` and OTLP, measured from its store.

    metrics = NodeMetrics(run.manifest(), node_rank=0)
    samples = metrics.measure(store, now_ns)      # each tick; names from `watch.exporting.metrics.catalogue`

Speed and shares cover the newest `WINDOW_STEPS` steps of the newest attempt. How the time of the whole run was spent is
measured only every `SLOW_EVERY_S`. Nothing is judged here: the findings come from the reports of `watch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from analyzers.report.wording.links import alert_links
from analyzers.run.calls.snapshot import SNAPSHOT_EVENTS, attempts, take_snapshot
from analyzers.run.live.stall_limits import limit_s
from analyzers.run.live.state import LIVE_WORDS, RunState, run_state
from analyzers.run.policy import StallPolicy
from analyzers.run.records.event_log import EventLog, parsed_detail
from analyzers.source import Source
from probes.settings.described import CheckpointFacts, RunFacts
from probes.settings.section import read
from probes.tape import event_kinds
from watch.exporting.metrics.catalogue import Sample
from watch.exporting.metrics.health_samples import health_samples
from watch.exporting.metrics.run_samples import (
    account_samples,
    expert_samples,
    finding_samples,
    planned_bubble_samples,
    rank_samples,
    recovery_samples,
    scalar_samples,
    step_samples,
    validation_samples,
)

__all__ = ["STALLED_HOLD_S", "STATES", "NodeMetrics"]

STATES = (*LIVE_WORDS, "finished", "preempted", "interrupted", "failed", "given up", "fenced", "died", "empty")
SLOW_EVERY_S = 15.0
STALLED_HOLD_S = 10.0
"""A run counts as stalled for at least this many seconds from when a hang is first measured. Recovery takes only a
second or two, which a scrape might miss. Two scrape intervals of `grafana/prometheus/prometheus.yml`.
"""


class NodeMetrics:
    """Measures the node at each tick, but makes slow queries only every `SLOW_EVERY_S`."""

    def __init__(self, manifest: Mapping[str, Any], *, node_rank: int, stall: StallPolicy | None = None) -> None:
        self.common = {"run_id": str(manifest.get("run_id", "")), "node": str(node_rank)}
        self._manifest, self._node_rank = manifest, node_rank
        self._stall = stall or StallPolicy()
        self._slow: list[Sample] = []
        self._slow_ns: int | None = None
        self._was_live = True
        self._hang_ns: int | None = None  # hangs reported up to this time have been measured
        self._stalled_until_ns = 0

    def measure(self, source: Source, now_ns: int) -> list[Sample]:
        """All samples at `now_ns` (epoch nanoseconds). Samples are omitted if their tables are missing."""
        log = EventLog.load(
            source,
            (
                *SNAPSHOT_EVENTS,
                event_kinds.RUN_STARTED,
                event_kinds.ROLLBACK,
                event_kinds.BATCH_SKIPPED,
                event_kinds.PREEMPTED,
            ),
        )
        state = run_state(source, self._stall, now_ns=now_ns, is_watched=True)
        if self._slow_ns is None or now_ns - self._slow_ns >= SLOW_EVERY_S * 1e9 or state.is_live != self._was_live:
            until_ns = now_ns if state.is_live else None  # after the end of the run, its time account does not grow
            self._slow = list(account_samples(source, self._stall, until_ns, self._manifest))
            self._slow += planned_bubble_samples(source, self._manifest) if self._slow else []
            self._slow_ns, self._was_live = now_ns if self._slow else None, state.is_live
        if state.is_live and self._hang_is_shown(source, now_ns):
            state = replace(state, word="stalled")
        return [
            *self._run(source, log, state),
            *step_samples(source, self._manifest),
            *expert_samples(source),
            *scalar_samples(source),
            *validation_samples(source),
            *self._slow,
            *rank_samples(source, log),
            *finding_samples(source, max(attempts(source), default=0), now_ns),
            *recovery_samples(log),
            *self._checkpoints(source),
            *health_samples(source),
        ]

    def _hang_is_shown(self, source: Source, now_ns: int) -> bool:
        """Return True for `STALLED_HOLD_S` after the measurement that first sees a hang. The time is not counted from
        the report of the hang, because on a busy machine more time than this may pass between two measurements.
        """
        after_ns = now_ns - int(STALLED_HOLD_S * 1e9) if self._hang_ns is None else self._hang_ns
        newest_ns = _newest_hang_ns(source, after_ns, now_ns)
        self._hang_ns = after_ns if newest_ns is None else newest_ns
        if newest_ns is not None:
            self._stalled_until_ns = now_ns + int(STALLED_HOLD_S * 1e9)
        return now_ns < self._stalled_until_ns

    def _run(self, source: Source, log: EventLog, state: RunState) -> Iterator[Sample]:
        name = read(RunFacts, self._manifest).name
        device = mesh = ""
        if source.has("ranks"):
            names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
            ((device, world_size, *sizes),) = source.rows(
                "SELECT any_value(split_part(device, ':', 1)), max(world_size), "
                f"{', '.join(f'max({name}) + 1' for name in names)} FROM ranks "
                "WHERE attempt = (SELECT max(attempt) FROM ranks) AND rank >= 0"
            )
            mesh = " ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True) if size and size > 1)
            if world_size is not None:
                yield Sample("rankscope_world_size", world_size)
        version = str(self._manifest.get("rankscope_version", ""))
        labels = {"name": str(name or ""), "mesh": mesh, "device": str(device or ""), "version": version}
        yield Sample("rankscope_run_info", 1, labels)
        links = alert_links(self._manifest)
        if links.dashboard_url or links.runbook_prefix:
            addresses = {"dashboard": links.dashboard_url, "runbook": links.runbook_prefix}
            yield Sample("rankscope_run_links_info", 1, addresses)
        for word in STATES:
            yield Sample("rankscope_run_state", float(word == state.word), {"state": word})
        started = [event.wall_ns for event in log.of(event_kinds.RUN_STARTED)]
        if started:
            yield Sample("rankscope_run_start_timestamp_seconds", min(started) / 1e9)
        numbers = attempts(source)
        if numbers:
            yield Sample("rankscope_attempt", numbers[-1])
            yield Sample("rankscope_restarts_total", len(numbers) - 1)
            view = take_snapshot(source, numbers[-1], log)
            yield Sample("rankscope_stall_limit_seconds", limit_s(view, self._stall))

    def _checkpoints(self, source: Source) -> Iterator[Sample]:
        every = read(CheckpointFacts, self._manifest).interval
        if every is not None:
            yield Sample("rankscope_checkpoint_interval_steps", every)
        if not source.has("checkpoints"):
            return
        for tier, step, wall_ns, stall_ns, num_bytes in source.rows(
            "SELECT tier, arg_max(step, wall_ns), max(wall_ns), arg_max(stall_ns, wall_ns), arg_max(bytes, wall_ns) "
            "FROM checkpoints WHERE state = 'complete' AND tier IS NOT NULL GROUP BY tier ORDER BY tier"
        ):
            labels = {"tier": str(tier)}
            yield Sample("rankscope_checkpoint_step", step or 0, labels)
            yield Sample("rankscope_checkpoint_timestamp_seconds", wall_ns / 1e9, labels)
            if stall_ns is not None:
                yield Sample("rankscope_checkpoint_stall_seconds", stall_ns / 1e9, labels)
            if num_bytes is not None:
                yield Sample("rankscope_checkpoint_bytes", num_bytes, labels)
        ((good_ns, failed),) = source.rows(
            "SELECT max(wall_ns) FILTER (state = 'good' AND tier = 'disk'), count(*) FILTER (state = 'failed') "
            "FROM checkpoints"
        )
        if good_ns is not None:
            yield Sample("rankscope_checkpoint_good_timestamp_seconds", good_ns / 1e9)
        yield Sample("rankscope_checkpoint_failures_total", failed)


def _newest_hang_ns(source: Source, after_ns: int, now_ns: int) -> int | None:
    """Time of the last hang that `watch` reported in this interval (epoch nanoseconds); None if it reported none."""
    if not source.has("events"):
        return None
    rows = source.rows(
        "SELECT wall_ns, detail FROM events WHERE kind = ? AND wall_ns > ? AND wall_ns <= ? ORDER BY wall_ns DESC",
        [event_kinds.FINDING, after_ns, now_ns],
    )
    reports = ((wall_ns, parsed_detail(detail)) for wall_ns, detail in rows)
    hangs = (ns for ns, report in reports if report.get("finding_kind") == "hang" and report.get("status") == "fired")
    return next(hangs, None)
