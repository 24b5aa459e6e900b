"""Records of the engine in the order seen, and as columns of the tables in the order in which each rank wrote them.

    log = Log(layout)
    log.collectives.append(row)          # the engine fills in `end` and `wait` when they are known
    log.columns("collectives", until)    # {"rank": ..., "state": ..., column: array}

A time that never came is infinite: a record whose begin never came was not written, one whose end never came is open.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from probes.step_clock import GAPS, PHASES
from probes.tape.format.schema import TABLES, UNSET
from probes.tape.format.writer import COMPLETE, OPEN

from .layout import DIMS, WORLD, Ints, Layout

__all__ = ["PHASES", "CollectiveRow", "Columns", "Log", "Names", "SpanRow", "StepRow"]

Floats = npt.NDArray[np.float64]
Columns = dict[str, npt.NDArray[Any]]
_DIMS = (*DIMS, WORLD)
_NONE_I32, _NONE_I64 = int(UNSET["i32"]), int(UNSET["i64"])


class Names:
    """Texts by number, from 1; 0 is no name. When they are written, each rank numbers them in a different order."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self.texts: list[str] = []

    def __call__(self, text: str) -> int:
        if not text:
            return 0
        number = self._numbers.setdefault(text, len(self.texts) + 1)
        if number > len(self.texts):
            self.texts.append(text)
        return number


@dataclass(slots=True)
class CollectiveRow:
    """One call of some ranks. Times in ns since the run's begin; `constants` are the same on all of them."""

    lanes: Ints
    issue: Floats
    end: Floats
    wait: Floats
    flag: npt.NDArray[np.int8] | int
    constants: tuple[int, ...]  # step, seq, bytes, op, dtype, shape, phase, caller, is_async, dim, peer distance


@dataclass(slots=True)
class SpanRow:
    """One span of some ranks."""

    lanes: Ints
    start: Floats
    end: Floats
    wait: Floats
    constants: tuple[int, ...]  # step, microbatch, stage, kind


@dataclass(slots=True)
class StepRow:
    """One step of some ranks; `values` are further columns of the table, per lane or one for all."""

    lanes: Ints
    start: Floats
    end: Floats
    phase_ns: Floats  # (lanes, PHASES)
    wait_ns: Floats  # (lanes, 4): data, forward, backward, optimizer
    gap_ns: Floats  # (lanes, GAPS)
    gap_wait_ns: Floats  # (lanes, GAPS)
    total_wait_ns: Floats
    cpu_ns: Floats
    gc_ns: Floats
    run_delay_ns: Floats
    step: int
    values: dict[str, Any] = field(default_factory=dict)


