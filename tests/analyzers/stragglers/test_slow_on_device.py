"""Slow ranks of simulated GPU runs: who waits for a slow link is not taken for slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.diagnose import diagnose
from benchmarks.simulator import Fault, Layout, Scenario, simulate, write
from store import Store


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (Fault(kind="slow_link", step=20, rank=2, factor=9.0), {(2,): "communication"}),
        (Fault(kind="slow_compute", step=20, rank=2, factor=1.5), {(2,): "compute"}),
    ],
    ids=["link", "rank"],
)
def test_the_rank_that_others_wait_for_is_named_and_no_other(
    fault: Fault, named: dict[tuple[int, ...], str], tmp_path: Path
) -> None:
    """Beside a slow link three ranks were said to compute 1.25x as long: of many waits one counts."""
    layout = Layout(dp_shard=4, tp=2)
    scenario = Scenario(seed=7, layout=layout, steps=60, on_devices=True, fault=fault)
    run = write(simulate(scenario), tmp_path / "run")
    with Store.open(run) as store:
        found = diagnose(store, run.manifest()).fired
    assert {one.ranks: one.cause for one in found if one.kind == "straggler"} == named
