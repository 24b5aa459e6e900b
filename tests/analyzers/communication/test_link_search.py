"""A slow link where one group does all communication: its own past is what it is compared with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from analyzers.communication.link_search import find_rise
from analyzers.scope import Scope
from analyzers.stragglers.analyze import stragglers
from store import Store
from tests.analyzers.memory_store import MemoryStore
from tests.analyzers.rank_timings import simulate
from tests.analyzers.stragglers.test_straggler import judged, stored
from tests.support.simulator import Fault, Layout, Scenario, write
from tests.support.simulator import simulate as simulated


def transfers(seed: int, windows: int, *, slow_from: int | None = None, factor: float = 4.0, noise: float = 0.1):  # type: ignore[no-untyped-def]
    values = 3.0 * np.exp(noise * np.random.default_rng(seed).standard_normal(windows))
    if slow_from is not None:
        values[slow_from:] *= factor
    return values


def test_a_slow_link_is_found_with_its_onset_and_factor() -> None:
    soon = 0
    for seed in range(30):
        found = find_rise(transfers(seed, 20, slow_from=8))
        assert found is not None
        assert found.begin == 8
        assert found.factor == pytest.approx(4, rel=0.3)
        assert find_rise(transfers(seed, 6, slow_from=4)) is None, "a burst of a machine lasts as long"
        soon += find_rise(transfers(seed, 7, slow_from=4)) is not None  # fifteen steps after the onset
    assert soon >= 28


def test_noise_small_rises_and_past_rises_are_not_found() -> None:
    for seed in range(200):
        assert find_rise(transfers(seed, 30, noise=0.3)) is None
        assert find_rise(transfers(seed, 20, slow_from=8, factor=1.4)) is None
        over = transfers(seed, 20)
        over[6:12] *= 5
        assert find_rise(over) is None


def one_group(*, slow: bool, core_wait: bool = False) -> MemoryStore:
    store = stored(simulate(1, ranks=4, steps=140))
    group = {"attempt": 0, "process_group": "dp:0-3", "members": (0, 1, 2, 3)}
    store.add("process_groups", [group | {"rank": rank} for rank in range(4)])
    store.connection.execute("UPDATE steps SET run_delay_ns = 1000000")
    if slow:
        store.connection.execute("UPDATE collectives SET end_ns = end_ns + 20000000 WHERE step >= 30")
    if core_wait:
        store.connection.execute("UPDATE steps SET run_delay_ns = 25000000 WHERE step >= 30")
    return store


def test_a_slow_link_in_the_only_group() -> None:
    (finding,) = judged(one_group(slow=True))
    assert (finding.cause, finding.ranks) == ("communication", (0, 1, 2, 3))
    assert abs((finding.first_step or 0) - 30) <= 5
    assert finding.evidence["transfer_before_ms"] < 6
    assert finding.evidence["excess_ms"] == pytest.approx(20, rel=0.2)
    assert "as before" in finding.summary
    assert judged(one_group(slow=False)) == []


def test_a_link_is_not_slower_than_before_where_its_ranks_wait_for_cores_all_the_time() -> None:
    """No more than before, but as long as they compute: transfers of one machine vary by more then."""
    store = one_group(slow=True)
    store.connection.execute("UPDATE steps SET cpu_ns = 10000000, run_delay_ns = 8000000")
    assert judged(store) == []
    store.connection.execute("UPDATE steps SET run_delay_ns = 1000000")
    assert len(judged(store)) == 1


@pytest.mark.parametrize(("step_ms", "slower_ms", "is_found"), [(33, 20, False), (90, 50, False), (500, 100, True)])
def test_a_burst_at_the_end_of_a_short_run_is_not_a_slow_link(step_ms: int, slower_ms: int, is_found: bool) -> None:
    """A clean run of 90 steps in three seconds, whose last third of a second another job used the cores."""
    store = one_group(slow=False)
    for table in ("steps", "collectives"):
        store.connection.execute(f"DELETE FROM {table} WHERE step > 90")
    store.connection.execute(f"UPDATE steps SET duration_ns = {step_ms} * 1000000")
    store.connection.execute(f"UPDATE collectives SET end_ns = end_ns + {slower_ms} * 1000000 WHERE step >= 80")
    assert [(finding.ranks, finding.cause) for finding in judged(store)] == [((0, 1, 2, 3), "communication")] * is_found


def test_a_machine_without_free_cores_is_not_a_slow_link() -> None:
    assert judged(one_group(slow=True, core_wait=True)) == []


def test_groups_of_two_dimensions_are_not_said_to_make_the_same_call(tmp_path: Path) -> None:
    """'all_gather in dp_shard:0-3 and dp_replicate:3,7': replicas only reduce."""
    scenario = Scenario(
        seed=1, layout=Layout(dp_replicate=2, dp_shard=4), steps=40, backend="gloo",
        fault=Fault(kind="slow_link", rank=3, factor=8.0),
    )  # fmt: skip
    with Store.open(write(simulated(scenario), tmp_path / "run")) as store:
        (finding,) = (one for one in stragglers(store, Scope()) if one.status == "fired")
    assert finding.ranks == (3,)
    assert "a call in " in finding.summary
    assert "dp_shard:0-3" in finding.summary
    assert "dp_replicate:3,7" in finding.summary