class Log:
    """Everything recorded in a run."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.names = Names()
        self.collectives: list[CollectiveRow] = []
        self.spans: list[SpanRow] = []
        self.steps: list[StepRow] = []
        self.gradients: list[tuple[Ints, int, int, Floats, Floats, Ints, Floats]] = []
        """(ranks, step, name, norm, max_abs, nonfinite_count, time)"""
        self.fingerprints: list[tuple[Ints, int, int, int, Ints, Floats, Ints | None]] = []
        """(ranks, step, dimension of the replica group (-1: a shard that no other rank holds), tensor name, hash, time,
        hash after the last optimizer step)"""
        self._labels = {dim: np.array([self.names(text) for text in layout.labels(dim)]) for dim in layout.used_dims()}
        if layout.num_ranks > 1:
            self._labels[WORLD] = np.array([self.names(text) for text in layout.labels(WORLD)])

    def columns(self, table: str, until: Floats) -> Columns:
        """A table's columns with `rank` and `state`, by rank and in the order of writing.

        `until` is the time at which each rank stopped writing: what begins later is dropped, what ends later is open.
        """
        return getattr(self, f"_{table}")(until)  # type: ignore[no-any-return]

    def label_ids(self, dim: str) -> Ints:
        """Name number of each rank's group along a dimension."""
        return self._labels[dim]

    def _collectives(self, until: Floats) -> Columns:
        rows = self.collectives
        if not rows:
            return {}
        lengths = [len(row.lanes) for row in rows]
        constants = np.repeat(np.array([row.constants for row in rows], dtype=np.int64), lengths, axis=0).T
        step, seq, size, op, dtype, shape, phase, caller, is_async, dim, distance = constants
        rank = np.concatenate([row.lanes for row in rows])
        flag = np.concatenate([np.broadcast_to(np.int8(row.flag), len(row.lanes)) for row in rows])
        issue, end = np.concatenate([row.issue for row in rows]), np.concatenate([row.end for row in rows])
        wait = np.concatenate([row.wait for row in rows])
        group = np.zeros(len(rank), dtype=np.int64)
        for number, name in enumerate(_DIMS):
            chosen = dim == number
            if chosen.any():
                group[chosen] = self._labels[name][rank[chosen]]
        peer = np.where(distance == 0, _NONE_I32, rank + distance * self.layout.width)
        keep, done = issue < until[rank], end < until[rank]
        columns = {
            "step": step, "seq": seq, "bytes": size, "issue_ns": issue, "end_ns": _closed(end, done),
            "wait_ns": _closed(wait, done & np.isfinite(wait)), "process_group": group, "op": op, "dtype": dtype,
            "shape": shape, "phase": phase, "caller": caller, "peer": peer, "is_async": is_async, "nonfinite": flag,
        }  # fmt: skip
        return _ordered(columns, rank, issue, keep, done)

    def _spans(self, until: Floats) -> Columns:
        rows = self.spans
        if not rows:
            return {}
        lengths = [len(row.lanes) for row in rows]
        step, microbatch, stage, kind = np.repeat([row.constants for row in rows], lengths, axis=0).T
        rank = np.concatenate([row.lanes for row in rows])
        start, end = np.concatenate([row.start for row in rows]), np.concatenate([row.end for row in rows])
        wait = np.concatenate([row.wait for row in rows])
        keep, done = start < until[rank], end < until[rank]
        columns = {
            "step": step,
            "microbatch": np.where(microbatch < 0, _NONE_I32, microbatch),
            "stage": np.where(stage < 0, _NONE_I32, stage),
            "kind": kind,
            "start_ns": start,
            "end_ns": _closed(end, done),
            "wait_ns": _closed(wait, done),
        }
        return _ordered(columns, rank, start, keep, done)

    def _steps(self, until: Floats) -> Columns:
        rows = self.steps
        if not rows:
            return {}
        rank = np.concatenate([row.lanes for row in rows])
        start, end = np.concatenate([row.start for row in rows]), np.concatenate([row.end for row in rows])
        keep, done = start < until[rank], end < until[rank]
        step = np.repeat([row.step for row in rows], [len(row.lanes) for row in rows])
        with np.errstate(invalid="ignore"):
            columns: Columns = {"step": step, "start_ns": start, "duration_ns": _closed(end - start, done)}
        phases = np.concatenate([row.phase_ns for row in rows])
        waits = np.concatenate([row.wait_ns for row in rows])
        for number, phase in enumerate(PHASES):
            columns[f"{phase}_ns"] = np.where(done, _finite(phases[:, number]), 0)
        for number, phase in enumerate(PHASES[:4]):
            columns[f"{phase}_wait_ns"] = np.where(done, _finite(waits[:, number]), 0)
        gaps, gap_waits = (np.concatenate([getattr(row, name) for row in rows]) for name in ("gap_ns", "gap_wait_ns"))
        for number, gap in enumerate(GAPS):  # 0 from the step's begin, as the step clock writes it
            columns[f"{gap}_ns"] = np.where(done, _finite(gaps[:, number]), 0)
            columns[f"{gap}_wait_ns"] = np.where(done, _finite(gap_waits[:, number]), 0)
        for name in ("total_wait_ns", "cpu_ns", "gc_ns", "run_delay_ns"):
            values = np.concatenate([getattr(row, name) for row in rows])
            columns["collective_wait_ns" if name == "total_wait_ns" else name] = _closed(values, done)
        for column in TABLES["steps"].columns:
            if column.name not in columns:
                columns[column.name] = self._step_values(column.name, column.type, done)
        return _ordered(columns, rank, start, keep, done)

    def _step_values(self, name: str, kind: str, done: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
        dtype = np.float64 if kind == "f64" else np.int64
        unset = UNSET[kind]
        parts = [np.broadcast_to(np.asarray(row.values.get(name, unset), dtype), len(row.lanes)) for row in self.steps]
        values = np.concatenate(parts)
        values[~done] = unset
        return values

    def _gradients(self, until: Floats) -> Columns:
        rows = self.gradients
        if not rows:
            return {}
        lengths = [len(row[0]) for row in rows]
        rank = np.concatenate([row[0] for row in rows])
        time = np.concatenate([row[6] for row in rows])
        columns = {
            "step": np.repeat([row[1] for row in rows], lengths),
            "parameter": np.repeat([row[2] for row in rows], lengths),
            "norm": np.concatenate([row[3] for row in rows]),
            "max_abs": np.concatenate([row[4] for row in rows]),
            "nonfinite_count": np.concatenate([row[5] for row in rows]),
        }
        keep = time < until[rank]
        return _ordered(columns, rank, time, keep, keep)

    def _fingerprints(self, until: Floats) -> Columns:
        rows = self.fingerprints
        if not rows:
            return {}
        lengths = [len(row[0]) for row in rows]
        rank = np.concatenate([row[0] for row in rows])
        time = np.concatenate([row[5] for row in rows])
        columns = {
            "step": np.repeat([row[1] for row in rows], lengths),
            "taken_ns": _finite(time),
            "expected_hash": np.concatenate(
                [np.full(len(row[0]), _NONE_I64) if row[6] is None else row[6] for row in rows]
            ),
            "replica_group": np.concatenate([self._replica_group(row[2], row[0]) for row in rows]),
            "tensor": np.repeat([row[3] for row in rows], lengths),
            "hash": np.concatenate([row[4] for row in rows]),
        }
        keep = time < until[rank]
        return _ordered(columns, rank, time, keep, keep)

    def _replica_group(self, number: int, ranks: Ints) -> Ints:
        if number >= 0:
            return self._labels[_DIMS[number]][ranks]
        return np.array([self.names(f"shard:{rank}") for rank in ranks.tolist()])


def _finite(values: Floats) -> npt.NDArray[np.int64]:
    return np.where(np.isfinite(values), values, 0).astype(np.int64)


def _closed(values: Floats, done: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    return np.where(done, _finite(values), _NONE_I64)


def _ordered(
    columns: Columns, rank: Ints, begin: Floats, keep: npt.NDArray[np.bool_], done: npt.NDArray[np.bool_]
) -> Columns:
    """The kept records by rank; within one, in the order in which they began (which is that of writing)."""
    columns["rank"] = rank
    columns["state"] = np.where(done, COMPLETE, OPEN)
    order = np.flatnonzero(keep)
    order = order[np.lexsort((begin[order], rank[order]))]
    return {name: np.asarray(values)[order] for name, values in columns.items()}
