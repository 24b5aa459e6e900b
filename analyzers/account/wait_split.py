"""Split waits inside steps by what the rank waited for: the transfer, a late peer, or its neighbours in the pipeline.

    split = split_waits(source)
    split.late_ratio[(0, 3)]       # share of rank 3's waits in attempt 0 that was for a late rank
    split.idle_ns[(0, 3)]          # idle time per step in its pipeline, nanoseconds

All members leave a collective together. The member with the shortest time in the collective came last, and this time
is the transfer. A member that was blocked for longer waited for the late member:
`late = max(0, wait - shortest time of a member)`. The rest is *exposed communication*. Only durations are used.

If no collectives were recorded, or records of them were lost, the shortest wait of any rank in a step counts as the
step's transfer. This is coarser, because all groups are taken together. In long runs only every k-th step is read.

If some ranks have no records, nothing is split, because the late rank may be one of them. Nothing is split in a
pipeline either if its idle time could not be measured, because most of its waits may be this idle time.

On GPUs without device timestamps, steps record no waits. Calls give shares of the step time instead (`device_shares`):
the time with communication in flight, and a lower bound of the waiting in it. In the rest of the step the device
computed or was idle. The rest counts as own time in an unknown phase. Time with communication in flight is not
divided into hidden and exposed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from analyzers.account.bubble import COMPUTATIONS, PipelineSpans, measure_idle
from analyzers.account.device.device_timings import device_rows
from analyzers.account.device.measured_by import has_device_calls, is_stamped
from analyzers.account.device.stalls import stall_parts
from analyzers.account.time_classes import WAITED
from analyzers.run.calls.snapshot import attempts
from analyzers.run.records.elsewhere import ranks_with_lost_calls, ranks_without_steps
from analyzers.source import READ_CALLS, READ_STEPS, Ints, Source, every_kth, floats, ints, missing_tables

__all__ = ["WaitSplit", "pipelines", "split_waits"]

MAX_PIPELINE_STEPS = 200
MAX_SPANS = 400_000

Places = Mapping[tuple[int, int], float]
"""A number for each (attempt, rank)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitSplit:
    """Values by (attempt, rank). `basis`: the records that they come from (collectives, steps, durations of calls);
    empty if nothing was split."""

    late_ratio: Places = field(default_factory=dict)
    idle_ns: Places = field(default_factory=dict)
    basis: str = ""
    device: Mapping[tuple[int, int], DeviceShares] = field(default_factory=dict)
    """Shares of ranks on GPUs without stamps."""
    in_flight_ratio: Places = field(default_factory=dict)
    """For stamped GPUs: share of the time waiting for the host in which communication was in flight."""
    idle_unknown: Collection[tuple[int, int]] = ()
    """Ranks in pipelines without a measured idle time; their waits are not split."""
    absent: Mapping[int, Collection[int]] = field(default_factory=dict)
    """Ranks without records by attempt; waits in these attempts are not split."""


def split_waits(source: Source, attempt: int | None = None, since_step: int = 0) -> WaitSplit:
    """Ratios and times of one attempt or all attempts; empty if the run recorded no collectives and no waits."""
    where = f"step >= {int(since_step)}" + ("" if attempt is None else f" AND attempt = {int(attempt)}")
    numbers = attempts(source) if attempt is None else [attempt]
    partial = {number for number in numbers if ranks_with_lost_calls(source, number)}
    late = _by_calls(source, where) if source.has("collectives") and not partial else {}
    basis = "collectives"
    stamped, in_flight = _by_stalls(source, [number for number in numbers if number not in partial], since_step)
    late |= stamped
    if not late:
        late, basis = _by_steps(source, where), "steps"
    absent = {number: ranks for number in numbers if (ranks := ranks_without_steps(source, number))}
    in_pipelines = [one for one in pipelines(source) if one[0] in numbers] if source.has("ranks") else []
    idle = _pipelines(source, where, in_pipelines)
    unknown = {(number, rank) for number, ranks in in_pipelines for rank in ranks if (number, rank) not in idle}
    late = {place: ratio for place, ratio in late.items() if place[0] not in absent and place not in unknown}
    device = {
        (number, rank): shares.unsplit() if (number, rank) in unknown else shares
        for number in numbers
        if number not in absent and number not in partial and has_device_calls(source, number)
        for rank, shares in device_shares(source, number, since_step=since_step).items()
    }
    basis = basis if late else "durations of calls" if device.keys() - unknown else ""
    return WaitSplit(late_ratio=late, idle_ns=idle, basis=basis, device=device, in_flight_ratio=in_flight,
                     idle_unknown=unknown, absent=absent)  # fmt: skip


