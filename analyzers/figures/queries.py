"""The SQL behind the figures: what the HTML report and the dashboard ask of a store.

    curve = loss_curve(store)                      # columns, one element a step
    matrix = rank_step(store, "own work")          # rank x step, reduced to what a screen shows
    pieces = timeline(store, attempt=0, first_step=38, last_step=41)

Every answer is small: long tables are reduced inside DuckDB. Missing tables give empty answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from analyzers.communication.bandwidth import call_columns
from analyzers.figures.sampling import sampled
from analyzers.run.event_log import EventLog
from analyzers.source import Ints, Source, floats, ints
from probes.tape import event_kinds

__all__ = [
    "MAX_PIECES",
    "MEASURES",
    "Mark",
    "Matrix",
    "Piece",
    "collectives",
    "loss_curve",
    "marks",
    "own_work",
    "rank_against_others",
    "rank_step",
    "story",
    "timeline",
]

MAX_CELLS = 400
"""Rows and columns of a matrix."""
MAX_PIECES = 5_000
"""Spans and calls of a timeline."""
MAX_STEPS = 2_000
_OWN = " + ".join(
    f"(coalesce({p}_ns, 0) - coalesce({p}_wait_ns, 0))" for p in ("data", "forward", "backward", "optimizer")
)
MEASURES = {
    "own work": (f"nullif({_OWN}, 0) / 1e6", "ms"),
    "step time": ("duration_ns / 1e6", "ms"),
    "waiting": ("collective_wait_ns / 1e6", "ms"),
    "data": ("data_ns / 1e6", "ms"),
    "forward": ("(forward_ns - coalesce(forward_wait_ns, 0)) / 1e6", "ms"),
    "backward": ("(backward_ns - coalesce(backward_wait_ns, 0)) / 1e6", "ms"),
    "optimizer": ("(optimizer_ns - coalesce(optimizer_wait_ns, 0)) / 1e6", "ms"),
    "checkpoint": ("checkpoint_ns / 1e6", "ms"),
    "evaluate": ("evaluate_ns / 1e6", "ms"),
    "memory": ("memory_bytes / 1048576.0", "MiB"),
}
"""What a matrix rank x step can show: name -> expression over `steps`, unit."""
_UNTOLD = (event_kinds.RANK, event_kinds.PROCESS_GROUP, event_kinds.RANK_CLOSED, event_kinds.FINDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened to the training at a step."""

    kind: str
    step: int | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """`values[i, j]`: the largest value of ranks from `ranks[i]` and steps from `steps[j]` on; NaN where none is."""

    ranks: Ints
    steps: Ints
    values: npt.NDArray[np.float64]
    unit: str
    ranks_per_cell: int = 1
    steps_per_cell: int = 1
    looked_at_every: int = 1
    """Distance of the steps that were read."""

    @property
    def is_reduced(self) -> bool:
        """True if a cell stands for more than one rank and step."""
        return self.ranks_per_cell * self.steps_per_cell > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A span or a call of one rank; `end_ms` None: it never ended."""

    rank: int
    kind: str
    is_call: bool
    start_ms: float
    end_ms: float | None
    wait_ms: float = 0.0
    step: int | None = None
    detail: str = ""
    stage: int | None = None
    microbatch: int | None = None
    pipeline: str = ""
    """Where the rank is in the mesh apart from its stage: ranks of one pipeline share it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryEvent:
    """One event of the run."""

    wall_ns: int
    attempt: int
    rank: int
    kind: str
    step: int | None
    detail: dict[str, Any]


def loss_curve(source: Source) -> dict[str, npt.NDArray[Any]]:
    """Columns step, loss, grad_norm, kept, in the order of training, of the first rank that has a loss."""
    if not source.has("steps"):
        return {name: np.zeros(0) for name in ("step", "loss", "grad_norm", "kept")}
    return source.query(
        """
        SELECT step, loss, grad_norm,
               coalesce(committed, true) AND step < coalesce(min(step) OVER (
                   ORDER BY attempt, start_ns ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING), step + 1) AS kept
        FROM steps
        WHERE duration_ns IS NOT NULL AND rank = (SELECT min(rank) FROM steps WHERE loss IS NOT NULL)
        ORDER BY attempt, start_ns
        """
    )


