"""Own work of every rank in every step, as matrices rank x observation.

    timings = load_timings(source, attempt=0)
    timings.own["forward"]         # float32[ranks, observations], milliseconds without waits for other ranks
    timings.peers                  # index arrays of ranks that do the same work

An observation is one execution of a step: a step that runs again after a rollback is a new observation. Observations
are in the order of execution, by each rank's own order of records, so clocks that disagree or jump have no effect.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from analyzers.account.device.device_timings import DEVICE, device_rows
from analyzers.account.device.measured_by import has_device_calls, has_host_gaps, has_uncompared_gaps, is_stamped
from analyzers.account.time_classes import COMPUTE_PHASES, GAPS, OWN_PHASES, own
from analyzers.policy import SHARED
from analyzers.robust import complete
from analyzers.source import Ints, Source, floats, ints

__all__ = [
    "COMPUTE_PHASES", "GAPS", "OWN_PHASES", "WHOLE_STEP", "Matrix", "Timings", "load_places", "load_timings",
    "observations_for", "stages_of_messages",
]  # fmt: skip

Matrix = npt.NDArray[np.float32]
WHOLE_STEP = "whole_step"
"""Name of the place that stands for the whole step minus its known waits, used if no phase was recorded. A rank with
longer steps than its peers is slow. Equal steps prove nothing, since ranks in lockstep have equal steps."""

_EPOCH = 1 << 40
CP, TP = 2, 3
"""Positions of the context- and tensor-parallel coordinates in the tuples of `load_places`."""
FIRST_STEPS = 2
"""Only the messages of these first steps are read: who sends to whom does not change in an attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Timings of one attempt. `steps[i]`: step number of observation i; matrices: [ranks, observations], in ms.

    Where a rank has no row, its values are those of ranks with the same work, so that it is neither slow nor fast.
    """

    attempt: int
    ranks: Ints
    steps: Ints
    own: dict[str, Matrix]
    """Own work by place. Places are the phases, and the gaps if they hold own work. Without phases, the only place is
    `WHOLE_STEP`. If calls were timed on a device, there is also `device`: own work in an unknown phase."""
    wait: Matrix
    duration: Matrix
    peers: tuple[Ints, ...]
    """Rows of ranks that compute the same: one array per pipeline stage."""
    recorded: npt.NDArray[np.bool_] | None = None
    """[ranks, observations]: False if the rank has no row. None: all ranks have all rows."""
    loaders: tuple[Ints, ...] | None = None
    """Rows of ranks with the same data-loading work: the same pipeline stage, and the same coordinates in the tensor-
    and context-parallel groups, in which often only the first rank loads. None: same as `peers`."""
    is_stamped: bool = False
    """True if the phases were stamped on a GPU."""
    has_uncompared_gaps: bool = False
    """True if gaps were measured, but only on the hosts of GPUs, so that ranks cannot be compared in them."""

    @property
    def data_peers(self) -> tuple[Ints, ...]:
        """For each group of ranks that are compared with each other in loading, an array with their rows."""
        return self.peers if self.loaders is None else self.loaders

    @property
    def is_on_device(self) -> bool:
        """True if own work is GPU time, which host CPU time does not explain."""
        return self.is_stamped or DEVICE in self.own

    @property
    def stamped(self) -> Ints | None:
        """Steps of the observations if only every N-th step may be stamped; None if every step is observed."""
        return self.steps if self.is_stamped else None

    def observations_for(self, num_steps: int, of: slice = slice(None)) -> int:
        """Number of observations that represent `num_steps` steps, at the spacing of the observations in `of`."""
        return observations_for(num_steps, self.steps[of]) if self.is_stamped else num_steps

    @property
    def compute(self) -> Matrix:
        """Own time of all phases and gaps except data."""
        return functools.reduce(np.add, [values for place, values in self.own.items() if place != "data"])

    def has_enough_steps(self) -> bool:
        """Check that there are enough steps to compare a rank with its peers, or with its own past if it has none."""
        if any(len(peers) > 1 for peers in self.peers):
            return len(self.steps) >= self.observations_for(SHARED.min_steps)
        return len(self.steps) >= SHARED.min_steps + SHARED.history

    def until_all_have(self, max_lag_s: float) -> Timings:
        """Drop the newest observations in which a rank has no row yet, because rows of other nodes arrive later. A rank
        does not count in this if its rows end more than `max_lag_s` before the newest row.
        """
        has_row = self.recorded
        if has_row is None or has_row[:, -1].all():
            return self
        num = len(self.steps)
        end_of_rank = np.where(has_row.any(axis=1), num - np.argmax(has_row[:, ::-1], axis=1), 0)
        lasted_s = np.median(self.duration, axis=0) / 1e3
        lag_s = np.append(np.cumsum(lasted_s[::-1])[::-1], 0.0)[end_of_rank]
        keep = slice(int(end_of_rank[lag_s <= max_lag_s].min()))
        return replace(
            self,
            steps=self.steps[keep],
            own={place: values[:, keep] for place, values in self.own.items()},
            wait=self.wait[:, keep],
            duration=self.duration[:, keep],
            recorded=has_row[:, keep],
        )


def observations_for(num_steps: int, steps: Ints) -> int:
    """Number of observations that are equivalent to `num_steps` consecutive steps. If at most every second step is
    observed, one observation stands for several steps, but the median of a block still needs `SHARED.min_times` values.
    """
    distance = float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0
    block = max(SHARED.min_times, math.ceil(SHARED.block_steps / max(distance, 1.0)))
    return math.ceil(num_steps * block / SHARED.block_steps)


def load_timings(
    source: Source, attempt: int, *, since_step: int = 0, until_step: int | None = None, skip_first: int = 0
) -> Timings | None:
    """Read finished steps, except the first `skip_first` of the attempt; None if no step was finished. `until_step`:
    the last step to read; ignored if steps are timed by calls on a device.

    A step that at most half of the ranks stamped is left out, because its ranks cannot be compared.
    """
    on_device, stamped = has_device_calls(source, attempt), is_stamped(source, attempt)
    is_uncompared = has_uncompared_gaps(source, attempt)
    gaps = GAPS if not on_device and has_host_gaps(source, attempt) else ()
    places = (*OWN_PHASES, DEVICE) if on_device else (*OWN_PHASES, *gaps)
    columns = [f"CAST(coalesce({own(phase)}, 0) / 1e6 AS FLOAT) AS {phase}" for phase in OWN_PHASES]
    columns += [f"CAST({own(gap)} / 1e6 AS FLOAT) AS {gap}" for gap in gaps]
    if not on_device and not gaps and not _has_phases(source, attempt):
        places = ("data", WHOLE_STEP)
        whole = "greatest(duration_ns - greatest(coalesce(collective_wait_ns, 0), 0), 0)"
        columns.append(f"CAST({whole} / 1e6 AS FLOAT) AS {WHOLE_STEP}")
    table = (
        device_rows(source, attempt, since_step=since_step)
        if on_device
        else source.query(
            f"""
        SELECT rank, step, {", ".join(columns)}, CAST(coalesce(collective_wait_ns, 0) / 1e6 AS FLOAT) AS wait,
               CAST(duration_ns / 1e6 AS FLOAT) AS duration
        FROM steps WHERE attempt = ? AND step >= ? AND rank >= 0 AND duration_ns IS NOT NULL
          AND step <= ? {"AND stamped_steps > 0" * stamped}
        ORDER BY rank, start_ns, step
        """,
            [attempt, since_step, _EPOCH if until_step is None else until_step],
        )
    )
    rank, step = ints(table["rank"]), ints(table["step"])
    if len(rank) == 0:
        return None
    ranks, first = np.unique(rank, return_index=True)
    counts = np.diff(np.append(first, len(rank)))
    place = _Placement(ranks, first, counts, step)
    num_skipped = _num_within(source, attempt, place.steps, skip_first)
    keep: slice | Ints = slice(num_skipped, None)
    if stamped and len(compared := np.flatnonzero(place.share > SHARED.explained_ratio)) < len(place.steps):
        keep = compared[compared >= num_skipped]
    peers, loaders = _peers(source, attempt, ranks)
    values = {name: place.matrix(table[name])[:, keep] for name in (*places, "wait", "duration")}
    has_row = ~np.isnan(values["duration"])
    if on_device:  # a phase without time between its calls has unknown work, not zero work: leave it out
        places = tuple(name for name in places if name in ("data", DEVICE) or np.nansum(values[name]) > 0)
    return Timings(
        attempt=attempt,
        ranks=ranks,
        steps=place.steps[keep],
        own={place: complete(values[place], peers) for place in places},
        wait=complete(values["wait"], peers),
        duration=complete(values["duration"], peers),
        recorded=None if has_row.all() else has_row,
        peers=peers,
        loaders=loaders,
        is_stamped=stamped,
        has_uncompared_gaps=is_uncompared,
    )


def _num_within(source: Source, attempt: int, steps: Ints, num_first: int) -> int:
    """Number of observations that stand for the first `num_first` steps of the attempt. It is smaller than `num_first`
    if not every step is observed."""
    if not num_first:
        return 0
    ((first,),) = source.rows(
        "SELECT coalesce(arg_min(step, start_ns), min(step)) FROM steps WHERE attempt = ? AND rank >= 0 "
        "AND duration_ns IS NOT NULL",
        [attempt],
    )
    num = int(np.count_nonzero(steps[:num_first] < first + num_first))
    # The next observation also stands for the steps before it that were not observed.
    return num + bool(num and steps[num - 1] < first + num_first - 1)


def _has_phases(source: Source, attempt: int) -> bool:
    phases = " OR ".join(f"{phase}_ns IS NOT NULL" for phase in OWN_PHASES)
    return bool(source.rows(f"SELECT 1 FROM steps WHERE attempt = ? AND ({phases}) LIMIT 1", [attempt]))


class _Placement:
    """Places rows into a matrix [ranks, observations], NaN if a rank has no row. `share`: by observation, the share of
    ranks with a row."""

    def __init__(self, ranks: Ints, first: Ints, counts: Ints, step: Ints) -> None:
        is_even = bool((counts == counts[0]).all())
        self._is_full = is_even and bool((step.reshape(len(ranks), -1) == step[: counts[0]]).all())
        if self._is_full:
            self.steps = step[: counts[0]]
            self._shape = (len(ranks), int(counts[0]))
            self.share = np.ones(len(self.steps))
            return
        row = np.repeat(np.arange(len(ranks)), counts)
        back = np.zeros(len(step), dtype=np.int64)
        back[1:] = step[1:] <= step[:-1]
        back[first] = 0
        rounds = np.cumsum(back)
        rounds -= np.repeat(rounds[first], counts)  # for each row, the number of rollbacks of its rank before that row
        keys, column = np.unique(rounds * _EPOCH + step, return_inverse=True)
        self.steps = keys % _EPOCH
        self._shape = (len(ranks), len(keys))
        self._row, self._column = row, column
        self.share = np.bincount(column, minlength=len(keys)) / len(ranks)

    def matrix(self, values: npt.NDArray[Any]) -> Matrix:
        flat = values.astype(np.float32, copy=False) if values.dtype.kind == "f" else floats(values).astype(np.float32)
        if self._is_full:
            return flat.reshape(self._shape)
        matrix = np.full(self._shape, np.nan, dtype=np.float32)
        matrix[self._row, self._column] = flat
        return matrix


def _peers(source: Source, attempt: int, ranks: Ints) -> tuple[tuple[Ints, ...], tuple[Ints, ...]]:
    """Rows of the ranks by pipeline stage, and by stage together with context- and tensor-parallel coordinates.

    Without mesh coordinates and stages all ranks are in one group.
    """
    stage, coordinates = load_places(source, attempt)
    stages = np.array([stage.get(int(rank), 0) for rank in ranks])
    places = [
        (at, *coordinates[rank][CP : TP + 1]) if rank in coordinates else (at,)
        for at, rank in zip(stages, ranks.tolist(), strict=True)
    ]
    _, roles = np.unique(np.array([str(place) for place in places]), return_inverse=True)
    return _groups(stages), _groups(roles.reshape(-1))


def _groups(labels: npt.NDArray[Any]) -> tuple[Ints, ...]:
    return tuple(np.flatnonzero(labels == value) for value in np.unique(labels))


def load_places(source: Source, attempt: int) -> tuple[dict[int, int], dict[int, tuple[object, ...]]]:
    """{rank: pipeline stage} and {rank: coordinates in all other dimensions}.

    Without a recorded mesh, stages are found from the messages between ranks (0 without messages), and there are no
    other coordinates. Both are empty without table `ranks`.
    """
    if not source.has("ranks"):
        return {}, {}
    rows = source.rows(
        """
        SELECT rank, arg_max(coalesce(pp, 0), wall_ns),
               arg_max((coalesce(dp_replicate, 0), coalesce(dp_shard, 0), coalesce(cp, 0), coalesce(tp, 0),
                        coalesce(ep, 0)), wall_ns), bool_or(pp IS NOT NULL)
        FROM ranks WHERE attempt = ? AND rank >= 0 GROUP BY rank
        """,
        [attempt],
    )
    stage = {rank: pp or 0 for rank, pp, _, _ in rows}
    if not any(placed for *_, placed in rows):
        stage |= stages_of_messages(source, attempt)
    return stage, {rank: tuple(coordinates) for rank, _, coordinates, placed in rows if placed}


def stages_of_messages(source: Source, attempt: int) -> dict[int, int]:
    """{rank: pipeline stage}, derived from messages where no mesh is recorded; empty if they do not form chains.

    The first stage begins with a send, every other one with a receive from the stage before it. Ranks that exchange
    messages in another pattern (a ring) have no order, and nothing is returned.
    """
    if not source.has("collectives"):
        return {}
    rows = source.rows(
        """
        SELECT rank, arg_min(op, issue_ns), arg_min(peer, issue_ns) FROM collectives
        WHERE attempt = ? AND op IN ('send', 'recv') AND peer IS NOT NULL
          AND step <= (SELECT min(step) FROM collectives WHERE attempt = ?) + ?
        GROUP BY rank
        """,
        [attempt, attempt, FIRST_STEPS],
    )
    before = {int(rank): None if op == "send" else int(peer) for rank, op, peer in rows}
    return _positions(before)


def _positions(before: Mapping[int, int | None]) -> dict[int, int]:
    """Position of each rank in its chain; empty unless all chains are complete and equally long.

    `before`: {rank: the rank before it, None for the first of a chain}.
    """
    positions: dict[int, int] = {}
    for rank in before:
        chain = [rank]
        while (previous := before.get(chain[-1], -1)) is not None:
            if previous < 0 or previous in chain:
                return {}
            chain.append(previous)
        positions[rank] = len(chain) - 1
    num_first = sum(position == 0 for position in positions.values())
    counts = [list(positions.values()).count(position) for position in set(positions.values())]
    return positions if len(counts) > 1 and all(count == num_first for count in counts) else {}
