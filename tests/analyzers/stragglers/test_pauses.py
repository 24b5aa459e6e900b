"""A rank that is stopped in a part of its steps only, which no median shows."""

from __future__ import annotations

import numpy as np
import pytest

from analyzers.account.timings import OWN_PHASES
from analyzers.stragglers.comparison.pauses import find_pauses
from analyzers.stragglers.comparison.peer_comparison import find_stragglers
from tests.analyzers.rank_timings import Slow, simulate
from tests.analyzers.stragglers.test_straggler import judged, stored
from tests.depth import tried


def paused(rank: int, *, step: int = 1, share: float = 0.35, until: int = 10**9, pause_ms: float = 150.0) -> Slow:
    return Slow(rank=rank, step=step, until=until, share=share, pause_ms=pause_ms)


@pytest.mark.parametrize("machine", ["quiet", "busy", "crowded"])
@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_a_rank_that_is_stopped_now_and_then_is_named(machine: str, ranks: int) -> None:
    for seed in range(tried(6, nightly=20)):
        fault = paused(seed % ranks, share=(0.25, 0.35, 0.45)[seed % 3], pause_ms=300)
        timings = simulate(seed, ranks=ranks, steps=100, machine=machine, faults=[fault])
        (found,) = find_stragglers(timings)
        assert found.rank == fault.rank, seed
        true = float((sum(timings.own[phase] for phase in OWN_PHASES)[fault.rank] > 300).mean())
        assert found.paused_ratio == pytest.approx(true, abs=0.06)
        assert found.excess_ms == pytest.approx(found.paused_ratio * 300, rel=0.25)
        assert found.ongoing


def test_the_finding_says_in_how_many_steps_and_what_the_run_loses() -> None:
    (finding,) = judged(stored(simulate(1, ranks=4, steps=200, faults=[paused(2, step=60)])))
    assert (finding.ranks, finding.evidence["pattern"]) == ((2,), "pauses")
    assert finding.first_step is not None
    assert 60 <= finding.first_step <= 75
    assert finding.summary.startswith("Rank 2 has paused in ")
    assert f"% of the steps since step {finding.first_step}: " in finding.summary, "it goes on: no step at its end"
    lost_ms = finding.evidence["step_ms"] - finding.evidence["step_without_it_ms"]
    assert lost_ms == pytest.approx(0.35 * 150, rel=0.35)


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([paused(rank) for rank in range(4)], id="all ranks pause"),
        pytest.param([paused(1), paused(3)], id="two of four do"),
        pytest.param([paused(1, step=60, until=85, share=0.5)], id="a burst that is over"),
        pytest.param([paused(1, share=0.04)], id="hardly ever"),
        pytest.param([paused(1, pause_ms=40.0)], id="pauses shorter than the work"),
    ],
)
def test_slowness_without_pauses_on_a_rank_names_none(faults: list[Slow]) -> None:
    for seed in range(tried(6, nightly=20)):
        assert find_stragglers(simulate(seed, ranks=4, steps=200, faults=faults)) == [], seed


@pytest.mark.parametrize("distance", [2, 3, 5])
def test_less_than_the_whole_work_is_enough_in_every_nth_step(distance: int) -> None:
    """Not every step was stamped."""
    random = np.random.default_rng(distance)
    steps = np.flatnonzero(random.random(200) < 0.7)
    excess = random.normal(0, 0.05, (2, len(steps))).astype(np.float32)
    excess[1, (steps >= 80) & ((steps - 80) % distance == 0)] += 0.7
    (found,) = find_pauses(excess, steps=steps)
    assert (found.row, found.ongoing) == (1, True)
    assert 80 <= steps[found.begin] <= 80 + 4 * distance
    at_any_step = excess.copy()
    at_any_step[1, steps >= 80] = random.permutation(excess[1, steps >= 80])
    assert find_pauses(at_any_step, steps=steps) == []


@pytest.mark.parametrize(("share", "is_named"), [(0.65, True), (0.35, False)])
def test_less_than_the_whole_work_is_enough_in_most_steps(share: float, is_named: bool) -> None:
    """As of a host whose lateness a slow network hides in some."""
    random = np.random.default_rng(3)
    excess = random.normal(0, 0.03, (2, 60)).astype(np.float32)
    excess[1, 20:] += 0.8 * (random.random(40) < share)
    assert [one.row for one in find_pauses(excess, steps=np.arange(60))] == [1] * is_named


def test_a_stop_in_every_second_step_is_no_noise() -> None:
    """All neighbours differ, of both ranks: each is the other's only peer."""
    excess = np.random.default_rng(1).normal(0, 0.02, (2, 80)).astype(np.float32)
    excess[1, 14::2] += 4.0
    excess[0, 14::2] -= 0.8
    (found,) = find_pauses(excess)
    assert (found.row, found.begin, found.ongoing) == (1, 14, True)
