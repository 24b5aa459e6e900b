"""The recorded steps of an attempt as a graph of work and calls with their dependencies (`simulate`).

    graph = load_graph(source, attempt=0, first_step=60, last_step=120)
    graph.basis, graph.error_ratio       # "calls", 0.01: replayed as it ran, it deviates by 1 % from the measurement

1. A rank's calls, in order, cut the rank's step into pieces of work. If a call made the rank wait, the wait ended with
   the call. Time between waits is own work.
2. The member with the shortest time in a collective came last, and this time is the transfer. The transfer of a message
   begins when the later side has posted it.
3. Consecutive steps are replayed together, so a rank that ends one step late is also late in the next.
4. The waits of the calls must add up to the waits of the steps, and a replay of the graph as it ran must reproduce the
   measured time. If either check fails (records were dropped, or the device waited and not the host), the graph has
   only each rank's own time and one synchronisation per step.
5. Time in which no recorded work ran (between steps, or unaccounted time within a step) is *launch delay*. It is kept
   as measured, and zero in the ideal.

Only durations within one rank are used. The clocks of different ranks are never compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from analyzers.account.device.device_timings import device_rows
from analyzers.account.device.measured_by import has_device_calls, is_stamped
from analyzers.account.time_classes import NOT_MEASURED, WAITED
from analyzers.policy import SHARED
from analyzers.source import Ints, Source, floats, ints
from analyzers.whatif.held_out import held_out_error
from analyzers.whatif.policy import WhatIfPolicy
from analyzers.whatif.simulate import Graph, Key, replay

__all__ = ["StepGraph", "load_graph"]

MAX_CALLS = 60_000
"""Maximum number of calls in a graph; with more calls per step it has fewer steps."""
MAX_STEPS = 40
MAX_STEPS_ONLY = 400
"""Maximum number of steps in a graph without calls, which costs little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGraph:
    """A graph, its basis ("calls" or "steps") and the difference between its replay and the measured time."""

    graph: Graph
    basis: str
    error_ratio: float
    """Error of predicting steps from other steps (`held_out`), or of replaying all as they ran, if larger."""
    measured_ms: float
    """Measured time of a step, mean over the graph's steps."""
    replay_error_ratio: float = 0.0
    """Error of replaying all steps as they ran, measured on the same steps."""
    launch_delay_ratio: float = 0.0
    """Part of the time in which no recorded work ran."""

    @property
    def step_span(self) -> tuple[int, int]:
        """First and last step of the graph; of a long range it has only the newest steps."""
        return self.graph.steps[0], self.graph.steps[-1]


