"""Runs in which a slow rank has no records: its peers' waits for it are nobody's transfer and no slow link."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from analyzers.account.goodput import measure
from analyzers.communication.transfers import group_transfers
from analyzers.diagnose import diagnose
from analyzers.report.wording.account_lines import what_if_line
from probes.tape.rundir import RunDir
from store import Store
from tests.analyzers.memory_store import MemoryStore
from tests.support.simulator import Fault, Layout, Scenario, simulate, write

MS = 10**6


def test_waits_for_a_rank_of_this_node_are_neither_transfers_nor_a_slow_link(tmp_path: Path) -> None:
    """Its group's calls took 165 times as long as those of the other group: that was its lateness."""
    scenario = Scenario(
        seed=416, layout=Layout(dp_shard=4, tp=2), steps=45, on_devices=True, stamped=True, missing_ranks=(6,),
        fault=Fault(kind="slow_compute", rank=6, step=15, factor=1.45),
    )  # fmt: skip
    run: RunDir = write(simulate(scenario), tmp_path / "run")
    with Store.open(run) as store:
        diagnosis = diagnose(store, run.manifest())
        account = measure(store)
    assert not diagnosis.fired
    (cost,) = (one for one in diagnosis.findings if one.kind == "exposed_communication")
    assert cost.status == "insufficient_data"
    assert "there are no records of rank 6" in cost.summary
    assert account is not None
    assert account.to_json()["waits_split_by"] is None
    assert "straggler" not in account.known_seconds
    assert diagnosis.what_if is not None
    assert not diagnosis.what_if.is_beyond_error
    line = what_if_line(diagnosis.what_if)
    assert line == (
        "The time with balanced ranks is not predicted: there are no records of rank 6, which may set the pace."
    )


def test_a_call_that_a_member_did_not_record_has_no_transfer() -> None:
    store = MemoryStore()
    for rank in range(3):
        store.add("process_groups", [{"attempt": 0, "rank": rank, "process_group": "dp:0-2", "members": [0, 1, 2]}])
    _call(store, 1, (0, 1, 2), took_ms=4)
    _call(store, 2, (0, 1), took_ms=90)
    (windows,) = group_transfers(store, 0, window_steps=1).values()
    assert {part: window.transfer_ms for part, window in windows["dp:0-2"].items()} == {1: 4.0}


def _call(store: MemoryStore, step: int, ranks: Sequence[int], *, took_ms: int) -> None:
    at = step * 100 * MS
    row = {"attempt": 0, "step": step, "seq": step, "op": "all_reduce", "process_group": "dp:0-2", "bytes": 4096,
           "issue_ns": at, "end_ns": at + took_ms * MS, "wait_ns": took_ms * MS}  # fmt: skip
    store.add("collectives", [row | {"rank": rank} for rank in ranks])
