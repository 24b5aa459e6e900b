"""What is over the schedule's own idle time, against schedules played out in time whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from analyzers.account.bubble import PipelineSpans, complete_steps, expected_idle
from analyzers.pipeline.bubble_causes import StepSplit, split_idle, typical
from analyzers.pipeline.pipeline_bubble import Pipeline, summarise
from tests.analyzers.account.test_bubble import MS, Span, columns, gpipe
from tests.support.simulator.schedules import SCHEDULES, play

RANKS, MICROBATCHES = 4, 8


def split(spans: PipelineSpans, loading_ns: dict[tuple[int, int], int] | None = None) -> StepSplit:
    (one,) = split_idle(complete_steps(spans, range(RANKS)), range(RANKS), loading_ns)
    assert sum(
        (one.even_ratio, one.imbalance_ratio, one.communication_ratio, one.data_ratio)
    ) == pytest.approx(one.idle.idle_ratio)  # fmt: skip
    return one


def later(spans: list[Span], delay_ns: int) -> list[Span]:
    """The same pipeline with messages that take `delay_ns`: every rank and backward is that much later."""
    moved = []
    for rank, step, stage, number, kind, start, end in spans:
        hops = stage if kind == "forward" else (RANKS - 1) + (RANKS - 1 - stage)
        moved.append((rank, step, stage, number, kind, start + hops * delay_ns, end + hops * delay_ns))
    return moved


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_of_a_perfect_schedule_only_its_messages_are_left(schedule: str) -> None:
    played = play(schedule, ranks=RANKS, microbatches=MICROBATCHES)
    one = split(played.spans)
    assert one.idle.idle_ratio == pytest.approx(played.idle_ratio, abs=1e-6)
    known = expected_idle(schedule, ranks=RANKS, microbatches=MICROBATCHES, stages_per_rank=2)
    if known is not None:
        assert one.even_ratio == pytest.approx(known, abs=1e-4)
    assert abs(one.imbalance_ratio) < 1e-4
    assert 0 < one.communication_ratio < 0.006
    assert one.data_ratio == 0


def test_a_heavy_stage_is_imbalance() -> None:
    one = split(columns(gpipe(RANKS, MICROBATCHES, slow=2, factor=2)))
    assert one.even_ratio == pytest.approx(3 / 11)
    assert one.communication_ratio == pytest.approx(0, abs=1e-9)
    assert one.imbalance_ratio == pytest.approx(one.idle.idle_ratio - 3 / 11)
    assert one.imbalance_ns == pytest.approx(one.idle.total_ns - (MICROBATCHES + RANKS - 1) * 3.75 * MS)


def test_messages_that_take_long_are_communication() -> None:
    one = split(columns(later(gpipe(RANKS, MICROBATCHES), 2 * MS)))
    assert one.idle.total_ns == (MICROBATCHES + RANKS - 1) * 3 * MS + 2 * (RANKS - 1) * 2 * MS
    assert one.communication_ratio == pytest.approx(one.idle.idle_ratio - 3 / 11)
    assert one.imbalance_ratio == pytest.approx(0, abs=1e-9)


def test_a_first_stage_that_loads_for_long_is_waiting_for_data() -> None:
    one = split(columns(gpipe(RANKS, MICROBATCHES)), {(1, 0): 11 * MS, (1, 3): 2 * MS})
    assert one.idle.total_ns == (11 * 3 + 11) * MS
    assert one.data_ratio == pytest.approx(one.idle.idle_ratio - 3 / 11)
    assert one.communication_ratio == pytest.approx(0, abs=1e-9)
    assert split(columns(gpipe(RANKS, MICROBATCHES)), {(1, 0): 2 * MS, (1, 2): 3 * MS}).data_ratio < 0.05


def test_all_three_at_once_add_up() -> None:
    spans = later(gpipe(RANKS, MICROBATCHES, slow=1, factor=2), MS)
    one = split(columns(spans), {(1, 0): 10 * MS})
    assert min(one.imbalance_ratio, one.communication_ratio, one.data_ratio) > 0.02


def test_an_impossible_order_is_left_out() -> None:
    spans = [(*span[:5], span[5] if span[4] == "forward" else -span[6], span[6]) for span in gpipe(2, 2)]
    first = {0: 10**12, 1: 0}  # rank 1 goes back before it went forward
    crossed = [(*span[:5], span[5] + first[span[0]], span[6] + first[span[0]]) for span in spans]
    assert split_idle(complete_steps(columns(crossed), range(2)), range(2)) == []  # type: ignore[arg-type]


def test_the_zero_bubble_formula_takes_measured_times() -> None:
    """ZB-H1: (p - 1) (F + B - W) of idle time beside m (F + B + W) of work."""
    of = {"ranks": 4, "microbatches": 8, "stages_per_rank": 1}
    assert expected_idle("interleaved_zero_bubble", **of, times=(1, 1, 1)) == pytest.approx(3 / 27)
    assert expected_idle("interleaved_zero_bubble", **of, times=(1.0, 1.2, 0.8)) == pytest.approx(4.2 / 28.2)
    assert expected_idle("interleaved_zero_bubble", ranks=4, microbatches=8, stages_per_rank=2, times=(1, 1, 1)) == (
        pytest.approx(3 / 51)
    )
    assert expected_idle("interleaved_zero_bubble", **of, times=(1, 1, 1.5)) is None, "holds up to W = F"
    assert expected_idle("interleaved_zero_bubble", **of) is None


def test_a_schedule_without_a_formula_is_held_against_its_own_order() -> None:
    played = play("zero_bubble", ranks=RANKS, microbatches=MICROBATCHES)
    one = split(played.spans)
    pipeline = Pipeline(ranks=range(RANKS), steps=[one.idle], splits=[one], num_microbatches=MICROBATCHES)
    bubble = summarise([pipeline], "zbv_zero_bubble")
    assert bubble is not None
    assert (bubble.is_formula, bubble.order_ratio) == (False, 0.0)
    assert bubble.expected_ratio == pytest.approx(one.even_ratio)
    assert bubble.excess_ratio == pytest.approx(one.communication_ratio, abs=1e-4)


def test_which_stage_to_lighten_and_by_how_much() -> None:
    steps = complete_steps(columns(gpipe(RANKS, MICROBATCHES, slow=2, factor=2)), range(RANKS))
    splits = split_idle(steps, range(RANKS))
    pipeline = Pipeline(
        ranks=range(RANKS), steps=[split.idle for split in splits], splits=splits, num_microbatches=MICROBATCHES
    )
    bubble = summarise([pipeline], "gpipe")
    assert bubble is not None
    assert (bubble.heaviest_stage, bubble.surplus_ms) == (2, pytest.approx(48 - 30))
    assert bubble.surplus_ratio == pytest.approx(18 / 48)
    assert bubble.work_ms_by_stage == {0: 24, 1: 24, 2: 48, 3: 24}
    assert "Stage 2 has the most work: moving 38 % of it (18 ms per step) away" in bubble.text
    even = gpipe(RANKS, MICROBATCHES)
    calm = split(columns(even))
    pipeline = Pipeline(ranks=range(RANKS), steps=[calm.idle], splits=[calm], num_microbatches=MICROBATCHES)
    bubble = summarise([pipeline], "gpipe")
    assert bubble is not None
    assert (bubble.heaviest_stage, bubble.surplus_ms) == (None, 0.0)
    assert "Excess" not in bubble.text


def test_a_rank_that_becomes_slow_is_no_stage_to_lighten() -> None:
    spans: list[Span] = []
    for step in range(12):
        spans += gpipe(RANKS, MICROBATCHES, step=step, start=step * 10**12, slow=2 if step >= 5 else -1, factor=2)
    splits = split_idle(complete_steps(columns(spans), range(RANKS)), range(RANKS))
    pipeline = Pipeline(
        ranks=range(RANKS), steps=[split.idle for split in splits], splits=splits, num_microbatches=MICROBATCHES
    )
    bubble = summarise([pipeline], "gpipe")
    assert bubble is not None
    assert bubble.imbalance_ratio > 0.05
    assert (bubble.heaviest_stage, bubble.surplus_ms) == (None, 0.0)


def test_a_pause_is_in_no_typical_step() -> None:
    spans = [gpipe(RANKS, MICROBATCHES, step=step, start=step * 10**12) for step in range(8)]
    spans[3] = [(*span[:5], span[5], span[6] + (10**10 if span[3:5] == (7, "backward") else 0)) for span in spans[3]]
    splits = split_idle(complete_steps(columns([s for one in spans for s in one]), range(RANKS)), range(RANKS))
    assert len(splits) == 8
    assert 3 not in {split.idle.step for split in typical(splits)}
    np.testing.assert_allclose([split.idle.idle_ratio for split in typical(splits)], 3 / 11)
