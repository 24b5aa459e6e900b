"""The SQL of the pages on tables that a test fills: what ran again, what is replicated, what is too much to show."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from analyzers.figures import numbers
from analyzers.figures.drawing.spaced_sample import spaced_sample
from analyzers.figures.ranks.mesh import load_places
from analyzers.run.findings.open_findings import reported_findings
from analyzers.run.records.newest_steps import whole_pace
from analyzers.settings.figures import compression_error
from dashboard.data.sql import queries
from dashboard.data.sql.gradient_queries import MAX_GRADIENT_STEPS, MAX_PARAMETERS, gradient_table
from tests.analyzers.memory_store import MemoryStore

MS = 1_000_000


def steps_of(executions: list[tuple[int, int, float]], *, ranks: int = 2, tokens: int = 100) -> MemoryStore:
    """(attempt, step, loss) one after the other, 100 ms each, on all ranks."""
    store = MemoryStore()
    store.add(
        "steps",
        [
            {
                "attempt": attempt, "rank": rank, "step": step, "start_ns": number * 100 * MS, "duration_ns": 100 * MS,
                "loss": loss, "grad_norm": 2 * loss, "lr": step / 1e3, "tokens": tokens,
                "memory_bytes": 1000 + 10 * rank,
            }
            for number, (attempt, step, loss) in enumerate(executions)
            for rank in range(ranks)
        ],
    )  # fmt: skip
    return store


ONCE = [(0, step, 5.0 - step / 100) for step in range(1, 41)]
AGAIN = [(0, step, 3.0 - step / 100) for step in range(31, 34)]


def test_the_pulse_is_that_of_the_steps_that_ran_last() -> None:
    found = queries.pulse(steps_of([*ONCE[:-1], (0, 40, math.nan), *AGAIN]))
    assert found["step"] == 33
    assert found["loss"] == pytest.approx(3.0 - 0.33)
    assert found["grad_norm"] == pytest.approx(2 * (3.0 - 0.33))
    assert found["lr"] == pytest.approx(0.033)
    assert found["tokens_per_s"] == pytest.approx(2 * 100 / 0.1)  # a step that ran twice has its tokens once
    assert found["step_ms"] == pytest.approx(100)
    assert (found["memory_bytes"], found["memory_rank"]) == (1010, 1)


def test_a_loss_that_is_not_finite_is_the_newest_one() -> None:
    loss = queries.pulse(steps_of([*ONCE[:-1], (0, 40, math.nan)]))["loss"]
    assert loss is not None
    assert math.isnan(loss)


def test_the_pulse_of_a_new_attempt_is_its_own() -> None:
    found = queries.pulse(steps_of([*ONCE, (1, 21, 1.5)]))
    assert (found["step"], found["loss"]) == (21, 1.5)


def test_of_ranks_with_equally_much_memory_the_lowest_is_named() -> None:
    """Two loads of one page named two ranks, by the order in which threads read the rows."""
    store = steps_of(ONCE, ranks=8)
    assert queries.pulse(store)["memory_rank"] == 7
    store.connection.execute("UPDATE steps SET memory_bytes = 1070 WHERE rank > 2")
    assert queries.pulse(store)["memory_rank"] == 3
    store.connection.execute("UPDATE steps SET memory_bytes = NULL")
    assert (queries.pulse(store)["memory_rank"], queries.pulse(store)["memory_bytes"]) == (None, None)


def test_tokens_count_once_for_the_ranks_that_read_the_same_text() -> None:
    store = steps_of(ONCE, ranks=4)
    store.add("ranks", [{"attempt": 0, "rank": rank, "pp": 0, "tp": rank % 2, "cp": None} for rank in range(4)])
    assert queries.pulse(store)["tokens_per_s"] == pytest.approx(4 * 100 / 0.1 / 2)
    assert queries.speed(store)["tokens_per_s"] == pytest.approx(4 * 100 / 0.1 / 2)


def test_ranks_that_read_the_same_text_count_even_if_some_have_no_records() -> None:
    """Of a pipeline's two stages only the first one's folder is here: it has half of the run's tokens and devices."""
    store = steps_of(ONCE, ranks=2)
    store.add("ranks", [{"attempt": 0, "rank": rank, "world_size": 4, "pp": 0, "tp": 0} for rank in range(2)])
    groups = {f"pp:{rank},{rank + 2}": [rank, rank + 2] for rank in range(2)} | {"dp_shard:0-1": [0, 1]}
    store.add(
        "process_groups", [{"attempt": 0, "rank": 0, "process_group": g, "members": m} for g, m in groups.items()]
    )
    found = queries.pulse(store)
    assert found["num_ranks"] == 2
    assert found["tokens_per_s"] == pytest.approx(2 * 100 / 0.1 / 2)
    assert whole_pace(store)["tokens_per_s"] == pytest.approx(2 * 100 / 0.1 / 2)


