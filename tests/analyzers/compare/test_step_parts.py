from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.compare.step_parts import StepParts, main_difference, step_parts
from analyzers.stragglers.throughput import Change
from store import Store
from tests.analyzers.compare.test_two_runs import compared
from tests.depth import later
from tests.factories import make_run

SLOWER = Change(ratio=1.3, low=1.2, high=1.4, per_token=False, ms_before=40.0, ms_after=52.0)


def parts(step_ms: float, **by_rank: dict[str, float]) -> StepParts:
    return StepParts(step_ms=step_ms, by_rank={int(rank[1:]): places for rank, places in by_rank.items()})


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=later("of four ranks, beside it")), 4])
def test_one_slow_rank_is_named_with_its_phase(tmp_path: Path, ranks: int) -> None:
    """A median over the ranks hides one slow rank, and one over the run a rank that became slow halfway."""
    before = make_run(tmp_path / "a", ranks=ranks, steps=200)
    after = make_run(tmp_path / "b", ranks=ranks, steps=200, slow={1: 2.0}, phase="forward", slow_from=60, seed=1)
    found = compared(before, after)
    assert found.main_difference.startswith("A step takes ")
    assert "forward of rank 1 +" in found.main_difference
    assert "waiting" not in found.main_difference
    assert "forward of rank 1 -" in compared(after, before).main_difference
    forward = found.phases["forward"]
    assert forward[0] is not None
    assert forward[1] is not None
    assert forward[1] > 1.1 * forward[0]


def test_a_change_on_all_ranks_names_the_phase_alone(tmp_path: Path) -> None:
    before = make_run(tmp_path / "a", steps=100)
    after = make_run(tmp_path / "b", steps=100, slow=dict.fromkeys(range(4), 1.6), phase="backward", seed=1)
    said = compared(before, after).main_difference
    assert "backward +" in said
    assert "rank" not in said


def test_parts_add_up_to_the_step(tmp_path: Path) -> None:
    with Store.open(make_run(tmp_path, steps=100, slow={2: 1.5})) as store:
        found = step_parts(store)
    assert found is not None
    measured = [found.of_place(place) or 0.0 for place in found.by_rank[0]]
    assert sum(measured) == pytest.approx(found.step_ms, rel=0.02)


def test_a_part_that_explains_little_is_not_named() -> None:
    """3 of 13 ms are not most of it."""
    before = parts(40.9, r0={"forward": 0.5, "backward": 7.1, "waiting": 7.3}, r1={"forward": 0.5, "backward": 7.1})
    after = parts(53.8, r0={"forward": 0.5, "backward": 7.7, "waiting": 9.7}, r1={"forward": 0.5, "backward": 7.7})
    assert main_difference(SLOWER, before, after) == ""


def test_two_of_eight_ranks() -> None:
    before = parts(40.0, **{f"r{rank}": {"forward": 10.0, "waiting": 5.0} for rank in range(8)})
    after = parts(52.0, **{f"r{rank}": {"forward": 22.0, "waiting": 5.0} if rank in (2, 5) else
                           {"forward": 10.1, "waiting": 17.0} for rank in range(8)})  # fmt: skip
    assert main_difference(SLOWER, before, after) == "A step takes 12 ms more, mostly: forward of ranks 2, 5 +12 ms."


def test_a_part_larger_than_the_whole_change_is_shown_beside_the_rest() -> None:
    before = parts(60.0, r0={"data": 1.0, "backward": 40.0}, r1={"data": 1.0, "backward": 40.0})
    after = parts(132.4, r0={"data": 1.0, "backward": 30.0}, r1={"data": 93.8, "backward": 20.0})
    said = main_difference(SLOWER, before, after)
    assert said == "A step takes 72.4 ms more: data of rank 1 +92.8 ms, all other parts together -20.4 ms."


def test_other_ranks_are_compared_by_their_mean() -> None:
    before = parts(40.0, r0={"forward": 30.0, "waiting": 10.0}, r1={"forward": 30.0, "waiting": 10.0})
    after = parts(52.0, **{f"r{rank}": {"forward": 30.0, "waiting": 22.0} for rank in range(4)})
    assert main_difference(SLOWER, before, after) == "A step takes 12 ms more, mostly: waiting +12 ms."


def test_nothing_is_said_without_a_change() -> None:
    no_change = Change(ratio=1.02, low=0.9, high=1.2, per_token=False, ms_before=40.0, ms_after=41.0)
    one = parts(40.0, r0={"forward": 30.0})
    assert main_difference(no_change, one, parts(52.0, r0={"forward": 42.0})) == ""
    assert main_difference(SLOWER, None, one) == ""
    assert main_difference(SLOWER, one, parts(39.0, r0={"forward": 29.0})) == ""
