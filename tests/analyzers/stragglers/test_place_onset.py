"""A rank that loses time in one gap is dated by that gap, whatever other jobs do to the rest of its steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from analyzers.account.timings import Matrix, Timings
from analyzers.stragglers.comparison.peer_comparison import Straggler, find_stragglers
from analyzers.stragglers.onsets.onset import first_rise, with_growth, with_place_onset
from analyzers.stragglers.policy import StragglerPolicy
from tests.analyzers.rank_timings import simulate
from tests.depth import tried

ONSET, RANKS = 26, [0, 1, 2, 3]
GAP = "after_optimizer"


def busy(seed: int, loss_ms: float = 600.0, *, gap_noise_ms: float = 1.0) -> Timings:
    """Rank 2 loses time in the gap from step 26 on; half of all forward passes are delayed by up to 2.5 s."""
    timings = simulate(seed, ranks=len(RANKS), steps=120, machine="crowded")
    dice = np.random.default_rng(seed)
    shape = timings.own["forward"].shape
    gap: Matrix = dice.uniform(0, gap_noise_ms, shape).astype(np.float32)
    gap[2, timings.steps >= ONSET] += loss_ms
    delays = np.where(dice.random(shape) < 0.5, dice.uniform(0, 2500, shape), 0).astype(np.float32)
    return replace(timings, own={**timings.own, "forward": timings.own["forward"] + delays, GAP: gap})


def found(timings: Timings) -> list[Straggler]:
    return find_stragglers(timings, StragglerPolicy())


@pytest.mark.parametrize("seed", [0, 1, 3, 5, 7, 10][: tried(2, nightly=6)])
def test_noise_in_other_phases_does_not_move_it(seed: int) -> None:
    timings = busy(seed)
    (slow,) = found(timings)
    assert slow.rank == 2
    dated = with_place_onset(timings, slow, RANKS)
    assert dated.first_step == ONSET


def test_noise_of_the_gap_itself_leaves_it_where_all_work_puts_it() -> None:
    timings = busy(0, gap_noise_ms=500.0)
    for slow in found(timings):
        assert with_place_onset(timings, slow, RANKS) is slow


def test_a_rank_that_is_slow_in_all_its_work_has_no_place() -> None:
    timings = simulate(4, ranks=len(RANKS), steps=120)
    slower = {phase: values.copy() for phase, values in timings.own.items()}
    for values in slower.values():
        values[2, timings.steps >= ONSET] *= 1.5
    timings = replace(timings, own=slower)
    slow = found(timings)[0]
    assert with_place_onset(timings, slow, RANKS) is slow


@pytest.mark.parametrize("seed", range(tried(2, nightly=4)))
def test_a_rank_that_sleeps_in_every_step_is_not_reported_as_pausing(seed: int) -> None:
    """The backward pass of both takes from none to ten times as long: only the gap shows that no step is spared."""
    timings = simulate(seed, ranks=2, steps=300, machine="crowded")
    dice = np.random.default_rng(seed)
    shape = timings.own["backward"].shape
    gap: Matrix = dice.uniform(0, 0.2, shape).astype(np.float32)
    gap[1, timings.steps >= 60] += 30.0
    backward: Matrix = (timings.own["backward"] * dice.uniform(0.1, 3.0, shape)).astype(np.float32)
    timings = replace(timings, own={**timings.own, "backward": backward, "before_forward": gap})
    (slow,) = found(timings)
    assert (slow.rank, slow.place, slow.paused_ratio) == (1, "before_forward", 0)
    dated = with_place_onset(timings, slow, [0, 1])
    assert (dated.first_step, dated.ongoing, len(dated.segments)) == (60, True, 1)


@pytest.mark.parametrize("unmeasured", ["own", "peers"])
def test_a_step_that_was_not_measured_is_no_evidence_against_an_earlier_onset(unmeasured: str) -> None:
    """On GPUs with short steps each rank stamps one in N, not always the same ones."""
    timings = simulate(1, ranks=2, steps=60)
    timings.own["optimizer"][1, 30:] += 40.0
    (slow,) = found(timings)
    late = replace(slow, segments=(replace(slow.segments[0], begin=33),), first_step=34)
    hidden = 1 if unmeasured == "own" else 0
    timings.own["optimizer"][hidden, 31:33] = timings.own["optimizer"][1 - hidden, 31:33]
    recorded = np.ones(timings.duration.shape, dtype=bool)
    recorded[hidden, 31:33] = False
    timings = replace(timings, recorded=recorded)
    assert with_place_onset(timings, late, [0, 1]).first_step == 31


@pytest.mark.parametrize("seed", range(tried(3, nightly=8)))
def test_a_rise_above_the_noise_of_the_place_is_dated(seed: int) -> None:
    """On a crowded host the gap itself varies by a quarter of the loss: no step before came near it all the same."""
    timings = simulate(seed, ranks=2, steps=120)
    dice = np.random.default_rng(seed)
    gap: Matrix = dice.normal(24, 7, timings.own["forward"].shape).astype(np.float32)
    gap[1, timings.steps >= 41] += 31.0
    timings = replace(timings, own={**timings.own, GAP: gap})
    (slow,) = found(timings)
    late = replace(slow, segments=(replace(slow.segments[0], begin=74),), first_step=75)
    assert abs(with_place_onset(timings, late, [0, 1]).first_step - 41) <= 1


def grown(seed: int, share_at_first: float, machine: str = "busy") -> Timings:
    """Rank 2 loses a part of 24 ms in a gap from step 60 on, and all of it from step 84 on."""
    timings = simulate(seed, ranks=len(RANKS), steps=120, machine=machine)
    gap: Matrix = np.random.default_rng(seed).uniform(0, 1, timings.own["forward"].shape).astype(np.float32)
    gap[2, timings.steps >= 60] += 24.0 * share_at_first
    gap[2, timings.steps >= 84] += 24.0 * (1 - share_at_first)
    return replace(timings, own={**timings.own, GAP: gap})


@pytest.mark.parametrize(("share_at_first", "first_step"), [(0.4, 60), (0.6, 60), (0.1, 84)])
def test_a_loss_that_grows_is_dated_by_its_first_rise_unless_that_was_minor(
    share_at_first: float, first_step: int
) -> None:
    timings = grown(0, share_at_first)
    (slow,) = found(timings)
    assert with_growth(timings, with_place_onset(timings, slow, RANKS), RANKS).first_step == first_step


def test_a_loss_that_grows_step_by_step_is_dated_near_its_beginning() -> None:
    timings = grown(0, 0.0)
    timings.own[GAP][2] = np.clip((timings.steps - 59) / 60, 0.0, 1.0) * 24.0
    (slow,) = found(timings)
    assert with_place_onset(timings, slow, RANKS).first_step > 70
    assert 60 <= with_growth(timings, slow, RANKS).first_step <= 70


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("growth_ratio", [0.004, 0.008, 0.02])
def test_a_growth_within_the_noise_of_a_step_is_dated_by_its_line(growth_ratio: float, seed: int) -> None:
    """By its first clear rise, a growth of 0.4 % a step is dated 20 steps too late here."""
    steps = np.arange(160)
    excess = np.maximum(0, steps - 60) * growth_ratio + np.random.default_rng(seed).normal(0, 0.02, 160)
    assert abs(first_rise(excess.astype(np.float32), 110, np.ones(160, dtype=bool)) - 60) <= 6


@pytest.mark.parametrize("seed", range(5))
def test_levels_of_an_excess_are_no_line(seed: int) -> None:
    steps = np.arange(160)
    excess = 0.1 * (steps >= 60) + 0.3 * (steps >= 110) + np.random.default_rng(seed).normal(0, 0.02, 160)
    assert first_rise(excess.astype(np.float32), 110, np.ones(160, dtype=bool)) == 110


def test_disturbed_steps_before_a_rise_are_no_part_of_it() -> None:
    """Noise as large as half of the loss explains what was longer before."""
    timings = grown(0, 0.0)
    dice = np.random.default_rng(1)
    timings.own[GAP][2, : 83 - 1] += dice.normal(0, 12, 82).astype(np.float32)
    (slow,) = found(timings)
    assert abs(with_growth(timings, slow, RANKS).first_step - slow.first_step) <= 1
