"""Current activity, one row per rank; failing ranks first.

    rows = rank_rows(store, reports, now_ns=time.time_ns())
    rows[0].rank, rows[0].doing, rows[0].doing_s       # 3, "forward", 12.4: it has been there for 12.4 s

Findings are passed in; this module does not analyze. It works for live and finished runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analyzers.figures.ranks.rank_step import MEASURES
from analyzers.finding import SEVERITIES, Finding
from analyzers.run.calls.snapshot import SNAPSHOT_EVENTS, AttemptView, RankView, attempts, take_snapshot
from analyzers.run.records.event_log import EventLog
from analyzers.run.records.newest_steps import NEWEST_STEPS
from analyzers.source import READ_ROWS, READ_STEPS, Source, every_kth

__all__ = ["RankRow", "RankRows", "rank_rows"]

_ENDED = ("ended", "dead")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One rank. Times are medians over its newest finished steps, or over all steps; None if not recorded."""

    rank: int
    state: str
    """running, stalled, stopped, dead or ended."""
    step: int | None = None
    doing: str = ""
    """Current phase or call in flight; empty once the rank has ended."""
    doing_s: float | None = None
    """Seconds since its newest record."""
    own_ms: float | None = None
    waiting_ms: float | None = None
    memory_bytes: int | None = None
    load_ratio: float | None = None
    """GPU utilization, 0 to 1."""
    host: str = ""
    finding: str = ""
    severity: str = ""
    is_over: bool = False
    """True if the finding is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRows:
    """All ranks of the newest attempt, worst first."""

    attempt: int | None
    step: int | None
    step_ms: float | None
    """Median time of the newest finished steps."""
    rows: tuple[RankRow, ...]


def rank_rows(
    source: Source,
    findings: Sequence[Finding],
    *,
    now_ns: int,
    has_ended: bool = False,
    closed: Collection[str] = (),
) -> RankRows:
    """Read the newest attempt. `findings`: open ones first (worst first), then closed ones. `closed` contains the ids
    of the closed ones.

    `has_ended`: take medians over all steps, as the run's report does.
    """
    known = attempts(source)
    if not known:
        return RankRows(attempt=None, step=None, step_ms=None, rows=())
    attempt = known[-1]
    view = take_snapshot(source, attempt, EventLog.load(source, SNAPSHOT_EVENTS))
    since_step = 0 if has_ended else (view.step or 0) - NEWEST_STEPS
    medians, memory = _medians(source, attempt, since_step), _memory(source, attempt)
    hosts_and_loads = _hosts_and_loads(source, attempt)
    worst = _worst(findings, attempt, closed)
    rows = []
    for rank, rank_view in view.ranks.items():
        own_ms, waiting_ms = medians.get(rank, (None, None))
        host, load_ratio = hosts_and_loads.get(rank, ("", None))
        finding = worst.get(rank)
        state = "ended" if rank_view.closed else rank_view.state
        rows.append(
            RankRow(
                rank=rank,
                state=state,
                step=rank_view.step,
                doing="" if state in _ENDED else _doing(rank_view),
                doing_s=max(0.0, (now_ns - rank_view.last_ns) / 1e9)
                if rank_view.last_ns and state not in _ENDED
                else None,
                own_ms=own_ms,
                waiting_ms=waiting_ms,
                memory_bytes=memory.get(rank),
                load_ratio=load_ratio,
                host=host,
                finding="" if finding is None else finding.kind,
                severity="" if finding is None else finding.severity,
                is_over=finding is not None and finding.id in closed,
            )
        )
    places = {id(finding): place for place, finding in enumerate(findings)}
    order_of = {rank: places[id(finding)] for rank, finding in worst.items()}
    rows.sort(key=lambda row: _sort_key(row, order_of.get(row.rank, 0), view))
    step_ms = view.median_step_ns / 1e6 if view.median_step_ns else None
    return RankRows(attempt=attempt, step=view.step, step_ms=step_ms, rows=tuple(rows))


def _doing(view: RankView) -> str:
    if view.calls:
        return f"{view.calls[0].text}{f' and {view.num_in_flight - 1} more' if view.num_in_flight > 1 else ''}"
    return view.doing.removeprefix("in ")


def _sort_key(row: RankRow, place: int, view: AttemptView) -> tuple[Any, ...]:
    """Sort key: dead and stopped ranks, then ranks with a finding in the order of the findings, then the ranks furthest
    behind, then those silent longest."""
    state = ("dead", "stopped").index(row.state) if row.state in ("dead", "stopped") else 2
    severity = SEVERITIES.index(row.severity) if row.severity and not row.is_over else len(SEVERITIES)
    behind = (view.step or 0) - (row.step if row.step is not None else -1)
    steps = view.median_step_ns / 1e9 or 1.0
    # rounded coarsely, because healthy ranks would otherwise change places all the time
    silent_steps = int((row.doing_s or 0.0) / steps / 10)
    return state, severity, not row.is_over, place, -behind if behind > 1 else 0, -silent_steps, row.rank


def _worst(findings: Sequence[Finding], attempt: int, closed: Collection[str]) -> dict[int, Finding]:
    """Return each rank's worst open finding in this attempt. If a rank has no open finding, return its worst closed
    one."""
    found: dict[int, Finding] = {}

    def place(finding: Finding) -> tuple[bool, int]:
        return finding.id in closed, SEVERITIES.index(finding.severity)

    for finding in findings:
        if finding.attempt in (None, attempt):
            for rank in finding.ranks:
                known = found.get(rank)
                if known is None or place(finding) < place(known):
                    found[rank] = finding
    return found


def _medians(source: Source, attempt: int, since_step: int) -> dict[int, tuple[float | None, float | None]]:
    if not source.has("steps"):
        return {}
    rows = source.rows(
        f"""
        SELECT rank, median({MEASURES["own work"][0]}), median({MEASURES["waiting"][0]}) FROM steps
        WHERE attempt = ? AND rank >= 0 AND step > ? AND step % ? = 0 AND duration_ns IS NOT NULL GROUP BY rank
        """,
        [attempt, since_step, every_kth(source, "steps", READ_ROWS, READ_STEPS) if since_step == 0 else 1],
    )
    return {rank: (own_ms, waiting_ms) for rank, own_ms, waiting_ms in rows}


def _memory(source: Source, attempt: int) -> Mapping[int, int]:
    if not source.has("steps"):
        return {}
    rows = source.rows(
        "SELECT rank, arg_max(memory_bytes, step) FROM steps WHERE attempt = ? AND rank >= 0 GROUP BY rank", [attempt]
    )
    return {rank: num_bytes for rank, num_bytes in rows if num_bytes is not None}


def _hosts_and_loads(source: Source, attempt: int) -> dict[int, tuple[str, float | None]]:
    """Return the host of each rank, and the load of its GPU if recorded."""
    if not source.has("ranks"):
        return {}
    hosts = source.rows(
        "SELECT rank, arg_max(host, wall_ns), arg_max(device_uuid, wall_ns) FROM ranks WHERE attempt = ? AND rank >= 0"
        " GROUP BY rank",
        [attempt],
    )
    loads = {}
    if source.has("health"):
        rows = source.rows(
            "SELECT device, arg_max(gpu_utilization_ratio, sample_ns) FROM health WHERE device <> 'host'"
            " GROUP BY device"
        )
        loads = {device: ratio for device, ratio in rows if ratio is not None}
    return {rank: (host or "", loads.get(device)) for rank, host, device in hosts}