@pytest.mark.parametrize("again", [AGAIN, [(1, step, 1.0) for step in range(21, 41)]])
def test_speed_counts_the_tokens_of_each_execution_of_a_step_with_its_own_time(again: Any) -> None:
    found = queries.speed(steps_of([*ONCE, *again]))
    assert found["step"].tolist() == list(range(1, 41))
    assert found["tokens_per_s"] == pytest.approx(2 * 100 / 0.1)


def test_speed_of_a_long_run_is_in_few_pieces() -> None:
    found = queries.speed(steps_of([(0, step, 1.0) for step in range(1, 4_001)], ranks=1))
    assert len(found["step"]) <= queries.MAX_BUCKETS
    assert found["tokens_per_s"] == pytest.approx(100 / 0.1)
    assert (found["low"] <= found["high"]).all()


def test_a_store_without_tables_gives_empty_answers() -> None:
    store = MemoryStore()
    for table in ("steps", "gradients", "events", "ranks", "checkpoints", "health", "spans", "experts"):
        store.drop(table)
    assert set(queries.pulse(store).values()) == {None}
    assert reported_findings(store) == []
    assert len(gradient_table(store).columns["step"]) == 0
    for ask in (queries.speed, load_places, queries.rate, queries.memory_curve, queries.memory_by_rank,
                compression_error, queries.expert_load):  # fmt: skip
        assert all(len(column) == 0 for column in ask(store).values())


def test_snapshots_in_memory_do_not_crowd_out_the_checkpoints_on_disk() -> None:
    store = MemoryStore()
    of = {"attempt": 0, "rank": 0, "state": "complete", "reason": ""}
    store.add("checkpoints", [of | {"step": step, "tier": "memory", "wall_ns": step} for step in range(700)])
    store.add("checkpoints", [of | {"step": step, "tier": "disk", "wall_ns": step} for step in range(0, 100, 50)])
    found = queries.checkpoints(store)
    on_disk, in_memory = (found["tier"] == tier for tier in ("disk", "memory"))
    assert found["step"][on_disk].tolist() == [50, 0]
    assert found["num"][on_disk].tolist() == [2, 2]
    assert found["step"][in_memory].tolist() == list(range(699, 199, -1))
    assert set(found["num"][in_memory].tolist()) == {700}


def gradients(rows: list[dict[str, Any]]) -> MemoryStore:
    store = MemoryStore()
    store.add("gradients", [{"attempt": 0, "rank": 0, "max_abs": 1.0, "nonfinite_count": 0} | row for row in rows])
    return store


def test_a_replicated_gradient_has_the_norm_that_each_rank_recorded() -> None:
    store = gradients([{"rank": rank, "step": 5, "parameter": "w", "norm": 3.0} for rank in range(16)])
    assert gradient_table(store).columns["norm"].tolist() == [3.0]


def test_the_norm_of_a_step_that_ran_again_is_the_newest_attempt_s() -> None:
    store = gradients(
        [
            {"step": 5, "parameter": "w", "norm": 9.0, "nonfinite_count": 2},
            {"attempt": 1, "step": 5, "parameter": "w", "norm": 3.0},
        ]
    )
    found = gradient_table(store).columns
    assert (found["norm"].tolist(), found["nonfinite"].tolist()) == ([3.0], [2.0])


