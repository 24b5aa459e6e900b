"""Slow ranks of simulated GPU runs: who waits for a slow link is not taken for slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.diagnose import diagnose
from analyzers.stragglers.comparison.arrivals import load_arrivals
from store import Store
from tests.analyzers.memory_store import MemoryStore
from tests.support.simulator import Fault, Layout, Scenario, simulate, write


@pytest.mark.parametrize(
    ("layout", "fault", "named"),
    [
        (Layout(dp_shard=4, tp=2), Fault(kind="slow_link", step=20, rank=2, factor=9.0), {(2,): "communication"}),
        (Layout(dp_shard=4, tp=2), Fault(kind="slow_compute", step=20, rank=2, factor=1.5), {(2,): "compute"}),
        (
            Layout(pp=4, dp_shard=2, layers=1, microbatches=8),
            Fault(kind="slow_compute", step=20, rank=4, factor=1.25),
            {(4,): "compute"},
        ),
        (
            Layout(dp_replicate=4, dp_shard=2, layers=4),
            Fault(kind="slow_backward", step=20, rank=3, factor=1.4),
            {(3,): "compute"},
        ),
    ],
    ids=["link", "rank", "rank of a pipeline", "rank with a partner"],
)
def test_the_rank_that_others_wait_for_is_named_and_no_other(
    layout: Layout, fault: Fault, named: dict[tuple[int, ...], str], tmp_path: Path
) -> None:
    """Beside a slow link three ranks were said to compute 1.25x as long: of many waits one counts. In a pipeline the
    schedule decides which stage is the last into a call of all ranks: that is nobody's fault. The partner of a slow
    rank's shard is late with it in its other group."""
    scenario = Scenario(seed=7, layout=layout, steps=60, on_devices=True, fault=fault)
    run = write(simulate(scenario), tmp_path / "run")
    with Store.open(run) as store:
        found = diagnose(store, run.manifest()).fired
    assert {one.ranks: one.cause for one in found if one.kind == "straggler"} == named


def test_who_is_last_into_a_call_of_all_stages_is_left_to_the_schedule() -> None:
    """Ranks 0 and 1 are the first stage of two pipelines, 2 and 3 the second; rank 3 is late, stage 0 always last."""
    took_ms = {"dp:0-1": {0: 5, 1: 5}, "dp:2-3": {2: 9, 3: 5}, "world:0-3": {0: 1, 1: 1, 2: 90, 3: 90}}
    store = MemoryStore()
    for rank, peer in ((0, 2), (1, 3)):
        store.add("collectives", [{"attempt": 0, "step": 1, "rank": rank, "peer": peer, "op": "send", "seq": 0,
                                   "process_group": "pp:0", "issue_ns": 0, "end_ns": 1}])  # fmt: skip
    for group, times in took_ms.items():
        store.add("collectives", [{"attempt": 0, "step": 1, "rank": rank, "op": "all_reduce", "seq": 0,
                                   "process_group": group, "issue_ns": 0, "end_ns": took * 10**6}
                                  for rank, took in times.items()])  # fmt: skip
    assert load_arrivals(store, 0, 3, 1, 1).caused_wait_ratio == pytest.approx(4 / 182)
    assert load_arrivals(store, 0, 3, 1, 1, within_stages=True).caused_wait_ratio == 1.0


def test_a_slow_rank_whose_waits_are_unknown_is_one_finding(tmp_path: Path) -> None:
    """Of a GPU without stamps only whole steps are compared, which are longer on all ranks."""
    fault = Fault(kind="slow_compute", step=111, rank=3, factor=1.66)
    scenario = Scenario(seed=1, layout=Layout(dp_replicate=4), steps=240, on_devices=True, fault=fault)
    run = write(simulate(scenario), tmp_path / "run")
    with Store.open(run) as store:
        found = diagnose(store, run.manifest()).fired
    assert [(one.kind, one.ranks, one.first_step) for one in found] == [("straggler", (3,), 111)]
