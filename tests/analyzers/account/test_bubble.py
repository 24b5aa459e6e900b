from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from analyzers.account.bubble import PipelineSpans, StepIdle, expected_idle, measure_idle
from tests.depth import later
from tests.support.simulator.schedules import SCHEDULES, play

MS = 1_000_000
Span = tuple[int, int, int, int, str, int, int]  # rank, step, stage, microbatch, kind, start, end


def columns(spans: list[Span]) -> PipelineSpans:
    rank, step, stage, microbatch, kind, start, end = zip(*spans, strict=True)
    ints = {"rank": rank, "step": step, "stage": stage, "microbatch": microbatch, "start_ns": start, "end_ns": end}
    return PipelineSpans(kind=list(kind), **{name: np.array(values, dtype=np.int64) for name, values in ints.items()})


def gpipe(ranks: int, microbatches: int, *, forward: int = MS, backward: int = 2 * MS, **changes: Any) -> list[Span]:
    """What a perfect pipeline records: all forwards, then all backwards; each rank's clock starts elsewhere."""
    slow, factor, step = changes.get("slow", -1), changes.get("factor", 1), changes.get("step", 1)
    spans: list[Span] = []
    ready = dict.fromkeys(range(microbatches), 0)
    for rank in range(ranks):
        free, took = 0, forward * (factor if rank == slow else 1)
        for number in range(microbatches):
            begin = max(free, ready[number])
            ready[number] = free = begin + took
            spans.append((rank, step, rank, number, "forward", begin, free))
    last = {rank: max(span[6] for span in spans if span[0] == rank) for rank in range(ranks)}
    ready = dict.fromkeys(range(microbatches), last[ranks - 1])
    for rank in reversed(range(ranks)):
        free, took = last[rank], backward * (factor if rank == slow else 1)
        for number in range(microbatches):
            begin = max(free, ready[number])
            ready[number] = free = begin + took
            spans.append((rank, step, rank, number, "backward", begin, free))
    start = changes.get("start", 0)
    return [(*span[:5], span[5] + start + span[0] * 977 * MS, span[6] + start + span[0] * 977 * MS) for span in spans]


def only(found: list[StepIdle]) -> StepIdle:
    (one,) = found
    return one


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (4, 8), (4, 16), (8, 8), (32, 64)])
def test_a_balanced_pipeline_has_the_idle_share_of_the_formula(ranks: int, microbatches: int) -> None:
    measured = only(measure_idle(columns(gpipe(ranks, microbatches)), range(ranks)))
    expected = expected_idle("gpipe", ranks=ranks, microbatches=microbatches)
    assert measured.idle_ratio == pytest.approx(expected, abs=1e-12)
    assert all(one.idle_ratio == pytest.approx(expected) for one in measured.ranks.values())
    assert measured.total_ns == (microbatches + ranks - 1) * 3 * MS


def test_a_slow_stage_makes_the_others_idle() -> None:
    measured = only(measure_idle(columns(gpipe(4, 8, slow=2, factor=2)), range(4)))
    assert min(measured.ranks, key=lambda rank: measured.ranks[rank].idle_ratio) == 2
    assert measured.ranks[2].busy_ns_by_stage == {2: 8 * 6 * MS}
    assert measured.ranks[0].busy_ns == 8 * 3 * MS
    assert measured.idle_ratio > 3 / 11


def test_steps_come_in_the_order_in_which_they_ran_and_repeats_apart() -> None:
    first, second = gpipe(2, 4, step=5), gpipe(2, 4, step=6, start=10_000 * MS)
    again = gpipe(2, 4, step=5, start=20_000 * MS, slow=1, factor=3)
    measured = measure_idle(columns(second + again + first), range(2))
    assert [one.step for one in measured] == [5, 6, 5]
    assert measured[0].idle_ratio == pytest.approx(measured[1].idle_ratio)
    assert measured[2].total_ns > measured[0].total_ns


def test_two_pipelines_are_measured_apart() -> None:
    fast = gpipe(2, 4)
    slow = [(span[0] + 2, *span[1:]) for span in gpipe(2, 4, forward=5 * MS)]
    both = columns([*fast, *slow])  # type: ignore[list-item]
    assert only(measure_idle(both, [0, 1])).total_ns < only(measure_idle(both, [2, 3])).total_ns


def test_other_spans_do_not_count() -> None:
    spans = gpipe(2, 4)
    others = [
        (0, 1, 0, 0, "recv", 0, 10**12),
        (0, 1, -1, -1, "optimizer", 0, 10**12),
        (0, 1, 0, -1, "reduce", 0, 10**12),
    ]
    assert measure_idle(columns([*spans, *others]), range(2)) == measure_idle(columns(spans), range(2))


def test_computing_the_loss_counts_as_work_of_the_last_stage() -> None:
    spans = gpipe(2, 4)
    end = max(span[6] for span in spans if span[0] == 1 and span[4] == "forward")
    with_loss = [*spans, (1, 1, 1, 3, "loss", end - MS // 2, end)]
    assert only(measure_idle(columns(with_loss), range(2))).ranks[1].busy_ns == 4 * 3 * MS + MS // 2


def test_a_step_that_was_cut_off_is_left_out() -> None:
    whole = gpipe(2, 4)
    no_rank = [span for span in whole if span[0] == 0]
    one_backward_less = [span for span in whole if span[:5] != (1, 1, 1, 3, "backward")]
    still_open = [(*span[:6], -1) if span[:5] == (1, 1, 1, 3, "backward") else span for span in whole]
    for spans in (no_rank, one_backward_less, still_open):
        assert measure_idle(columns(spans), range(2)) == []  # type: ignore[arg-type]


def test_without_spans_there_is_nothing() -> None:
    assert measure_idle(columns([(0, 1, -1, -1, "forward", 0, 1)]), range(4)) == []


def test_formulas() -> None:
    assert expected_idle("1f1b", ranks=4, microbatches=8) == pytest.approx(3 / 11)
    assert expected_idle("interleaved_1f1b", ranks=4, microbatches=8, stages_per_rank=2) == pytest.approx(3 / 19)
    assert expected_idle("gpipe", ranks=1, microbatches=8) == 0
    assert expected_idle("zbv_zero_bubble", ranks=4, microbatches=8) is None


@pytest.mark.parametrize("stages", [4, 8, pytest.param(32, marks=later("eight stages"))])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bubble_of_a_simulated_schedule_is_measured_within_half_a_point(schedule: str, stages: int) -> None:
    ranks = stages // 2 if schedule == "interleaved_1f1b" else stages
    played = play(schedule, ranks=ranks, microbatches=2 * ranks, jitter_ratio=0.05, seed=stages)
    (step,) = measure_idle(played.spans, range(ranks))
    assert step.idle_ratio == pytest.approx(played.idle_ratio, abs=0.005)
    known = expected_idle(schedule, ranks=ranks, microbatches=2 * ranks, stages_per_rank=2)
    if known is not None:  # jitter and messages cost a little on top of the formula
        assert known - 0.005 < played.idle_ratio < known + 0.06


def test_the_simulated_zero_bubble_beats_1f1b() -> None:
    share = {s: play(s, ranks=8, microbatches=16).idle_ratio for s in ("1f1b", "zero_bubble")}
    assert share["zero_bubble"] < 0.7 * share["1f1b"]