def _by_calls(source: Source, where: str) -> dict[tuple[int, int], float]:
    """Share of each rank's waits that was for late members: the shortest time of a member is the call's transfer, and a
    wait beyond it was for a late one."""
    every = every_kth(source, "collectives", READ_CALLS, READ_STEPS)
    rows = source.rows(
        f"""
        SELECT attempt, rank, CAST(sum(greatest(0, waited - transfer)) AS DOUBLE), CAST(sum(waited) AS DOUBLE) FROM (
            SELECT attempt, rank, greatest(coalesce(wait_ns, 0), 0) AS waited,
                   greatest(min(end_ns - issue_ns) OVER (PARTITION BY attempt, process_group, seq), 0) AS transfer
            FROM collectives
            WHERE end_ns IS NOT NULL AND rank >= 0 AND peer IS NULL AND step % ? = 0 AND {where}
              AND coalesce(phase, '') NOT IN ('checkpoint', 'evaluate'))
        GROUP BY attempt, rank
        """,
        [every],
    )
    return {(attempt, rank): late / waited for attempt, rank, late, waited in rows if waited}


def _by_stalls(
    source: Source, numbers: Sequence[int], since_step: int
) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """For GPUs with device timestamps: the share of waits that was for late ranks, and the share of host waits in which
    calls were in flight."""
    late: dict[tuple[int, int], float] = {}
    in_flight: dict[tuple[int, int], float] = {}
    if missing_tables(source, "device_stalls", "collectives"):
        return late, in_flight
    every = every_kth(source, "collectives", READ_CALLS, READ_STEPS)
    for attempt in numbers:
        sums: dict[int, list[int]] = {}
        for part in stall_parts(source, attempt, since_step=since_step, every=every):
            sums[part.rank] = [a + b for a, b in zip(sums.get(part.rank, [0] * 4), part[2:], strict=True)]
        for rank, (exposed, for_late, host, host_in_flight) in sums.items():
            if exposed:
                late[attempt, rank] = for_late / exposed
            if host:
                in_flight[attempt, rank] = host_in_flight / host
    return late, in_flight


def _by_steps(source: Source, where: str) -> dict[tuple[int, int], float]:
    every = every_kth(source, "steps", READ_CALLS, READ_STEPS)
    rows = source.rows(
        f"""
        SELECT attempt, rank, CAST(sum(waited - shortest) AS DOUBLE), CAST(sum(waited) AS DOUBLE) FROM (
            SELECT attempt, rank, {WAITED} AS waited, min({WAITED}) OVER (PARTITION BY attempt, step) AS shortest
            FROM steps
            WHERE duration_ns IS NOT NULL AND collective_wait_ns IS NOT NULL AND rank >= 0 AND step % ? = 0 AND {where}
              AND coalesce(committed, true))
        GROUP BY attempt, rank
        """,
        [every],
    )
    return {(attempt, rank): late / waited for attempt, rank, late, waited in rows if waited}


