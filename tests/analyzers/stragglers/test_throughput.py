from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from analyzers.finding import Finding
from analyzers.scope import Scope
from analyzers.stragglers import throughput
from analyzers.stragglers.throughput import StepTimes, between, regression, step_times, throughput_drops
from probes.tape import event_kinds
from tests.analyzers.explained import explained
from tests.analyzers.memory_store import MemoryStore
from tests.analyzers.rank_timings import Slow, simulate
from tests.analyzers.stragglers.test_straggler import stored


def run_of(
    seed: int,
    *,
    steps: int = 400,
    machine: str = "quiet",
    since: int = 0,
    factors: Mapping[str, float] | None = None,
    faults: Sequence[Slow] = (),
) -> MemoryStore:
    """Four ranks; from step `since` on everybody's phases take `factors` times as long."""
    store = stored(simulate(seed, steps=steps, machine=machine, faults=faults))
    for column, factor in (factors or {}).items():
        wait = "" if column in ("data", "collective_wait") else f" - coalesce({column}_wait_ns, 0)"
        more = f"CAST({factor - 1} * ({column}_ns{wait}) AS BIGINT)"
        store.connection.execute(
            f"UPDATE steps SET duration_ns = duration_ns + {more}, {column}_ns = {column}_ns + {more} "
            f"WHERE step >= {since}"
        )
    return store


def fired(store: MemoryStore) -> list[Finding]:
    return [finding for finding in explained(throughput_drops(store, Scope())) if finding.status == "fired"]


@pytest.mark.parametrize(
    ("factors", "cause"),
    [
        ({"forward": 1.5, "backward": 1.5}, "compute"),
        ({"data": 20.0}, "data"),
        ({"collective_wait": 5.0}, "communication"),
    ],
)
def test_a_lasting_drop_of_all_ranks_is_found_with_its_step_and_part(factors: dict[str, float], cause: str) -> None:
    (finding,) = fired(run_of(1, since=201, factors=factors))
    assert (finding.kind, finding.cause, finding.ranks) == ("throughput", cause, ())
    assert finding.first_step is not None
    assert abs(finding.first_step - 201) <= 10
    assert finding.advice == f"throughput-{cause}"
    assert finding.evidence[f"{cause}_rise_ms"] > 0
    assert (finding.cost_s or 0) > 1


@pytest.mark.parametrize("machine", ["quiet", "busy", "crowded"])
def test_clean_runs_are_silent(machine: str) -> None:
    assert [seed for seed in range(15) if fired(run_of(seed, machine=machine))] == []


def test_one_slow_rank_is_a_straggler_and_no_drop_of_all() -> None:
    assert fired(run_of(2, faults=[Slow(rank=3, step=200, factor=2.0)])) == []


def test_another_training_in_the_process_has_a_speed_of_its_own() -> None:
    store = run_of(1, since=201, factors={"forward": 1.5, "backward": 1.5})
    store.event(event_kinds.TRAINING_BEGAN, step=201, rank=0)
    assert fired(store) == []


def test_a_drop_that_recovers_or_is_too_short_is_not_reported() -> None:
    store = run_of(3, since=150, factors={"forward": 2.0})
    store.connection.execute(
        "UPDATE steps SET forward_ns = forward_ns // 2, duration_ns = duration_ns // 2 WHERE step > 300"
    )
    assert fired(store) == []
    assert fired(run_of(4, steps=150, since=60, factors={"forward": 3.0})) == []
    (finding,) = explained(throughput_drops(MemoryStore(), Scope()))
    assert finding.status == "insufficient_data"


def times(
    seed: int, factor: float = 1.0, *, steps: int = 200, tokens: float = 4096.0, noise: float = 0.05
) -> StepTimes:
    rng = np.random.default_rng(seed)
    duration = 100 * factor * np.exp(noise * rng.standard_normal(steps))
    nothing = np.zeros(steps)
    return StepTimes(step=np.arange(1, steps + 1), data=nothing, compute=duration, communication=nothing,
                     duration=duration, tokens=np.full(steps, tokens))  # fmt: skip


def test_two_runs_are_told_apart_by_their_interval() -> None:
    slower = between(times(1), times(2, 1.12))
    assert slower is not None
    assert slower.low < 1.12 < slower.high
    finding = regression(slower)
    assert finding is not None
    assert (finding.kind, finding.cause) == ("throughput", "between_runs")
    equal = between(times(1), times(2, 1.03))
    assert equal is not None
    assert regression(equal) is None
    assert between(times(1), times(2, steps=20)) is None


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    inside = 0
    for seed in range(200):
        change = between(times(2 * seed), times(2 * seed + 1, 1.1))
        assert change is not None
        inside += change.low <= 1.1 <= change.high
    assert inside >= 178  # 95 % of 200 less three standard errors; resampling few blocks is a little narrow


def test_a_larger_batch_is_compared_token_by_token() -> None:
    change = between(times(1), times(2, 2.0, tokens=8192.0))
    assert change is not None
    assert change.per_token
    assert change.ratio == pytest.approx(1.0, abs=0.03)
    without = between(times(1), times(2, 2.0, tokens=float("nan")))
    assert without is not None
    assert not without.per_token
    assert without.ratio == pytest.approx(2.0, abs=0.06)


def test_tokens_that_several_ranks_read_count_once() -> None:
    """Both stages of a pipeline log the tokens of their batch: summed, a run without stages looked 2x slower."""
    store = run_of(5, steps=60)
    store.connection.execute("UPDATE steps SET tokens = 1024")
    alone = step_times(store)
    store.add("ranks", [{"attempt": 0, "rank": rank, "wall_ns": 1, "pp": rank % 2} for rank in range(4)])
    staged = step_times(store)
    assert alone is not None
    assert staged is not None
    assert (alone.tokens == 4096).all()
    assert (staged.tokens == 2048).all()


def test_steps_are_those_of_the_newest_attempt() -> None:
    found = step_times(run_of(5, steps=60))
    assert found is not None
    assert len(found.step) == 60
    assert found.shared.mean() < found.duration.mean() + 1
    assert throughput.step_times(MemoryStore()) is None
