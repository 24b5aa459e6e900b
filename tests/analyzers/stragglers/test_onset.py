"""The onset of a rank that computes more, by its CPU time: what other jobs delay by the wall clock does not move it."""

from __future__ import annotations

import pytest

from tests.analyzers.stragglers.test_corroboration import counted
from tests.analyzers.stragglers.test_straggler import judged
from tests.depth import tried

ONSET = 60
DELAY = 40_000_000


@pytest.mark.parametrize("delayed", [(), (58, 59), (57, 58, 59), (54, 58)], ids=str)
@pytest.mark.parametrize("seed", range(tried(1, nightly=3)))
def test_steps_that_another_job_delays_before_are_no_part_of_it(seed: int, delayed: tuple[int, ...]) -> None:
    store = counted(seed)
    for step in delayed:  # the wall clock alone: another process has the core
        store.connection.execute(
            f"UPDATE steps SET forward_ns = forward_ns + {DELAY}, duration_ns = duration_ns + {DELAY}, "
            f"run_delay_ns = run_delay_ns + {DELAY} WHERE rank = 3 AND step = {step}"
        )
    (finding,) = judged(store)
    assert (finding.ranks, finding.cause, finding.first_step) == ((3,), "compute", ONSET)


def test_steps_of_which_its_peers_were_delayed_are_a_part_of_it() -> None:
    store = counted(1)
    store.connection.execute(
        f"UPDATE steps SET forward_ns = forward_ns + {DELAY}, duration_ns = duration_ns + {DELAY}, "
        f"run_delay_ns = run_delay_ns + {DELAY} WHERE rank < 3 AND step BETWEEN {ONSET} AND {ONSET + 2}"
    )
    (finding,) = judged(store)
    assert (finding.ranks, finding.first_step) == ((3,), ONSET)


@pytest.mark.parametrize(("first", "last"), [(ONSET, 92), (104, 120)])
def test_steps_in_which_its_peers_lost_the_core_are_a_part_of_it(first: int, last: int) -> None:
    """Their waits hide its excess in wall time at its onset, or at the end."""
    store = counted(1)
    store.connection.execute(
        f"""
        UPDATE steps SET forward_ns = forward_ns + delay, duration_ns = duration_ns + delay, run_delay_ns = delay
        FROM (SELECT rank AS of_rank, step AS of_step,
                     CAST((20 + hash(step, rank, 1) % 60) * 1000000 AS BIGINT) AS delay FROM steps) AS neighbours
        WHERE rank = of_rank AND step = of_step AND rank < 3 AND step BETWEEN {first} AND {last}
        """
    )
    (finding,) = judged(store)
    assert (finding.ranks, finding.cause, finding.first_step, finding.last_step) == ((3,), "compute", ONSET, 120)
    assert finding.evidence["ongoing"]


@pytest.mark.parametrize("seed", [5, 8, 11, 21, 22])
def test_it_is_over_if_it_computes_as_its_peers_in_the_newest_steps(seed: int) -> None:
    """From step 109 on. By wall time only a change that lasts is found, because other jobs delay all ranks."""
    store = counted(seed)
    less = "CAST(cpu_ns / 3 AS BIGINT)"
    store.connection.execute(
        f"UPDATE steps SET forward_ns = forward_ns - {less}, duration_ns = duration_ns - {less}, "
        f"cpu_ns = cpu_ns - {less} WHERE rank = 3 AND step >= 109"
    )
    store.connection.execute(
        f"""
        UPDATE steps SET forward_ns = forward_ns + delay, duration_ns = duration_ns + delay, run_delay_ns = delay
        FROM (SELECT rank AS of_rank, step AS of_step,
                     CAST(hash(step, rank, {seed}) % 20 * 1000000 AS BIGINT) AS delay FROM steps) AS neighbours
        WHERE rank = of_rank AND step = of_step
        """
    )
    (finding,) = judged(store)
    assert (finding.ranks, finding.cause, finding.first_step) == ((3,), "compute", ONSET)
    assert not finding.evidence["ongoing"]
    assert abs((finding.last_step or 0) - 108) <= 1


def test_without_cpu_time_the_wall_clock_dates_it() -> None:
    store = counted(1)
    store.connection.execute("UPDATE steps SET cpu_ns = NULL WHERE step = 58")
    (finding,) = judged(store)
    assert abs((finding.first_step or 0) - ONSET) <= 1


@pytest.mark.parametrize("seed", range(tried(2, nightly=4)))
def test_twenty_steps_in_which_it_waited_for_a_core_before_are_no_part_of_it(seed: int) -> None:
    """A neighbour's process holds the rank's core from step 38 on; from step 60 on the rank computes more."""
    store = counted(seed)
    store.connection.execute(
        f"""
        UPDATE steps SET forward_ns = forward_ns + delay, duration_ns = duration_ns + delay,
               run_delay_ns = delay + 10000000
        FROM (SELECT rank AS of_rank, step AS of_step, CAST(if(step BETWEEN 38 AND 59 AND rank = 3,
                     40 + hash(step, rank, {seed}) % 60, hash(step, rank, {seed}) % 30) * 1000000 AS BIGINT) AS delay
              FROM steps) AS neighbours
        WHERE rank = of_rank AND step = of_step
        """
    )
    (finding,) = judged(store)
    assert finding.ranks == (3,)
    assert abs((finding.first_step or 0) - ONSET) <= 3


def test_computing_that_grows_is_dated_by_the_first_rise_of_its_cpu_time() -> None:
    """1.2 times as long from step 36 on, which is too little for a finding at once, 1.5 times as long from step 60 on.
    Other jobs delay its steps."""
    store = counted(1)
    more = "CAST(0.2 * cpu_ns AS BIGINT)"
    store.connection.execute(
        f"UPDATE steps SET forward_ns = forward_ns + {more}, duration_ns = duration_ns + {more}, "
        f"cpu_ns = cpu_ns + {more} WHERE rank = 3 AND step BETWEEN 36 AND {ONSET - 1}"
    )
    (finding,) = judged(store)
    assert (finding.ranks, finding.cause) == ((3,), "compute")
    assert abs((finding.first_step or 0) - 36) <= 1
