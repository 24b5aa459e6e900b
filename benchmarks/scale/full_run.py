"""Make a finished run of any size, with data on every page of the dashboard, in SQL.

    path = make_full_run(folder / "huge", 1024, 100_000)

`benchmarks.scale.ranks` makes its finished steps, with one rank 5 % slow from the middle on and one jump of the loss.
This module adds as much of the following as the store of a long run has:

| table | rows |
|---|---|
| health | each device and host once a second for the duration of the steps; one device throttles at the end |
| gradients | 24 parameters of every rank, in 100 steps |
| checkpoints | one in memory and one on disk, 100 times, with four states each |
| spans, collectives | for the last 200 steps of every rank: a GPipe schedule of 4 stages and its transfers |
"""

from __future__ import annotations

from pathlib import Path

import duckdb

from benchmarks.scale.ranks import make_steps
from probes.tape.rundir import RunDir
from store.database import connect_writer
from tests.support.simulator.layout import Layout
from tests.support.simulator.recording import Event
from tests.support.simulator.tapes import EPOCH_NS

__all__ = ["layout_of", "make_full_run"]

STAGES, MICROBATCHES, TP, DEVICES, FEW_RANKS = 4, 4, 8, 8, 4
STEP_NS, FORWARD_NS, BACKWARD_NS = 100_000_000, 4_000_000, 8_000_000
SPAN_GAP_NS = 300_000
WORK_NS = MICROBATCHES * (FORWARD_NS + BACKWARD_NS - 2 * SPAN_GAP_NS)
"""Own work in a step, equal to that of the spans, so that goodput and bubble agree."""
DETAILED_STEPS, LOOKS, PARAMETERS = 200, 100, 24


def layout_of(ranks: int) -> Layout:
    """Four stages with tensor parallelism of eight, sharded over the remaining ranks. With 4 ranks: two stages of two
    ranks.
    """
    stages, tp = (STAGES, TP) if ranks > FEW_RANKS else (2, 1)
    return Layout(
        pp=stages, dp_shard=ranks // (stages * tp), tp=tp, schedule="gpipe", microbatches=MICROBATCHES,
        ranks_per_node=ranks,
    )  # fmt: skip


def make_full_run(path: Path, ranks: int, steps: int) -> RunDir:
    """Make the run. Raises ValueError if the number of ranks is neither 4 nor a multiple of 32."""
    if ranks != FEW_RANKS and ranks % (STAGES * TP):
        raise ValueError(f"{ranks} ranks: {STAGES} stages of {TP} tensor-parallel ranks take a multiple of 32, or 4")
    layout = layout_of(ranks)
    make_steps(
        path, ranks, steps, layout=layout, more_events=_checkpoints(steps), jump_at=steps * 7 // 10, work_ns=WORK_NS,
        idle_ns=(layout.pp - 1) * (FORWARD_NS + BACKWARD_NS),
    )  # fmt: skip
    run = RunDir.open(path)
    connection = connect_writer(run.store(), wait_s=10, threads=2)
    try:
        _places(connection, layout)
        _gradients(connection, layout, steps)
        _health(connection, layout, steps)
        _details(connection, layout, steps)
        connection.execute("CHECKPOINT")
    finally:
        connection.close()
    return run


