from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from analyzers.account.timings import OWN_PHASES, Timings
from analyzers.finding import Finding
from analyzers.policy import SHARED
from analyzers.report.wording.explained import why
from analyzers.robust import others_median
from analyzers.scope import Scope
from analyzers.source import Source
from analyzers.stragglers.analyze import stragglers
from analyzers.stragglers.comparison.peer_comparison import Straggler, find_stragglers, place_of
from tests.analyzers.explained import explained
from tests.analyzers.memory_store import MemoryStore
from tests.analyzers.rank_timings import Slow, simulate
from tests.depth import tried


def judged(source: Source) -> list[Finding]:
    return explained(stragglers(source, Scope()))


def named(stragglers: Sequence[Straggler]) -> list[tuple[int, str]]:
    return [(straggler.rank, straggler.cause) for straggler in stragglers]


@pytest.mark.parametrize("num", [2, 3, 4, 5, 8, 9])
def test_others_median_is_the_median_over_all_other_rows(num: int) -> None:
    values = np.round(np.random.default_rng(num).normal(size=(num, 50)), 1).astype(np.float32)  # with ties
    expected = [np.median(np.delete(values, row, axis=0), axis=0) for row in range(num)]
    np.testing.assert_allclose(others_median(values), expected, rtol=1e-6)


@pytest.mark.parametrize("machine", ["quiet", "busy", "crowded"])
@pytest.mark.parametrize("ranks", [4, 8])
def test_clean_runs_are_silent(machine: str, ranks: int) -> None:
    """Jitter with tails, preemption, garbage collections, neighbours that come and go."""
    for seed in range(tried(15, nightly=60)):
        assert find_stragglers(simulate(seed, ranks=ranks, steps=200, machine=machine)) == [], seed


@pytest.mark.parametrize(
    ("ranks", "steps", "seed"), [(2, 60, 20), (4, 60, 49), (4, 120, 49), (2, 240, 5), (4, 240, 59)]
)
def test_a_neighbours_burst_at_the_end_of_a_run_accuses_no_rank(ranks: int, steps: int, seed: int) -> None:
    """It slows one rank for its last 12 to 17 steps, some only in the optimizer; one follows another for 35."""
    assert find_stragglers(simulate(seed, ranks=ranks, steps=steps, machine="crowded")) == []


@pytest.mark.parametrize("cause", ["compute", "data"])
@pytest.mark.parametrize("ranks", [4, 8])
def test_five_percent_within_ten_steps_on_a_quiet_machine(cause: str, ranks: int) -> None:
    for seed in range(tried(8, nightly=30)):
        fault = Slow(rank=seed % ranks, step=61, factor=1.055 if cause == "compute" else 1.05, cause=cause)
        (found,) = find_stragglers(simulate(seed, ranks=ranks, steps=70, faults=[fault]))
        assert (found.rank, found.cause) == (fault.rank, cause)
        assert abs(found.first_step - 61) <= 2
        assert found.ongoing
        assert found.factor == pytest.approx(1.05, abs=0.015)


def test_two_percent_within_two_hundred_steps_among_many() -> None:
    for seed in range(10):
        fault = Slow(rank=seed, step=51, factor=1.023)
        (found,) = find_stragglers(simulate(seed, ranks=16, steps=250, faults=[fault]))
        assert (found.rank, found.cause) == (seed, "compute")


@pytest.mark.parametrize(
    ("machine", "factor", "steps"), [("busy", 1.2, 60), ("crowded", 2.0, 60), ("crowded", 3.0, 30)]
)
def test_right_rank_and_cause_in_noise(machine: str, factor: float, steps: int) -> None:
    seeds, hits = tried(15, nightly=40), 0
    for seed in range(seeds):
        fault = Slow(rank=seed % 4, step=61, factor=factor)
        found = find_stragglers(simulate(seed, steps=60 + steps, machine=machine, faults=[fault]))
        assert named(found) in ([], [(fault.rank, "compute")]), seed
        hits += bool(found)
        for straggler in found:
            assert abs(straggler.first_step - 61) <= 12
            assert straggler.phase_factors["forward"] > 1 + (factor - 1) / 3
    assert hits >= seeds - 1


def test_a_past_straggler_is_reported_with_its_end() -> None:
    (found,) = find_stragglers(simulate(3, steps=200, faults=[Slow(rank=1, step=60, until=120, factor=1.3)]))
    assert (found.rank, found.ongoing) == (1, False)
    assert abs(found.first_step - 60) <= 2
    assert abs(found.last_step - 120) <= 2


