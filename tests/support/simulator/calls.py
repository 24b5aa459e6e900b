"""Match calls (collectives by group and number, messages by pair and direction) and compute their ends.

    calls = Calls(layout, log, taints, links, now, call_s=2e-6)
    key, row = calls.collective(role, op)       # the record; its end is filled in once the last member has arrived
    calls.is_ready(key, lanes)                  # by rank, whether its end is known (it may be infinite)

Calls of a group match in the order in which each member makes them, whatever their steps or sources are. Members
with another operation or size never leave. If all members of a group call together, the end is known at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from probes.tape.format.schema import UNSET

from .layout import DIMS, WORLD, Ints, Layout
from .program import Call, Recv, Send
from .records import CollectiveRow, Floats, Log
from .roles import Role
from .taints import REDUCES, Mask, Taints
from .transfers import Links

__all__ = ["Calls"]

NS = 1e9
Part = tuple[object, CollectiveRow]
_DIM_NUMBER = {dim: number for number, dim in enumerate((*DIMS, WORLD))}
_UNSET_FLAG = int(UNSET["bool"])


@dataclass(slots=True)
class _Pending:
    """One collective, or all p2p calls of one number between two stages: by rank."""

    op: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]
    arrival: Floats
    end: Floats
    posted: npt.NDArray[np.bool_]
    solved: npt.NDArray[np.bool_]
    taint: npt.NDArray[np.bool_]
    rows: list[CollectiveRow]


class Calls:
    """All calls of all ranks; `now` are the ranks' clocks, which making a call moves."""

    def __init__(self, layout: Layout, log: Log, taints: Taints, links: Links, now: Floats, *, call_s: float) -> None:
        self._layout, self._log, self._taints, self.links = layout, log, taints, links
        self._now, self._call_s = now, call_s
        self._seq: dict[str, Ints] = {}
        self._p2p_seq: dict[tuple[int, str], Ints] = {}
        self._pending: dict[tuple[object, ...], _Pending] = {}
        self._groups: dict[tuple[str, bytes], Ints | None] = {}

    def is_ready(self, key: object, lanes: Ints) -> npt.NDArray[np.bool_]:
        """By rank, whether the end of a call is known."""
        if key is None:
            return np.ones(len(lanes), dtype=bool)
        return self._pending[key].solved[lanes]  # type: ignore[index]

    def sent(self, key: object) -> Mask:
        """Ranks whose messages are not finite."""
        return self._pending[key].taint  # type: ignore[index]

    def forget_ended(self) -> None:
        """Keep only calls that a rank has made and whose end is not known."""
        self._pending = {key: found for key, found in self._pending.items() if (found.posted & ~found.solved).any()}

    def collective(self, role: Role, op: Call) -> Part:
        """Make the call; returns what to wait for."""
        lanes, names = role.lanes, self._log.names
        seqs = self._seq.setdefault(op.dim, np.zeros(len(self._now), dtype=np.int64))
        seq = int(seqs[lanes[0]])
        seqs[lanes] += 1
        self._now[lanes] += self._call_s * NS
        issue = self._now[lanes]
        flag: npt.NDArray[np.int8] | int = _UNSET_FLAG
        taint = self._taints.of(op.tensor)
        if op.op in REDUCES and op.dtype != "int64":
            flag = 0 if taint is None else taint[lanes].astype(np.int8)
        row = CollectiveRow(
            lanes, issue, np.full(len(lanes), np.inf), np.full(len(lanes), np.inf), flag,
            (role.step, seq, op.num_bytes, names(op.op), names(op.dtype), names(op.shape), role.phase,
             names(op.caller), int(bool(op.handle)), _DIM_NUMBER[op.dim], 0),
        )  # fmt: skip
        self._log.collectives.append(row)
        groups = self._whole_groups(op.dim, lanes)
        key: object
        if groups is not None:
            self._solve(op.dim, groups, self._now, op.op, op.num_bytes, seq, row)
            self._taints.reduce(groups, op.tensor, op.op)
            key = None
        else:
            key = ("call", op.dim, seq)
            self._post(key, row, op)
        return (key, row)

    def _whole_groups(self, dim: str, lanes: Ints) -> Ints | None:
        """The groups along a dimension if they lie wholly within these ranks, else None."""
        key = (dim, lanes.tobytes())
        if key not in self._groups:
            groups = self._layout.members(dim)
            inside = np.isin(groups, lanes)
            touched = groups[inside.any(axis=1)]
            self._groups[key] = touched if inside[inside.any(axis=1)].all() else None
        return self._groups[key]

    def _solve(self, dim: str, groups: Ints, arrival: Floats, op: str, size: int, seq: int, row: CollectiveRow) -> None:
        end = self.links.collective(dim, groups, arrival[groups], op, size, first=seq == 0)
        ends = np.empty(len(self._now))
        ends[groups] = end
        row.end[:] = ends[row.lanes]

    def _post(self, key: tuple[object, ...], row: CollectiveRow, op: Call | Send | Recv) -> _Pending:
        pending = self._pending.get(key)
        if pending is None:
            count = len(self._now)
            pending = _Pending(
                np.zeros(count, np.int64), np.zeros(count, np.int64), np.full(count, np.inf), np.full(count, np.nan),
                np.zeros(count, bool), np.zeros(count, bool), np.zeros(count, bool), [],
            )  # fmt: skip
            self._pending[key] = pending
        lanes = row.lanes
        pending.op[lanes], pending.size[lanes] = row.constants[3] * 64 + row.constants[4], op.num_bytes
        pending.arrival[lanes], pending.posted[lanes] = row.issue, True
        taint = self._taints.of(op.tensor)
        if taint is not None:
            pending.taint[lanes] = taint[lanes]
        pending.rows.append(row)
        if isinstance(op, Call):
            self._match(key, pending, op)
        return pending

    def _match(self, key: tuple[object, ...], pending: _Pending, op: Call) -> None:
        groups = self._layout.members(op.dim)
        ready = pending.posted[groups].all(axis=1) & ~pending.solved[groups].any(axis=1)
        if not ready.any():
            return
        groups = groups[ready]
        same = (pending.op[groups] == pending.op[groups][:, :1]).all(axis=1)
        same &= (pending.size[groups] == pending.size[groups][:, :1]).all(axis=1)
        end = self.links.collective(op.dim, groups, pending.arrival[groups], op.op, op.num_bytes, first=key[2] == 0)
        end[~same] = np.inf
        pending.end[groups], pending.solved[groups] = end, True
        self._taints.reduce(groups, op.tensor, op.op, pending.taint)
        self._fill(pending)

    def _fill(self, pending: _Pending) -> None:
        for row in pending.rows:
            done = pending.solved[row.lanes]
            row.end[done] = pending.end[row.lanes[done]]

    def message(self, role: Role, op: Send | Recv, kind: str) -> Part:
        """Make a p2p call; `op.distance` stages further. Returns what to wait for."""
        lanes, names, width = role.lanes, self._log.names, self._layout.width
        seqs = self._p2p_seq.setdefault((op.distance, kind), np.zeros(len(self._now), dtype=np.int64))
        seq = int(seqs[lanes[0]])
        seqs[lanes] += 1
        self._now[lanes] += self._call_s * NS
        blank = np.full(len(lanes), np.inf)
        row = CollectiveRow(
            lanes, self._now[lanes], blank, blank.copy(), _UNSET_FLAG,
            (role.step, seq, op.num_bytes, names(kind), names("bfloat16"), names(op.shape), role.phase,
             names("trainer/parallel/pipeline.py:104 _call"), 1, _DIM_NUMBER["pp"], op.distance),
        )  # fmt: skip
        self._log.collectives.append(row)
        stage = int(lanes[0]) // width
        source, target = (stage, stage + op.distance) if kind == "send" else (stage + op.distance, stage)
        key = ("p2p", source, target, seq)
        pending = self._post(key, row, op)
        self._pair(pending, source, target)
        return (key, row)

    def _pair(self, pending: _Pending, source: int, target: int) -> None:
        width = self._layout.width
        lower = np.arange(source * width, (source + 1) * width)
        upper = lower + (target - source) * width
        ready = pending.posted[lower] & pending.posted[upper] & ~pending.solved[lower]
        if not ready.any():
            return
        lower, upper = lower[ready], upper[ready]
        posted = np.maximum(pending.arrival[lower], pending.arrival[upper])
        end = self.links.point_to_point(lower, upper, posted, pending.size[lower])
        pending.end[lower] = pending.end[upper] = end
        pending.solved[lower] = pending.solved[upper] = True
        pending.taint[upper] = pending.taint[lower]
        self._fill(pending)
