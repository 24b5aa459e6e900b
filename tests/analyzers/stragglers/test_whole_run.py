"""First and last step of a rank that was slow in all steps, whatever delayed its peers in a few of them."""

from __future__ import annotations

import pytest

from analyzers.scope import Scope
from analyzers.stragglers.analyze import stragglers
from tests.analyzers.memory_store import MemoryStore
from tests.analyzers.rank_timings import Slow, simulate
from tests.analyzers.stragglers.test_straggler import judged, stored

STEPS = 100


def slow_from(step: int, *, delayed_peers: tuple[int, ...] = ()) -> MemoryStore:
    """Rank 1 of two loads 100 times as long from a step on; rank 0 as long as it in single steps."""
    timings = simulate(
        3, ranks=2, steps=STEPS, machine="busy", faults=[Slow(rank=1, step=step, factor=100.0, cause="data")]
    )
    for delayed in delayed_peers:
        timings.own["data"][0, delayed - 1] = 101.0
        timings.duration[:, delayed - 1] += 1.0
    return stored(timings)


@pytest.mark.parametrize("delayed", [(), (7,), (6, 8), (4, STEPS)])
def test_a_rank_that_was_slow_in_all_steps_is_slow_from_the_first_to_the_newest(delayed: tuple[int, ...]) -> None:
    (finding,) = judged(slow_from(1, delayed_peers=delayed))
    assert (finding.ranks, finding.first_step, finding.last_step) == ((1,), 1, STEPS)
    assert finding.summary.startswith("Rank 1 has been slow from the first step: ")
    assert finding.evidence["pattern"] == "chronic"


def test_it_is_so_live_while_the_first_steps_are_judged() -> None:
    scope = Scope(now_ns=1, since_step=0)
    (finding,) = stragglers(slow_from(1, delayed_peers=(7,)), scope)
    assert finding.first_step == 1


@pytest.mark.parametrize("step", [3, 5, 6])
def test_steps_before_that_were_not_slow_keep_the_onset(step: int) -> None:
    (finding,) = judged(slow_from(step))
    assert (finding.first_step, finding.evidence["pattern"]) == (6, "chronic")
    assert "since step 6, the first one compared" in finding.summary


@pytest.mark.parametrize("step", [9, 14])
def test_an_onset_among_the_first_steps_compared_is_kept(step: int) -> None:
    (finding,) = judged(slow_from(step))
    assert (finding.first_step, finding.evidence["pattern"]) == (step, "since")