def test_a_rank_that_is_slow_from_the_first_step_is_found() -> None:
    (found,) = find_stragglers(simulate(4, steps=60, faults=[Slow(rank=2, step=1, factor=1.2)]))
    assert (found.rank, found.first_step) == (2, 1)


def test_two_faults_of_two_ranks_and_two_causes() -> None:
    faults = [Slow(rank=1, step=50, factor=1.5), Slow(rank=6, step=80, factor=1.4, cause="data")]
    assert sorted(named(find_stragglers(simulate(5, ranks=8, steps=150, faults=faults)))) == [
        (1, "compute"),
        (6, "data"),
    ]


def test_uneven_stages_are_not_stragglers() -> None:
    """Ranks of the second stage have half as much work again: their peers are the ranks of their stage."""
    assert find_stragglers(simulate(6, ranks=8, stages=2, steps=120)) == []
    faults = [Slow(rank=3, step=60, factor=1.3)]
    assert named(find_stragglers(simulate(6, ranks=8, stages=2, steps=120, faults=faults))) == [(3, "compute")]


def test_single_slow_steps_give_no_finding() -> None:
    faults = [Slow(rank=1, step=step, until=step, factor=20.0) for step in (30, 60, 90)]
    assert find_stragglers(simulate(7, faults=faults)) == []


def with_gap(timings: Timings, *, moved: bool = False, step: int = 61) -> Timings:
    """A gap of half a millisecond, of 12 ms in rank 1 from `step` on; `moved`: its forward is so much shorter."""
    slow = (timings.steps >= step).astype(np.float32)
    gap = np.full_like(timings.wait, 0.5)
    gap[1] += 12 * slow
    forward = timings.own["forward"].copy()
    if moved:
        forward[1] = np.maximum(forward[1] - 12 * slow, 0.1)
    own = timings.own | {"forward": forward, "forward_to_backward": gap}
    return replace(timings, own=own, duration=timings.duration + gap.max(axis=0))


def test_a_gap_shows_a_rank_that_the_noise_of_its_phases_hides() -> None:
    places = []
    for seed in range(10):
        found = find_stragglers(with_gap(simulate(seed, ranks=2, steps=90, machine="crowded")))
        assert [one.rank for one in found] in ([], [1]), seed
        places += [one.place for one in found]
    assert set(places) <= {"forward_to_backward", ""}  # a neighbour may slow its phases as well
    assert places.count("forward_to_backward") >= 8


def test_work_that_moves_to_another_phase_is_not_slowness() -> None:
    assert find_stragglers(with_gap(simulate(3, ranks=2, steps=120), moved=True)) == []


def scaled(timings: Timings, factor: float) -> Timings:
    own = {place: values * np.float32(factor) for place, values in timings.own.items()}
    scaled_wait, scaled_duration = timings.wait * np.float32(factor), timings.duration * np.float32(factor)
    return replace(timings, own=own, wait=scaled_wait, duration=scaled_duration)


def test_a_burst_of_short_steps_is_not_found_until_it_has_lasted() -> None:
    """A neighbour's burst of a quarter of a second is 25 steps of 8 ms: it says nothing of the rank."""
    fault = Slow(rank=1, step=130, factor=1.4)
    for ranks in (2, 4):
        short = scaled(simulate(11, ranks=ranks, steps=155, faults=[fault]), 1 / 6)
        assert find_stragglers(short) == []
        longer = scaled(simulate(11, ranks=ranks, steps=230, faults=[fault]), 1 / 6)
        assert named(find_stragglers(longer)) == [(1, "compute")]


def test_a_batch_made_by_hand_before_each_microbatch_has_a_place() -> None:
    """Of two delays a step the first lies at the end of the step before, where the loop makes its batch."""
    excess_ms = {"forward": 0.1, "before_forward": 10.0, "after_optimizer": 10.2, "backward": 0.4, "data": 0.0}
    assert place_of(excess_ms, "compute") == "before_forward"
    spread = {"forward": 6.0, "before_forward": 5.0, "after_optimizer": 5.0, "backward": 5.0, "data": 0.0}
    assert place_of(spread, "compute") == ""


def test_the_finding_has_the_step_time_without_the_straggler() -> None:
    (found,) = find_stragglers(simulate(8, ranks=8, steps=120, faults=[Slow(rank=1, step=20, factor=1.5)]))
    assert found.excess_ms == pytest.approx(21, rel=0.05)  # half of 42 ms in forward and backward
    assert found.step_ms - found.step_without_ms == pytest.approx(21, rel=0.1)
    assert found.peers_wait_more_ms == pytest.approx(21, rel=0.1)