def load_graph(
    source: Source, attempt: int, first_step: int, last_step: int, policy: WhatIfPolicy | None = None
) -> StepGraph | None:
    """Load the newest complete steps of the range; None if too little is recorded."""
    policy = policy or WhatIfPolicy()
    steps = _whole_steps(source, attempt, first_step, last_step)
    if len(steps) < SHARED.min_times:
        return None
    if source.has("collectives"):
        newest = _newest(source, attempt, steps)
        complete = len(newest) >= SHARED.min_times and _waits_agree(source, attempt, newest)
        graph = _from_calls(source, attempt, newest) if complete else None
        found = _checked(graph, "calls", source, attempt, newest) if graph else None
        if found is not None and found.replay_error_ratio <= SHARED.equal_ratio:
            return found
    ((num_ranks,),) = source.rows("SELECT count(DISTINCT rank) FROM steps WHERE attempt = ? AND step = ?",
                                  [attempt, steps[-1]])  # fmt: skip
    newest = steps[-max(SHARED.min_times, min(MAX_STEPS_ONLY, MAX_CALLS // max(1, num_ranks))) :]
    table = _step_rows(source, attempt, newest)
    on_device = has_device_calls(source, attempt) or is_stamped(source, attempt)
    measured_ms = _median_ms(table) if on_device else None
    return _checked(_from_steps(table, newest), "steps", source, attempt, newest, measured_ms)


def _whole_steps(source: Source, attempt: int, first_step: int, last_step: int) -> list[int]:
    """The newest consecutive steps that every rank has finished exactly once."""
    rows = source.rows(
        f"""
        SELECT step FROM steps WHERE attempt = ? AND step BETWEEN ? AND ? AND rank >= 0 AND duration_ns IS NOT NULL
          {"AND stamped_steps > 0" if is_stamped(source, attempt) else ""}
        GROUP BY step HAVING count(*) = (SELECT count(DISTINCT rank) FROM steps WHERE attempt = ? AND rank >= 0)
          AND count(DISTINCT rank) = count(*) AND bool_and(coalesce(committed, true)) ORDER BY step DESC LIMIT ?
        """,
        [attempt, max(first_step, last_step - 4 * MAX_STEPS_ONLY), last_step, attempt, MAX_STEPS_ONLY],
    )
    run: list[int] = []
    # Perhaps only every N-th step was timed on the device. Then N is the smallest distance.
    stride = min((later - earlier for (later,), (earlier,) in pairwise(rows)), default=1)
    for (step,) in rows:
        if run and step != run[-1] - stride:
            if len(run) >= MAX_STEPS:
                break
            run = []  # the steps have a gap here, so continue with the older ones, which may be a longer run
        run.append(int(step))
    return run[::-1]


def _waits_agree(source: Source, attempt: int, steps: Sequence[int]) -> bool:
    """True if the calls' waits add up to the steps' waits; otherwise a rank waited in a call that is not recorded."""
    bounds = [attempt, steps[0], steps[-1]]
    where = "WHERE attempt = ? AND step BETWEEN ? AND ? AND rank >= 0"
    ((of_calls,),) = source.rows(f"SELECT sum(wait_ns)::DOUBLE FROM collectives {where} AND end_ns IS NOT NULL", bounds)
    ((of_steps,),) = source.rows(f"SELECT sum(collective_wait_ns)::DOUBLE FROM steps {where}", bounds)
    return bool(of_steps) and abs((of_calls or 0.0) / of_steps - 1) <= SHARED.equal_ratio


def _newest(source: Source, attempt: int, steps: Sequence[int]) -> list[int]:
    """The newest steps that together have at most MAX_CALLS calls; none if these would be fewer than `min_times`."""
    newest = list(steps[-MAX_STEPS:])
    ((num_calls,),) = source.rows(
        "SELECT count(*) FROM collectives WHERE attempt = ? AND step BETWEEN ? AND ?", [attempt, newest[0], newest[-1]]
    )
    num_steps = int(MAX_CALLS // max(1.0, num_calls / len(newest)))
    return newest[-num_steps:] if num_steps >= SHARED.min_times else []


def _checked(
    graph: Graph | None,
    basis: str,
    source: Source,
    attempt: int,
    steps: Sequence[int],
    measured_ms: float | None = None,
) -> StepGraph | None:
    """The graph with the error of its replay; None if the steps' starts were not recorded.

    `measured_ms`: time of all steps together; by default from their starts and ends on the hosts.
    """
    if graph is None or not graph.steps:
        return None
    if measured_ms is None:
        ((measured_ms,),) = source.rows(
            """
            SELECT median(took) FROM (
                SELECT (max(start_ns + duration_ns) - min(start_ns)) / 1e6 AS took FROM steps
                WHERE attempt = ? AND step BETWEEN ? AND ? AND duration_ns IS NOT NULL AND rank >= 0 GROUP BY rank)
            """,
            [attempt, steps[0], steps[-1]],
        )
    if measured_ms is None:  # the starts of the steps were not recorded
        return None
    error = abs(replay(graph) / measured_ms - 1) if measured_ms else 1.0
    held_out = held_out_error(graph, measured_ms, _extra(source, attempt, steps))
    return StepGraph(
        graph=graph,
        basis=basis,
        error_ratio=max(error, held_out or 0.0),
        measured_ms=measured_ms / len(steps),
        replay_error_ratio=error,
        launch_delay_ratio=sum(graph.delay_ms) / max(measured_ms * len(graph.programs), 1e-9),
    )


def _extra(source: Source, attempt: int, steps: Sequence[int]) -> dict[tuple[int, int], tuple[bool, bool]]:
    """{(rank, step): (it saved, it evaluated)} of the steps in which a rank did either."""
    rows = source.rows(
        """
        SELECT rank, step, coalesce(checkpoint_ns, 0) > 0 AS saved, coalesce(evaluate_ns, 0) > 0 AS evaluated
        FROM steps WHERE attempt = ? AND step BETWEEN ? AND ? AND rank >= 0 AND (checkpoint_ns > 0 OR evaluate_ns > 0)
        """,
        [attempt, steps[0], steps[-1]],
    )
    return {(int(rank), int(step)): (bool(saved), bool(evaluated)) for rank, step, saved, evaluated in rows}


def _step_rows(source: Source, attempt: int, steps: Sequence[int]) -> dict[str, Any]:
    """Columns rank, step, took, waited and delay (ms) of whole steps, ordered by rank and step; a GPU's own times if
    its calls were recorded."""
    if not has_device_calls(source, attempt):
        return source.query(
            f"""
            SELECT rank, step, duration_ns / 1e6 AS took, {WAITED} / 1e6 AS waited, {NOT_MEASURED} / 1e6 AS delay
            FROM steps WHERE attempt = ? AND step IN (SELECT unnest(?::BIGINT[])) AND rank >= 0
              AND duration_ns IS NOT NULL ORDER BY rank, step
            """,
            [attempt, list(steps)],
        )
    table = device_rows(source, attempt, since_step=max(0, steps[0] - 1))
    kept = np.isin(ints(table["step"]), np.asarray(steps))
    columns = {"rank": "rank", "step": "step", "took": "duration", "waited": "wait"}
    found = {name: table[column][kept] for name, column in columns.items()}
    return found | {"delay": np.zeros(int(kept.sum()))}


def _median_ms(table: dict[str, Any]) -> float:
    """Time of all steps of a rank, the median over the ranks."""
    _, row = np.unique(ints(table["rank"]), return_inverse=True)
    return float(np.median(np.bincount(row.reshape(-1), weights=floats(table["took"]))))


def _from_steps(table: dict[str, Any], steps: Sequence[int]) -> Graph:
    """Graph with one synchronisation at the end of each step. This is exact if only one call of a step makes ranks
    wait.
    """
    graph = Graph()
    rank, step = ints(table["rank"]), ints(table["step"])
    took, waited, delay = floats(table["took"]), floats(table["waited"]), floats(table["delay"])
    calls = {number: graph.new_call(("step",), float(waited[step == number].min())) for number in steps}
    for row in range(len(rank)):
        work_ms = max(0.0, float(took[row] - waited[row]))
        graph.add_work(int(rank[row]), int(step[row]), 0, work_ms, float(delay[row]))
        graph.add_post(int(rank[row]), calls[int(step[row])])
        graph.add_wait(int(rank[row]), calls[int(step[row])])
        graph.end_step(int(rank[row]), int(step[row]))
    # This shape is possible because every rank ran each step exactly once.
    graph.work_before_sync = np.arange(len(rank)).reshape(-1, len(steps)).T
    return graph


def _from_calls(source: Source, attempt: int, steps: Sequence[int]) -> Graph | None:
    """Graph with every call and every wait for a call."""
    bounds = [attempt, steps[0], steps[-1]]
    calls = source.query(
        """
        SELECT rank, step, coalesce(process_group, '') AS process_group, op, seq, coalesce(bytes, 0) AS bytes,
               coalesce(peer, -1) AS peer, issue_ns, end_ns, coalesce(wait_ns, 0) AS wait_ns
        FROM collectives WHERE attempt = ? AND step BETWEEN ? AND ? AND rank >= 0 AND end_ns >= issue_ns
        ORDER BY rank, issue_ns
        """,
        bounds,
    )
    rows = source.query(
        f"""
        SELECT rank, step, start_ns, duration_ns, {NOT_MEASURED} AS delay_ns FROM steps
        WHERE attempt = ? AND step BETWEEN ? AND ? AND rank >= 0 AND duration_ns IS NOT NULL ORDER BY rank, start_ns
        """,
        bounds,
    )
    if not len(calls["rank"]):
        return None
    graph = Graph()
    numbers = _calls(graph, calls)
    _programs(graph, calls, numbers, rows)
    return graph


def _calls(graph: Graph, calls: dict[str, Any]) -> list[int]:
    """The number of each row's call in the graph; -1 if the other members' part is not recorded."""
    keys: list[Key] = []
    took = (ints(calls["end_ns"]) - ints(calls["issue_ns"])) / 1e6
    found: dict[Key, list[int]] = {}
    columns = [calls[name].tolist() for name in ("rank", "process_group", "op", "seq", "peer")]
    for row, (rank, group, op, seq, peer) in enumerate(zip(*columns, strict=True)):
        if peer >= 0 and op in ("send", "recv"):
            key: Key = ("p2p", *((rank, peer) if op == "send" else (peer, rank)), seq)
        else:
            key = (group, seq)
        keys.append(key)
        found.setdefault(key, []).append(row)
    sizes: list[int] = ints(calls["bytes"]).tolist()
    ops: list[str] = columns[2]
    number: dict[Key, int] = {}
    for key, members in found.items():
        if len(members) > 1:
            first = members[0]
            kind = key[0] if key[0] == "p2p" else str(key[0]).partition(":")[0]
            kind_of_call: Key = (kind, "p2p" if kind == "p2p" else ops[first], sizes[first])
            number[key] = graph.new_call(kind_of_call, max(0.0, float(took[members].min())))
    return [number.get(key, -1) for key in keys]


def _programs(graph: Graph, calls: dict[str, Any], numbers: Sequence[int], rows: dict[str, Any]) -> None:
    """Add the programs, rank by rank and step by step: posts and waits in order of time, with the work between them."""
    rank, step = ints(rows["rank"]), ints(rows["step"])
    start, end = ints(rows["start_ns"]), ints(rows["start_ns"]) + ints(rows["duration_ns"])
    missing = ints(rows["delay_ns"])
    by_step = _rows_by_step(calls)
    previous_end: dict[int, int] = {}
    for row in range(len(rank)):
        own = by_step.get((int(rank[row]), int(step[row])), np.zeros(0, dtype=np.int64))
        # The loop's work between two steps belongs to the later one and was not recorded.
        cursor = min(previous_end.get(int(rank[row]), int(start[row])), int(start[row]))
        between_ms = (int(start[row]) - cursor) / 1e6
        place, first = 0, len(graph.work_ms)
        for at, kind, call, waited in _events(calls, numbers, own):
            graph.add_work(int(rank[row]), int(step[row]), place, max(0, at - cursor) / 1e6)
            cursor = max(cursor, at)
            if kind == "post":
                graph.add_post(int(rank[row]), call)
                place += 1
            elif call >= 0:
                graph.add_wait(int(rank[row]), call)
                cursor += waited
            # If the records of the other ranks in a call are missing, the wait for it counts as this rank's own time.
        graph.add_work(int(rank[row]), int(step[row]), place, max(0, int(end[row]) - cursor) / 1e6)
        _spread_delay(graph, first, between_ms, float(missing[row]) / 1e6)
        graph.end_step(int(rank[row]), int(step[row]))
        previous_end[int(rank[row])] = int(end[row])


def _spread_delay(graph: Graph, first: int, between_ms: float, missing_ms: float) -> None:
    """Mark launch delay in the pieces of a step: the time between steps, and unmeasured time spread evenly over the
    step."""
    graph.delay_ms[first] = min(between_ms, graph.work_ms[first])
    in_step = sum(graph.work_ms[first:]) - graph.delay_ms[first]
    ratio = min(1.0, missing_ms / in_step) if in_step > 0 else 0.0
    for number in range(first, len(graph.work_ms)):
        graph.delay_ms[number] += ratio * (graph.work_ms[number] - graph.delay_ms[number])


def _rows_by_step(calls: dict[str, Any]) -> dict[tuple[int, int], Ints]:
    rank, step = ints(calls["rank"]), ints(calls["step"])
    order = np.lexsort((step, rank))
    bounds = np.flatnonzero((np.diff(rank[order]) != 0) | (np.diff(step[order]) != 0)) + 1
    return {(int(rank[rows[0]]), int(step[rows[0]])): rows for rows in np.split(order, bounds)}


def _events(calls: dict[str, Any], numbers: Sequence[int], own: Ints) -> list[tuple[int, str, int, int]]:
    """Return (start time, "post" or "wait", call, nanoseconds waited) for one rank's step, in order."""
    events: list[tuple[int, str, int, int]] = []
    for row in own:
        call = numbers[row]
        issue, end = int(calls["issue_ns"][row]), int(calls["end_ns"][row])
        waited = max(0, int(calls["wait_ns"][row]))
        if call >= 0:
            events.append((issue, "post", call, 0))
        if waited:
            events.append((max(issue, end - waited), "wait", call, waited))
    return sorted(events, key=lambda event: (event[0], event[1]))