def test_a_late_reading_that_is_not_finite_counts_though_its_number_is_not_known() -> None:
    store = gradients(
        [
            {"step": 5, "parameter": "a", "norm": math.nan, "nonfinite_count": None},
            {"step": 5, "parameter": "b", "norm": 1.0, "nonfinite_count": None},
            {"step": 5, "parameter": "c", "norm": 1.0, "max_abs": math.inf, "nonfinite_count": None},
        ]
    )
    found = gradient_table(store).columns
    assert dict(zip(found["parameter"], found["nonfinite"], strict=True)) == {"a": 1.0, "b": 0.0, "c": 1.0}


def test_of_many_steps_and_parameters_the_extremes_stay_and_the_rest_is_even() -> None:
    num_steps, num_parameters = 2 * MAX_GRADIENT_STEPS - 1, MAX_PARAMETERS + 100
    step, parameter = (grid.ravel() for grid in np.meshgrid(np.arange(num_steps), np.arange(num_parameters)))
    norm = np.ones(len(step))
    norm[parameter == 290] = 1e6
    count = np.where((parameter == 250) & (step == 7), 3, 0)
    store = MemoryStore()
    store.add_columns(
        "gradients", attempt=np.zeros(len(step), np.int32), rank=np.zeros(len(step), np.int32), step=step,
        parameter=np.array([f"w{i:03}" for i in range(num_parameters)], dtype=object)[parameter], norm=norm,
        max_abs=norm, nonfinite_count=count,
    )  # fmt: skip
    found = gradient_table(store)
    shown_steps, shown = set(found.columns["step"].tolist()), set(found.columns["parameter"].tolist())
    assert (found.num_steps, found.num_parameters) == (num_steps, num_parameters)
    assert len(shown) == MAX_PARAMETERS
    assert {"w290", "w250"} <= shown
    assert MAX_GRADIENT_STEPS <= len(shown_steps) <= MAX_GRADIENT_STEPS + 1
    assert {7, num_steps - 1} <= shown_steps
    assert max(np.diff(sorted(shown_steps))) <= 2
    assert found.columns["nonfinite"].sum() == 3


def test_samples_are_evenly_spaced_with_both_ends() -> None:
    assert spaced_sample([1, 2, 3, 4, 5, 6], 3) == [1, 3, 6]
    assert spaced_sample([1, 2], 3) == [1, 2]
    assert spaced_sample([], 3) == []
    assert spaced_sample([1, 2, 3], 1) == [3]
    assert spaced_sample([1, 2, 3], 0) == []
    sampled = spaced_sample(list(range(399)), 200)
    assert (sampled[0], sampled[-1], len(set(sampled))) == (0, 398, 200)


def test_extent_and_range_cover_the_ranks_that_trained() -> None:
    store = steps_of([*ONCE, (1, 21, 1.5)])
    store.add("ranks", [{"attempt": 0, "rank": rank, "wall_ns": 1, "host": "h"} for rank in (1, 0, -1)])
    assert queries.extent(store) == {"last": {0: 40, 1: 21}, "ranks": [0, 1]}
    assert queries.step_range(store) == (1, 40, 2 * 41)
    assert queries.newest_attempt(store) == 1


def test_places_are_the_newest_record_of_each_rank() -> None:
    store = MemoryStore()
    store.add(
        "ranks",
        [
            {"attempt": attempt, "rank": rank, "wall_ns": attempt, "host": f"h{attempt}", "device": "cpu", "tp": rank}
            for attempt in (1, 0)
            for rank in range(2)
        ],
    )
    found = load_places(store)
    assert (found["rank"].tolist(), found["host"].tolist(), found["tp"].tolist()) == ([0, 1], ["h1", "h1"], [0, 1])
    assert found["pp"].tolist() == [0, 0]


def timed() -> MemoryStore:
    """Rank 1 computes for 30 ms a step, rank 0 for 10 and waits for 20 more; memory grows on rank 1."""
    store = MemoryStore()
    store.add(
        "steps",
        [
            {
                "attempt": 0, "rank": rank, "step": step, "start_ns": step * 40 * MS, "duration_ns": 35 * MS,
                "forward_ns": 30 * MS, "forward_wait_ns": (0 if rank else 20) * MS,
                "collective_wait_ns": (0 if rank else 20) * MS, "memory_bytes": (64 + rank * step) << 20,
                "lr": 0.5 / step if rank else None, "compression_error": 0.01 * (1 + rank),
            }
            for step in range(1, 11)
            for rank in range(2)
        ],
    )  # fmt: skip
    return store