@pytest.mark.parametrize("ranks", [4, 8])
def test_five_percent_are_found_without_a_time_before(ranks: int) -> None:
    timings = simulate(1, ranks=ranks, steps=90, faults=[Slow(rank=2, step=0, factor=1.055)])
    assert named(find_stragglers(timings)) == [(2, "compute")]


# ---- through the store ----


def stored(timings: Timings, *, clock_offset_ns: dict[int, int] | None = None) -> MemoryStore:
    store, shape = MemoryStore(), timings.duration.shape
    offset_ns = np.array([(clock_offset_ns or {}).get(rank, 0) for rank in timings.ranks.tolist()])
    start_ns = offset_ns[:, None] + np.cumsum(timings.duration * 1e6, axis=1).astype(np.int64)
    columns = {f"{phase}_ns": (timings.own[phase] * 1e6).astype(np.int64) for phase in OWN_PHASES}
    wait_ns = (timings.wait * 1e6).astype(np.int64)
    columns["backward_ns"] = columns["backward_ns"] + wait_ns
    of_all = {
        "attempt": np.zeros(shape, np.int32),
        "rank": np.broadcast_to(timings.ranks.astype(np.int32)[:, None], shape),
        "step": np.broadcast_to(timings.steps, shape),
    }
    columns |= {
        "start_ns": start_ns,
        "duration_ns": (timings.duration * 1e6).astype(np.int64),
        "backward_wait_ns": wait_ns,
        "collective_wait_ns": wait_ns,
    }
    calls = {
        "seq": np.broadcast_to(np.arange(shape[1]), shape),
        "issue_ns": start_ns,
        "end_ns": start_ns + wait_ns,
        "process_group": np.full(shape, "dp:0-3", dtype=object),
        "op": np.full(shape, "all_reduce", dtype=object),
    }
    for table, values in (("steps", columns), ("collectives", calls)):
        store.add_columns(table, **{name: column.reshape(-1) for name, column in (of_all | values).items()})
    return store


def test_a_finding_says_who_since_when_how_much_and_why() -> None:
    store = stored(simulate(10, steps=120, machine="busy", faults=[Slow(rank=3, step=60, factor=1.5)]))
    (finding,) = judged(store)
    assert (finding.kind, finding.ranks, finding.cause) == ("straggler", (3,), "compute")
    assert abs((finding.first_step or 0) - 60) <= 2
    assert finding.evidence["caused_wait_ratio"] > 0.9
    assert finding.evidence["speedup_without_it_ratio"] > 1.2
    assert finding.cost_s == pytest.approx(21 * 61 / 1000, rel=0.2)
    assert finding.summary.startswith("Rank 3 has been slow since step ")
    for words in ("forward 1.5", "backward 1.5", "data", "of the waiting"):
        assert words in why(finding)


def test_clocks_ten_minutes_apart_change_nothing() -> None:
    clean = simulate(11, steps=120, machine="busy")
    assert judged(stored(clean, clock_offset_ns={1: 600 * 10**9, 2: -600 * 10**9})) == []


def test_steps_that_run_again_are_observations_of_their_own() -> None:
    order = [*range(1, 61), *range(41, 101)]
    store = stored(simulate(12, steps_run=order, faults=[Slow(rank=2, step=41, until=60, factor=1.4)]))
    (finding,) = judged(store)
    assert (finding.ranks, finding.first_step, finding.evidence["steps_slow"]) == ((2,), 41, 40)


def test_a_rank_with_missing_rows_is_compared_by_step() -> None:
    store = stored(simulate(13, steps=120, faults=[Slow(rank=1, step=60, factor=1.3)]))
    store.connection.execute("DELETE FROM steps WHERE rank = 0 AND step % 7 = 0")
    (finding,) = judged(store)
    assert finding.ranks == (1,)
    assert abs((finding.first_step or 0) - 60) <= 2


def test_a_rank_that_evaluates_and_saves_for_all_is_not_a_straggler() -> None:
    store = stored(simulate(14, steps=120))
    store.connection.execute(
        "UPDATE steps SET checkpoint_ns = 80000000, evaluate_ns = 90000000, duration_ns = duration_ns + 170000000 "
        "WHERE rank = 0 AND step % 2 = 0"
    )
    assert judged(store) == []


def test_warm_up_is_left_out() -> None:
    faults = [Slow(rank=0, step=1, until=SHARED.warm_up_steps, factor=50.0)]
    assert judged(stored(simulate(15, steps=40, faults=faults))) == []