def marks(source: Source) -> list[Mark]:
    """Rollbacks, checkpoints on disk, skipped batches, injected faults and restarts."""
    kinds = (
        event_kinds.ROLLBACK,
        event_kinds.CHECKPOINT,
        event_kinds.BATCH_SKIPPED,
        event_kinds.FAULT_INJECTED,
        event_kinds.ATTEMPT_STARTED,
    )
    log = EventLog.load(source, kinds)
    found = [
        Mark(
            kind="rollback",
            step=e.integer("from_step"),
            text=f"back to step {e.integer('to_step')}: {e.text('reason')}",
        )
        for e in log.of(event_kinds.ROLLBACK)
    ]
    found += [
        Mark(kind="checkpoint", step=e.step, text=f"checkpoint {e.text('path')}")
        for e in log.of(event_kinds.CHECKPOINT)
        if e.text("tier") == "disk" and e.text("state") == "complete"
    ]
    found += [
        Mark(kind="skipped batch", step=e.step, text=f"batch {e.integer('batch_index')}: {e.text('reason')}")
        for e in log.of(event_kinds.BATCH_SKIPPED)
    ]
    found += [
        Mark(kind="fault injected", step=e.step, text=f"{e.text('fault')} on rank {e.rank}")
        for e in log.of(event_kinds.FAULT_INJECTED)
    ]
    if source.has("steps"):
        first = dict(source.rows("SELECT attempt, min(step) FROM steps WHERE attempt > 0 GROUP BY attempt"))
        found += [Mark(kind="restart", step=step, text=f"attempt {attempt}") for attempt, step in sorted(first.items())]
    return found