def test_the_slowest_rank_stands_on_top_of_the_ranking() -> None:
    found = queries.ranking(timed(), 0, 1 << 60)
    assert found["rank"].tolist() == [1, 0]
    assert found["own_ms"].tolist() == pytest.approx([30, 10])
    assert found["waiting_ms"].tolist() == pytest.approx([0, 20])
    assert found["memory_mib"].tolist() == pytest.approx([74, 64])


def test_two_ranks_are_compared_side_by_side() -> None:
    found = queries.two_ranks(timed(), 1, 0, "forward")
    assert found["step"].tolist() == list(range(1, 11))
    assert (set(found["a"].tolist()), set(found["b"].tolist())) == ({30.0}, {10.0})


def test_memory_is_given_by_step_and_by_rank() -> None:
    curve, by_rank = queries.memory_curve(timed()), queries.memory_by_rank(timed())
    assert curve["low"].tolist() == [64.0] * 10
    assert curve["high"].tolist() == [64.0 + step for step in range(1, 11)]
    assert by_rank["rank"].tolist() == [1, 0]
    assert (by_rank["first_mib"].tolist(), by_rank["last_mib"].tolist()) == ([65.0, 64.0], [74.0, 64.0])


def test_the_learning_rate_is_of_a_rank_that_has_one_and_the_error_is_the_largest() -> None:
    assert queries.rate(timed())["lr"].tolist() == pytest.approx([0.5 / step for step in range(1, 11)])
    assert compression_error(timed())["error"].tolist() == pytest.approx([0.02] * 10)


def test_the_load_of_experts_is_counted_against_an_even_share() -> None:
    store = MemoryStore()
    store.add(
        "experts",
        [{"attempt": 0, "rank": rank, "step": 5, "layer": 0, "expert": expert, "tokens": 10 + 20 * expert}
         for rank in range(2) for expert in range(2)],
    )  # fmt: skip
    found = queries.expert_load(store)
    assert (found["high"].tolist(), found["low"].tolist()) == (pytest.approx([1.5]), pytest.approx([0.5]))


def test_logged_numbers_are_means_over_ranks_of_the_newest_attempt() -> None:
    store = MemoryStore()
    store.add(
        "scalars",
        [{"attempt": attempt, "rank": rank, "step": step, "name": name, "value": 100.0 * attempt + rank + step}
         for attempt, steps in ((0, (1, 2)), (1, (2, 3))) for step in steps for rank in range(2) for name in "ab"],
    )  # fmt: skip
    found = queries.logged_scalars(store)
    assert found["name"].tolist() == ["a"] * 3 + ["b"] * 3
    assert found["step"].tolist() == [1, 2, 3] * 2
    assert found["value"].tolist() == pytest.approx([1.5, 102.5, 103.5] * 2)
    assert len(queries.logged_scalars(MemoryStore())["step"]) == 0
    drawn = numbers.logged(found)
    assert [line.name for line in drawn.data if len(line.x)] == ["a", "b"]


def test_findings_come_newest_first_and_damaged_ones_are_left_out() -> None:
    store = MemoryStore()
    said = {
        "id": "hang-0", "analyzer": "hang", "finding_kind": "hang", "severity": "critical", "status": "fired",
        "finding_ranks": [1], "first_step": 4, "last_step": 4, "cause": "", "summary": "one", "evidence": {"a_ms": 1},
        "advice": "hang", "cost_s": 2.5,
    }  # fmt: skip
    for wall_ns, change in enumerate(({}, {"summary": "two"}, {"severity": "dreadful"}, {"cost_s": [1]})):
        store.event("finding", wall_ns=wall_ns, **(said | change))
    found = reported_findings(store)
    assert [finding.summary for finding in found] == ["two", "one"]
    assert (found[0].cost_s, found[0].evidence, found[0].ranks) == (2.5, {"a_ms": 1}, (1,))