def _pipelines(
    source: Source, where: str, in_pipelines: Sequence[tuple[int, Sequence[int]]]
) -> dict[tuple[int, int], float]:
    """Mean idle time per step of every rank in a pipeline, without those whose idle time can't be measured."""
    # The host of a GPU runs ahead, so its spans don't show when the stage computed.
    ahead = {number for number, _ in in_pipelines if is_stamped(source, number) or has_device_calls(source, number)}
    on_host = [(number, members) for number, members in in_pipelines if number not in ahead]
    if not (on_host and source.has("spans")):
        return {}
    ((num_spans, num_steps),) = source.rows(
        f"SELECT count(*), count(DISTINCT step) FROM spans WHERE stage IS NOT NULL AND {where}"
    )
    if not num_spans:
        return {}
    every = max(1, -(-num_steps // MAX_PIPELINE_STEPS), -(-num_spans // MAX_SPANS))
    table = source.query(
        f"""
        SELECT attempt, rank, step, stage, coalesce(microbatch, -1) AS microbatch, kind, start_ns,
               coalesce(end_ns, -1) AS end_ns
        FROM spans WHERE stage IS NOT NULL AND kind IN ({", ".join(f"'{kind}'" for kind in COMPUTATIONS)})
          AND step % ? = 0 AND {where} ORDER BY attempt, rank, start_ns
        """,
        [every],
    )
    rows_of = _rows_by_rank(ints(table["attempt"]), ints(table["rank"]))
    columns = {name: ints(table[name]) for name in ("rank", "step", "stage", "microbatch", "start_ns", "end_ns")}
    idle: dict[tuple[int, int], float] = {}
    for attempt, members in on_host:
        rows = np.concatenate([rows_of.get((attempt, rank), np.zeros(0, np.int64)) for rank in members])
        spans = PipelineSpans(**{name: values[rows] for name, values in columns.items()}, kind=table["kind"][rows])
        steps = measure_idle(spans, members)
        for rank in members if steps else ():
            idle[attempt, rank] = float(np.mean([max(0, step.total_ns - step.ranks[rank].busy_ns) for step in steps]))
    return idle


def _rows_by_rank(attempt: Ints, rank: Ints) -> dict[tuple[int, int], Ints]:
    """{(attempt, rank): indices of its rows} in columns sorted by attempt and rank.

    With it, one query serves all pipelines.
    """
    if not len(rank):
        return {}
    begins = np.flatnonzero(np.r_[True, (np.diff(attempt) != 0) | (np.diff(rank) != 0)])
    ends = np.r_[begins[1:], len(rank)]
    return {
        (int(attempt[begin]), int(rank[begin])): np.arange(begin, end)
        for begin, end in zip(begins, ends, strict=True)
    }  # fmt: skip


def pipelines(source: Source) -> list[tuple[int, list[int]]]:
    """Return (attempt, ranks) of every pipeline: ranks that differ only in their stage."""
    rows = source.rows(
        """
        SELECT attempt, list(rank ORDER BY pp) FROM (
            SELECT attempt, rank, arg_max(coalesce(pp, 0), wall_ns) AS pp,
                   arg_max((coalesce(dp_replicate, 0), coalesce(dp_shard, 0), coalesce(cp, 0), coalesce(tp, 0),
                            coalesce(ep, 0)), wall_ns) AS other_places
            FROM ranks WHERE rank >= 0 GROUP BY attempt, rank)
        GROUP BY attempt, other_places HAVING count(DISTINCT pp) > 1 ORDER BY attempt, min(rank)
        """
    )
    return [(attempt, [int(rank) for rank in ranks]) for attempt, ranks in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShares:
    """Shares of a rank's step time without checkpoints and evaluations; they add up to 1."""

    data: float
    """Loading that made the rank later than its peers."""
    device: float
    """No communication in flight."""
    in_flight: float
    """Communication in flight, hidden behind computing or not."""
    waiting: float
    """Lower bound of waiting for other ranks in communication."""

    def unsplit(self) -> DeviceShares:
        """Return a copy in which waiting counts as communication in flight."""
        return replace(self, in_flight=self.in_flight + self.waiting, waiting=0.0)


def device_shares(source: Source, attempt: int, *, since_step: int = 0) -> dict[int, DeviceShares]:
    """Shares by rank."""
    table = device_rows(source, attempt, since_step=since_step)
    rows = source.rows(
        """
        SELECT rank, sum(greatest(end_ns - greatest(issue_ns, coalesce(before_ns, issue_ns)), 0))::DOUBLE / 1e6 FROM (
            SELECT rank, issue_ns, end_ns, max(end_ns) OVER (PARTITION BY rank ORDER BY issue_ns, end_ns
                       ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before_ns
            FROM collectives WHERE attempt = ? AND step >= ? AND end_ns >= issue_ns AND rank >= 0)
        GROUP BY rank
        """,
        [attempt, since_step],
    )
    in_flight = {int(rank): float(ms) for rank, ms in rows}
    ranks = ints(table["rank"])
    found = {}
    for rank in np.unique(ranks).tolist():
        rows_of_rank = ranks == rank
        total, waiting, data = (float(floats(table[name])[rows_of_rank].sum()) for name in ("duration", "wait", "data"))
        if total <= 0:
            continue
        communicating = min(max(in_flight.get(rank, 0.0), waiting), total - data)
        found[rank] = DeviceShares(
            data=data / total, device=(total - data - communicating) / total,
            in_flight=(communicating - waiting) / total, waiting=waiting / total,
        )  # fmt: skip
    return found