def rank_step(
    source: Source, measure: str = "step time", *, max_cells: int = MAX_CELLS, max_rows: int | None = None
) -> Matrix:
    """A measure of MEASURES over ranks and steps, each cell the largest of its part. Raises KeyError.

    With `max_rows`, of a longer run only every k-th step is looked at: a first look, in a fraction of the time.
    """
    expression, unit = MEASURES[measure]
    nothing = Matrix(ranks=np.zeros(0, np.int64), steps=np.zeros(0, np.int64), values=np.zeros((0, 0)), unit=unit)
    if not source.has("steps"):
        return nothing
    finished = "duration_ns IS NOT NULL AND rank >= 0"
    ((low, high, first, last, num_rows),) = source.rows(
        f"SELECT min(rank), max(rank), min(step), max(step), count(*) FROM steps WHERE {finished}"
    )
    if low is None or first is None:
        return nothing
    per_rank, per_step = -(-(high - low + 1) // max_cells), -(-(last - first + 1) // max_cells)
    every = 1 if max_rows is None else max(1, min(int(per_step), -(-num_rows // max_rows)))
    finished += f" AND (step - {first}) % {every} = 0" if every > 1 else ""
    table = source.query(
        f"""
        SELECT (rank - {low}) // {per_rank} AS i, (step - {first}) // {per_step} AS j,
               CAST(max({expression}) AS DOUBLE) AS value
        FROM steps WHERE {finished} GROUP BY i, j
        """
    )
    shape = ((high - low) // per_rank + 1, (last - first) // per_step + 1)
    values = np.full(shape, np.nan)
    values[ints(table["i"]), ints(table["j"])] = floats(table["value"])
    return Matrix(
        ranks=low + per_rank * np.arange(shape[0]), steps=first + per_step * np.arange(shape[1]), values=values,
        unit=unit, ranks_per_cell=int(per_rank), steps_per_cell=int(per_step), looked_at_every=every,
    )  # fmt: skip


def timeline(
    source: Source, *, attempt: int, first_step: int, last_step: int, ranks: Sequence[int], limit: int = MAX_PIECES
) -> list[Piece]:
    """Spans and calls of some ranks in a range of steps, the earliest first; what never ended is always among them.

    Times are milliseconds since the first record of the rank's host in the range.
    """
    listed = ", ".join(str(int(rank)) for rank in ranks) or "-1"
    parts = []
    if source.has("spans"):
        parts.append(
            "SELECT rank, step, kind, false AS is_call, start_ns, end_ns, wait_ns, concat_ws(', ', 'stage ' || stage, "
            "'microbatch ' || microbatch) AS detail, stage, microbatch FROM spans"
        )
    if source.has("collectives"):
        parts.append(
            "SELECT rank, step, op AS kind, true AS is_call, issue_ns AS start_ns, end_ns, wait_ns, concat_ws(', ', "
            "process_group || ' number ' || seq, bytes || ' bytes', 'peer ' || peer, caller) AS detail, NULL AS stage, "
            "NULL AS microbatch FROM collectives"
        )
    if not parts:
        return []
    place = "concat_ws('.', dp_replicate, dp_shard, cp, tp, ep)"
    hosts = (
        f"SELECT rank, arg_max(host, wall_ns) AS host, arg_max({place}, wall_ns) AS pipeline FROM ranks GROUP BY rank"
    )
    if not source.has("ranks"):
        hosts = "SELECT -1 AS rank, '' AS host, '' AS pipeline WHERE false"
    chosen = " UNION ALL BY NAME ".join(
        f"({part} WHERE attempt = ? AND step BETWEEN ? AND ? AND rank IN ({listed}) "
        f"ORDER BY end_ns IS NOT NULL, start_ns LIMIT {limit // len(parts)})"
        for part in parts
    )
    rows = source.rows(
        f"""
        SELECT p.rank, kind, is_call, start_ns - zero, end_ns - zero, wait_ns, step, detail, stage, microbatch, pipeline
        FROM (
            SELECT *, min(start_ns) OVER (PARTITION BY coalesce(host, '')) AS zero
            FROM ({chosen}) LEFT JOIN ({hosts}) USING (rank)) p
        ORDER BY start_ns
        """,
        [attempt, first_step, last_step] * len(parts),
    )
    return [
        Piece(
            rank=rank, kind=str(kind or "?"), is_call=is_call, start_ms=start / 1e6,
            end_ms=None if end is None else end / 1e6, wait_ms=(wait or 0) / 1e6, step=step, detail=str(detail or ""),
            stage=stage, microbatch=microbatch, pipeline=str(pipeline or ""),
        )
        for rank, kind, is_call, start, end, wait, step, detail, stage, microbatch, pipeline in rows
    ]  # fmt: skip


def collectives(source: Source, *, limit: int = 1_000) -> dict[str, npt.NDArray[Any]]:
    """Columns of `bandwidth.call_columns`; empty ones where no collective was recorded."""
    if not source.has("collectives"):
        names = ("op", "process_group", "bytes", "n", "num_calls", "transfer_ms", "bus_gb_per_s", "wait_s")
        return {name: np.zeros(0) for name in names}
    return call_columns(source, limit=limit)


def own_work(source: Source, *, first_step: int = 0, last_step: int = 1 << 60) -> dict[str, npt.NDArray[Any]]:
    """Columns rank, data, forward, backward, optimizer: median milliseconds of a step, without waits.

    Of long runs some stretches of steps are looked at.
    """
    phases = ("data", "forward", "backward", "optimizer")
    if not source.has("steps"):
        return {name: np.zeros(0) for name in ("rank", *phases)}
    medians = ", ".join(f"median(coalesce({p}_ns, 0) - coalesce({p}_wait_ns, 0)) / 1e6 AS {p}" for p in phases)
    return source.query(
        f"SELECT rank, {medians} FROM steps WHERE duration_ns IS NOT NULL AND rank >= 0"
        f" AND {sampled(source, first_step, last_step)} GROUP BY rank ORDER BY rank"
    )


def rank_against_others(source: Source, attempt: int, rank: int) -> dict[str, npt.NDArray[Any]]:
    """Columns step, own, low, middle, high: a rank's own work, and percentiles 10, 50, 90 of the others' (ms)."""
    ((first, last),) = source.rows("SELECT min(step), max(step) FROM steps WHERE attempt = ?", [attempt])
    every = max(1, -(-((last or 0) - (first or 0) + 1) // MAX_STEPS))
    quantiles = ", ".join(
        f"quantile_cont(work, {q}) FILTER (rank <> ?) AS {name}"
        for q, name in ((0.1, "low"), (0.5, "middle"), (0.9, "high"))
    )
    return source.query(
        f"""
        SELECT step, max(work) FILTER (rank = ?) AS own, {quantiles}
        FROM (SELECT rank, step, ({_OWN}) / 1e6 AS work FROM steps
              WHERE attempt = ? AND rank >= 0 AND duration_ns IS NOT NULL AND coalesce(committed, true)
                AND step % ? = 0)
        GROUP BY step ORDER BY step
        """,
        [rank, rank, rank, rank, attempt, every],
    )


def story(source: Source, *, limit: int = 400) -> list[StoryEvent]:
    """The run's events, the first and the last ones if there are more than `limit`."""
    if not source.has("events"):
        return []
    kinds = [str(kind) for (kind,) in source.rows("SELECT DISTINCT kind FROM events") if kind not in _UNTOLD]
    log = EventLog.load(source, kinds) if kinds else EventLog([])
    events = sorted((event for kind in kinds for event in log.of(kind)), key=lambda event: event.wall_ns)
    if len(events) > limit:
        events = events[: limit // 2] + events[-limit // 2 :]
    return [
        StoryEvent(wall_ns=e.wall_ns, attempt=e.attempt, rank=e.rank, kind=e.kind, step=e.step, detail=e.detail)
        for e in events
    ]