def _checkpoints(steps: int) -> list[Event]:
    """Events of the ranks' saves."""
    found = []
    for step in range(max(1, steps // LOOKS), steps + 1, max(1, steps // LOOKS)):
        for tier, stall_ns, took_ns in (("memory", 6_000_000, 20_000_000), ("disk", 9_000_000, 2_500_000_000)):
            for number, state in enumerate(("writing", "complete", "verified", "good")):
                detail = {"tier": tier, "state": state, "path": f"checkpoints/step-{step}", "bytes": 1 << 34}
                detail |= {"duration_ns": number * took_ns // 3, "stall_ns": stall_ns, "reason": ""}
                found.append(Event(0, step * STEP_NS + number * took_ns // 3, "checkpoint", step, detail))
    return found


def _places(connection: duckdb.DuckDBPyConnection, layout: Layout) -> None:
    """Create the temporary table `place`: stage and groups of every rank."""
    labels = {dim: layout.labels(dim) for dim in ("pp", "dp_shard", "tp")}
    stage = layout.coordinates()["pp"]
    rows = ", ".join(
        f"({rank}, {stage[rank]}, " + ", ".join("'" + names[rank].replace("'", "''") + "'" for names in labels.values())
        + ")"
        for rank in range(layout.num_ranks)
    )  # fmt: skip
    connection.execute(
        f"CREATE TEMP TABLE place AS SELECT * FROM (VALUES {rows}) p(rank, stage, pp_group, shard_group, tp_group)"
    )


def _gradients(connection: duckdb.DuckDBPyConnection, layout: Layout, steps: int) -> None:
    """Add gradient norms, which shrink with the loss; deeper layers have smaller ones."""
    connection.execute(
        f"""
        INSERT INTO gradients BY NAME
        SELECT 0 AS attempt, rank, look * {max(1, steps // LOOKS)} AS step,
               'blocks.' || parameter // 4 || '.' || ['attn.qkv', 'attn.out', 'mlp.up', 'mlp.down'][parameter % 4 + 1]
                   || '.weight' AS parameter,
               0.1 / (1 + look / 10.0) * (1 + parameter / 24.0) * (0.9 + 0.2 * random()) AS norm,
               0.01 AS max_abs, 0 AS nonfinite_count
        FROM range(1, {LOOKS + 1}) l(look), place, range({PARAMETERS}) p(parameter)
        WHERE parameter // {PARAMETERS // layout.pp} = stage
        ORDER BY look, rank
        """
    )


def _health(connection: duckdb.DuckDBPyConnection, layout: Layout, steps: int) -> None:
    """Add one reading per second for each node's host and eight devices; the last device is hot in the last tenth."""
    seconds, nodes = max(1, steps * STEP_NS // 10**9), max(1, layout.num_ranks // DEVICES)
    hot = f"node = {nodes - 1} AND device = 7 AND second > {seconds * 9 // 10}"
    connection.execute(
        f"""
        INSERT INTO health BY NAME
        SELECT 0 AS attempt, -1 AS rank, {EPOCH_NS} + second * 1000000000 AS sample_ns, 'node-' || node AS node,
               CASE WHEN device = 8 THEN 'host' ELSE 'GPU-' || node || '-' || device END AS device,
               CASE WHEN device = 8 THEN 0.4 END AS cpu_utilization_ratio, CASE WHEN device = 8 THEN 9.0 END AS load_1m,
               60000000000 AS memory_used_bytes, 80000000000 AS memory_total_bytes,
               CASE WHEN device = 8 THEN 900000000000 END AS disk_free_bytes,
               CASE WHEN device < 8 THEN 0.97 END AS gpu_utilization_ratio,
               CASE WHEN {hot} THEN 88.0 WHEN device < 8 THEN 61.0 + 3 * random() END AS temperature_celsius,
               CASE WHEN device < 8 THEN 640.0 + 20 * random() END AS power_watts,
               CASE WHEN {hot} THEN 1.2e9 WHEN device < 8 THEN 1.98e9 END AS sm_clock_hertz,
               CASE WHEN {hot} THEN 32 WHEN device < 8 THEN 0 END AS throttle_reasons
        FROM range({seconds}) s(second), range({nodes}) n(node), range(9) d(device)
        """
    )


def _details(connection: duckdb.DuckDBPyConnection, layout: Layout, steps: int) -> None:
    """Add spans and calls of the last steps, in order of their ends."""
    first, width = max(1, steps - DETAILED_STEPS + 1), layout.width
    turn = (layout.pp - 1 + MICROBATCHES) * FORWARD_NS  # the last forward ends, the first backward begins
    connection.execute(
        f"""
        CREATE TEMP TABLE piece AS
        SELECT rank, stage, step, microbatch, is_forward, pp_group, shard_group, tp_group,
               {EPOCH_NS} + step * {STEP_NS} + 2000000 + CASE WHEN is_forward THEN (stage + microbatch) * {FORWARD_NS}
                   ELSE {turn} + ({layout.pp - 1} - stage + microbatch) * {BACKWARD_NS} END AS start_ns
        FROM range({first}, {steps + 1}) s(step), place, range({MICROBATCHES}) m(microbatch),
             (VALUES (true), (false)) f(is_forward)
        ORDER BY step, start_ns
        """
    )
    connection.execute(
        f"""
        INSERT INTO spans_done BY NAME
        SELECT 0 AS attempt, rank, step, microbatch, stage, CASE WHEN is_forward THEN 'forward' ELSE 'backward' END
               AS kind, start_ns, start_ns + CASE WHEN is_forward THEN {FORWARD_NS} ELSE {BACKWARD_NS} END
               - {SPAN_GAP_NS}
               AS end_ns, 0 AS wait_ns
        FROM piece
        """
    )
    connection.execute(
        f"""
        INSERT INTO spans_done BY NAME
        SELECT 0 AS attempt, rank, step, kind, {EPOCH_NS} + step * {STEP_NS} + begin_ns AS start_ns,
               {EPOCH_NS} + step * {STEP_NS} + end_ns AS end_ns, 0 AS wait_ns
        FROM range({first}, {steps + 1}) s(step), place,
             (VALUES ('data', 0, 2000000), ('optimizer', 93000000, 98000000)) k(kind, begin_ns, end_ns)
        """
    )
    calls = {
        "all_reduce": ("tp_group", "start_ns + 1000000", "start_ns + 1900000", "NULL", "true", 1 << 26),
        "send": (
            "pp_group", "start_ns + 3700000", "start_ns + 4000000", f"rank + {width}",
            f"is_forward AND stage < {layout.pp - 1}", 1 << 25,
        ),
        "recv": (
            "pp_group", "start_ns - 200000", "start_ns", f"rank - {width}", "is_forward AND stage > 0", 1 << 25,
        ),
        "reduce_scatter": (
            "shard_group", f"start_ns + {BACKWARD_NS}", f"start_ns + {BACKWARD_NS} + 5000000", "NULL",
            f"NOT is_forward AND microbatch = {MICROBATCHES - 1}", 1 << 28,
        ),
    }  # fmt: skip
    for op, (group, issue, end, peer, where, num_bytes) in calls.items():
        connection.execute(
            f"""
            INSERT INTO collectives_done BY NAME
            SELECT 0 AS attempt, rank, step, row_number() OVER (PARTITION BY rank ORDER BY start_ns) - 1 AS seq,
                   {num_bytes} AS bytes, {issue} AS issue_ns, {end} AS end_ns, {end} - ({issue}) AS wait_ns,
                   {group} AS process_group, '{op}' AS op, 'bfloat16' AS dtype, '4096x8192' AS shape,
                   CASE WHEN is_forward THEN 'forward' ELSE 'backward' END AS phase, 'train.py:121 train' AS caller,
                   CAST({peer} AS INTEGER) AS peer, false AS is_async, false AS nonfinite
            FROM piece WHERE {where}
            """
        )