def test_without_peers_or_steps_nothing_is_claimed() -> None:
    assert [f.status for f in judged(MemoryStore())] == ["insufficient_data"]
    assert [f.status for f in judged(stored(simulate(16, steps=8)))] == ["insufficient_data"]
    assert judged(stored(simulate(17, ranks=1, steps=60))) == []
    store = stored(simulate(18, steps=120, faults=[Slow(rank=3, step=60, factor=1.5)]))
    store.drop("collectives")
    (finding,) = judged(store)
    assert "caused_wait_ratio" not in finding.evidence


def slow_link(
    slow_groups: bool,
    *,
    steps: int = 45,
    seed: int = 0,
    jitter: float = 0.1,
    in_columns: float = 4.0,
    before: int = 0,
    onset: int = 20,
    faults: Sequence[Slow] = (),
) -> MemoryStore:
    """A 2 x 4 mesh, fsdp in rows and dp in columns: from `onset` on rank 5's link is four times as slow, in its column
    `in_columns` times; in its row already so many steps `before`."""
    rng = np.random.default_rng(seed)
    groups = {"fsdp:0-3": (0, 1, 2, 3), "fsdp:4-7": (4, 5, 6, 7)} | {f"dp:{r},{r + 4}": (r, r + 4) for r in range(4)}
    store = stored(simulate(seed, ranks=8, steps=steps, faults=faults))
    store.connection.execute("DELETE FROM collectives")
    rows = []
    for group, members in groups.items():
        store.add(
            "process_groups", [{"attempt": 0, "rank": r, "process_group": group, "members": members} for r in members]
        )
        for step in range(1, steps + 1):
            base = 4e6 if group.startswith("fsdp") else 2e6
            in_row = group.startswith("fsdp")
            slow = slow_groups and step >= onset - before * in_row and 5 in members
            factor = (4 if in_row else in_columns) if slow else 1
            transfer = base * factor * np.exp(jitter * rng.standard_normal())
            late = rng.exponential(1e6, len(members))
            for rank, wait in zip(members, late - late.min(), strict=True):
                call = {"attempt": 0, "rank": rank, "step": step, "seq": step, "process_group": group, "bytes": 4096}
                rows.append(call | {"op": "all_gather", "issue_ns": 0, "end_ns": int(transfer + wait)})
    store.add("collectives", rows)
    return store


def test_a_slow_link_is_named_by_the_groups_that_share_it() -> None:
    (finding,) = judged(slow_link(True))
    assert (finding.cause, finding.ranks) == ("communication", (5,))
    assert 18 <= (finding.first_step or 0) <= 25
    assert set(finding.evidence["process_groups"]) == {"fsdp:4-7", "dp:1,5"}
    for seed in range(3):
        assert judged(slow_link(False, seed=seed, jitter=0.3)) == []


@pytest.mark.parametrize("seed", range(tried(2, nightly=5)))
def test_a_group_that_is_a_little_slower_says_which_member_of_a_slow_one_it_is(seed: int) -> None:
    (finding,) = judged(slow_link(True, seed=seed, in_columns=1.45))
    assert finding.ranks == (5,)
    (finding,) = judged(slow_link(True, seed=seed, in_columns=1.45, before=10))
    assert finding.ranks == (5,), "although its row seemed slow before the column was"
    (finding,) = judged(slow_link(True, seed=seed, in_columns=1.0))
    assert finding.ranks == (4, 5, 6, 7), "no other group says which of them"


@pytest.mark.parametrize(
    ("fault", "explains"),
    [
        (Slow(rank=5, step=70, factor=1.5), True),
        (Slow(rank=5, step=10, until=40, factor=1.5), False),
        (Slow(rank=5, step=10, until=40, factor=1.5, cause="data"), False),
        (Slow(rank=5, step=70, factor=1.5, cause="data"), False),
        (Slow(rank=2, step=70, factor=1.5), False),
    ],
    ids=["slow meanwhile", "slow earlier", "loaded earlier", "loads meanwhile", "another rank"],
)
def test_a_straggler_keeps_a_slow_link_quiet_only_if_it_explains_it(fault: Slow, explains: bool) -> None:
    """The link of rank 5 is slow from step 70 on."""
    found = judged(slow_link(True, steps=120, onset=70, faults=[fault]))
    assert (fault.rank,) in [finding.ranks for finding in found if finding.cause != "communication"]
    links = [finding.ranks for finding in found if finding.cause == "communication"]
    assert links == ([] if explains else [(5,)])
