"""Ranks without peers, against their own past: who became slower, and what all of them share is nobody's fault."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from analyzers.account.timings import Timings
from analyzers.stragglers.comparison.peer_comparison import find_stragglers
from analyzers.stragglers.onsets.past_comparison import find_slower_than_before
from tests.analyzers.rank_timings import Slow, simulate
from tests.analyzers.stragglers.test_straggler import judged, named, stored
from tests.depth import tried


def one_rank_a_stage(seed: int, *, ranks: int = 4, **more: object) -> Timings:
    return simulate(seed, ranks=ranks, stages=ranks, **more)  # type: ignore[arg-type]


SEEDS = tried(8, nightly=20)


@pytest.mark.parametrize("machine", ["quiet", "busy", "crowded"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_clean_pipelines_are_silent(machine: str, ranks: int) -> None:
    for seed in range(tried(12, nightly=40)):
        assert find_slower_than_before(one_rank_a_stage(seed, ranks=ranks, steps=200, machine=machine)) == [], seed


@pytest.mark.parametrize(("machine", "factor"), [("quiet", 1.2), ("busy", 1.5), ("crowded", 3.0)])
def test_a_rank_that_becomes_slow_is_named_with_its_onset(machine: str, factor: float) -> None:
    hits = 0
    for seed in range(SEEDS):
        fault = Slow(rank=seed % 4, step=100, factor=factor)
        found = find_slower_than_before(one_rank_a_stage(seed, steps=200, machine=machine, faults=[fault]))
        assert named(found) in ([], [(fault.rank, "compute")]), seed
        hits += bool(found)
        for straggler in found:
            assert abs(straggler.first_step - 100) <= 12
            assert not straggler.has_peers
            assert 1 + 0.5 * (factor - 1) < straggler.factor < 1 + 1.1 * (factor - 1)
    assert hits >= SEEDS - 1


def test_loading_has_a_past_too() -> None:
    fault = Slow(rank=2, step=100, factor=1.4, cause="data")
    assert named(find_slower_than_before(one_rank_a_stage(1, steps=200, faults=[fault]))) == [(2, "data")]


def test_stages_that_have_more_to_do_from_the_first_step_on_are_not_slow_ranks() -> None:
    fault = Slow(rank=2, step=1, factor=1.5)
    assert find_slower_than_before(one_rank_a_stage(1, steps=200, faults=[fault])) == []


@pytest.mark.parametrize("seed", range(tried(3, nightly=10)))
def test_a_change_shared_by_all_ranks_names_none(seed: int) -> None:
    """Longer sequences: each stage answers in its own measure, the last one by a quarter more than the first."""
    calm = one_rank_a_stage(seed, steps=200, machine="busy")
    growth = np.where(np.arange(200) >= 100, 1.6 + 0.15 * np.arange(4)[:, None], 1.0).astype(np.float32)
    longer = replace(calm, own={phase: values * growth for phase, values in calm.own.items()})
    assert find_slower_than_before(longer) == []


def restless(timings: Timings, seed: int, rank: int) -> Timings:
    """A rank that loses its core in every other step, for as long as its own work takes: two shared cores."""
    rng = np.random.default_rng(seed)
    num = len(timings.steps)
    lost_ms = np.where(rng.random(num) < 0.5, rng.exponential(60.0, num), 0.0)
    own = {phase: values.copy() for phase, values in timings.own.items()}
    own["backward"][rank] += lost_ms.astype(np.float32)
    return replace(timings, own=own)


@pytest.mark.parametrize("machine", ["quiet", "busy"])
def test_a_stage_that_is_slow_in_most_steps_is_found_beside_a_restless_one(machine: str) -> None:
    """Four of five judged steps are slow: those before them are the measure all the same."""
    hits = 0
    for seed in range(SEEDS):
        fault = Slow(rank=1, step=31, factor=60.0)
        timings = one_rank_a_stage(seed, ranks=2, steps=150, machine=machine, faults=[fault])
        found = find_slower_than_before(restless(timings, seed, 0))
        assert named(found) in ([], [(1, "compute")]), seed
        assert all(abs(straggler.first_step - 31) <= 12 for straggler in found), seed
        hits += bool(found)
    assert hits >= SEEDS - 1


@pytest.mark.parametrize("seed", range(tried(3, nightly=10)))
def test_a_slow_stage_is_found_though_its_history_was_disturbed_elsewhere(seed: int) -> None:
    """A thread of its own library held its core in most steps before: four times its work, but not in its forward."""
    rng = np.random.default_rng(seed)
    timings = one_rank_a_stage(seed, ranks=2, steps=85, faults=[Slow(rank=1, step=21, factor=160.0)])
    own = {phase: values / 50 for phase, values in timings.own.items()}  # steps of a millisecond
    for phase in ("backward", "optimizer"):
        own[phase][1, 20:] /= 160  # it is slow in its forward only
    own["backward"][1, 5:17] += 14.0
    for row in range(2):
        hit = rng.random(85) < 0.3
        own["backward"][row, hit] += rng.exponential(4.0, int(hit.sum())).astype(np.float32)
    found = find_slower_than_before(replace(timings, own=own))
    assert named(found) == [(1, "compute")]
    assert abs(found[0].first_step - 21) <= 12


@pytest.mark.parametrize("begin", [9, 21, 51])
def test_a_rank_that_waits_long_for_a_slow_stage_is_not_slow(begin: int) -> None:
    """Its caches are cold after each wait: 3 times its optimizer, where the slow stage sleeps half a second."""
    for seed in range(5):
        timings = one_rank_a_stage(seed, ranks=2, steps=100)
        own = {phase: values.copy() for phase, values in timings.own.items()}
        own["forward"][1, timings.steps >= begin] += 500
        own["optimizer"][0, timings.steps >= begin] *= 3
        for steps in range(30, 100, 5):  # as it is judged while it trains
            part = {phase: values[:, :steps] for phase, values in own.items()}
            short = replace(timings, own=part, steps=timings.steps[:steps], wait=timings.wait[:, :steps],
                            duration=timings.duration[:, :steps])  # fmt: skip
            assert 0 not in {rank for rank, _ in named(find_slower_than_before(short))}, (seed, steps)


def test_ranks_with_peers_are_left_to_the_comparison_with_them() -> None:
    timings = simulate(2, ranks=8, stages=4, steps=200, faults=[Slow(rank=3, step=100, factor=1.5)])
    assert find_slower_than_before(timings) == []
    assert named(find_stragglers(timings)) == [(3, "compute")]


# ---- through the store ----


def pipeline_run(seed: int, *, steps: int = 300, faults: tuple[Slow, ...] = ()) -> object:
    store = stored(one_rank_a_stage(seed, steps=steps, faults=faults))
    store.add("ranks", [{"attempt": 0, "rank": rank, "wall_ns": 1, "pp": rank} for rank in range(4)])
    return store


def test_the_finding_says_that_a_rank_is_compared_with_its_past() -> None:
    (finding,) = judged(pipeline_run(3, faults=(Slow(rank=2, step=150, factor=1.5),)))  # type: ignore[arg-type]
    assert (finding.ranks, finding.cause, finding.status) == ((2,), "compute", "fired")
    assert abs((finding.first_step or 0) - 150) <= 2
    assert "x its former time)." in finding.summary
    assert finding.evidence["compared_with"] == "its own past"
    assert finding.evidence["pattern"] == "since"
    assert "caused_wait_ratio" not in finding.evidence, "of a pipeline hardly anybody waits in collectives"
    assert finding.evidence["speedup_without_it_ratio"] > 1.1
    assert judged(pipeline_run(3)) == []  # type: ignore[arg-type]


def test_the_steps_needed_are_reported() -> None:
    (finding,) = judged(pipeline_run(4, steps=29))  # type: ignore[arg-type]
    assert finding.status == "insufficient_data"
    assert "15 steps of ranks with the same work, 30 of a rank without peers" in finding.summary
    assert judged(pipeline_run(4, steps=30)) == []  # type: ignore[arg-type]


# ---- one rank of a tensor-parallel group loads ----


def loaded_by_the_first(seed: int, *, tp: int, dp: int, dimension: str = "tp", faults: tuple[Slow, ...] = ()) -> object:
    """The first rank of each group takes 5 ms more for its batch: 1.11 times the others' work."""
    timings = simulate(seed, ranks=tp * dp, steps=120, faults=faults)
    data = timings.own["data"].copy()
    data[np.arange(tp * dp) % tp == 0] += 5.0
    store = stored(replace(timings, own=timings.own | {"data": data}))
    rows = [{"attempt": 0, "rank": r, "wall_ns": 1, "pp": 0, dimension: r % tp, "dp_shard": r // tp}
            for r in range(tp * dp)]  # fmt: skip
    store.add("ranks", rows)
    return store


@pytest.mark.parametrize("seed", range(tried(1, nightly=3)))
@pytest.mark.parametrize(("tp", "dp", "dimension"), [(4, 2, "tp"), (8, 1, "tp"), (2, 4, "tp"), (4, 2, "cp")])
def test_the_only_rank_that_loads_data_is_not_a_straggler(seed: int, tp: int, dp: int, dimension: str) -> None:
    shape = {"tp": tp, "dp": dp, "dimension": dimension}
    assert judged(loaded_by_the_first(seed, **shape)) == []  # type: ignore[arg-type]
    for fault in (Slow(rank=3, step=60, factor=1.1), Slow(rank=0, step=60, factor=1.3, cause="data")):
        (found,) = judged(loaded_by_the_first(seed, **shape, faults=(fault,)))  # type: ignore[arg-type]
        assert (found.ranks, found.cause) == ((fault.rank,), fault.cause)
        assert abs((found.first_step or 0) - 60) <= 2
