"""Whatever the tapes hold or have lost, the classes of a rank's time add up to its steps, and none is negative."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analyzers.account import goodput
from analyzers.account.step_account import StepAccount, coverage, step_accounts
from analyzers.account.time_classes import COMPUTE_PHASES, GAPS, PHASES
from tests.analyzers.memory_store import MemoryStore

MS = 1_000_000
LAYOUTS = {
    "ddp": {"dp_replicate": 2}, "fsdp": {"dp_shard": 2}, "tp": {"tp": 2}, "pp": {"pp": 2},
    "attached": {},
}  # fmt: skip
STORE = MemoryStore()
_places = (*PHASES, *GAPS)
_ns = st.one_of(st.none(), st.integers(0, 200 * MS), st.sampled_from([-1, 0, 1, 10**15]))


@st.composite
def _steps(draw: st.DrawFn) -> tuple[str, list[dict[str, Any]]]:
    """A layout and rows of `steps`: with or without phases, gaps and waits; any of them may be lost or wrong."""
    layout = draw(st.sampled_from(sorted(LAYOUTS)))
    lost = draw(st.sets(st.sampled_from([*_places, "gaps", "phases", "waits", "collective"])))
    rows = []
    for rank in draw(st.sampled_from([(0, 1), (0,), (1,)])):
        for step in draw(st.permutations(range(1, draw(st.integers(1, 4)) + 1))):  # records may lie in any order
            row: dict[str, Any] = {"attempt": 0, "rank": rank, "step": step, "start_ns": step * 1000 * MS,
                                   "duration_ns": draw(st.one_of(st.none(), st.integers(0, 500 * MS)))}  # fmt: skip
            for place in _places:
                if place in lost or ("gaps" in lost and place in GAPS) or ("phases" in lost and place in PHASES):
                    continue
                row[f"{place}_ns"] = draw(_ns)
                if "waits" not in lost and place not in ("checkpoint", "evaluate"):
                    row[f"{place}_wait_ns"] = draw(_ns)
            if "collective" not in lost:
                row["collective_wait_ns"] = draw(_ns)
            rows.append(row)
    return layout, rows


def _store(layout: str, rows: list[dict[str, Any]], calls: list[tuple[int, int]]) -> MemoryStore:
    store = STORE  # one for all examples: to make its tables takes longer than all else
    for table in ("steps", "ranks", "collectives", "spans"):
        store.connection.execute(f"DELETE FROM {table}")
    store.add("steps", rows)
    ranks = [{"attempt": 0, "rank": rank, "wall_ns": 1, "host": "a", "world_size": 2} for rank in (0, 1)]
    dimension = next(iter(LAYOUTS[layout]), None)
    store.add("ranks", [row | ({dimension: row["rank"]} if dimension else {}) for row in ranks])
    of_call = {"attempt": 0, "step": 1, "process_group": "world", "op": "all_reduce", "phase": "backward", "peer": None}
    for seq, (late_ns, took_ns) in enumerate(calls):
        for rank in (0, 1):
            wait = late_ns * rank + took_ns
            store.add("collectives", [of_call | {"rank": rank, "seq": seq, "issue_ns": 1, "end_ns": 1 + wait,
                                                 "wait_ns": wait}])  # fmt: skip
    if layout == "pp":
        for rank in (0, 1):
            for number, kind in enumerate(("forward", "backward")):
                store.add("spans", [{"attempt": 0, "rank": rank, "step": 1, "stage": rank, "microbatch": 0,
                                     "kind": kind, "start_ns": (number + rank) * 50 * MS,
                                     "end_ns": (number + rank) * 50 * MS + 20 * MS}])  # fmt: skip
    return store


@given(_steps(), st.lists(st.tuples(st.integers(-5, 50 * MS), st.integers(-5, 50 * MS)), max_size=2))
def test_classes_add_up_to_the_steps_whatever_was_lost(
    run: tuple[str, list[dict[str, Any]]], calls: list[tuple[int, int]]
) -> None:
    store = _store(*run, calls)
    finished = [row for row in run[1] if row["duration_ns"] is not None]
    accounts = step_accounts(store)
    assert {account.rank for account in accounts} == {row["rank"] for row in finished}
    for account in accounts:
        classes = [*account.own_ns.values(), account.waiting_ns, account.transfer_ns or 0, account.idle_ns or 0,
                   account.not_measured_ns]  # fmt: skip
        assert min(classes) >= 0
        assert sum(classes) == account.duration_ns
        own = [row for row in finished if row["rank"] == account.rank]
        assert account.duration_ns == sum(row["duration_ns"] for row in own)
        for place in _places:  # not measured is not in the account, and never 0
            assert (place in account.own_ns) == any(row.get(f"{place}_ns") is not None for row in own)
    found = goodput.measure(store)
    for rank, spent in found.by_rank.items() if found else ():
        assert min(spent.values()) >= 0
        assert sum(spent.values()) == pytest.approx(found.wall_s if found else 0, abs=1e-6)
        _same_shares(spent, next((of for of in accounts if of.rank == rank), None))
    covered = coverage(store)
    assert covered is None or 0 <= covered.not_measured_ratio <= 1


def _same_shares(spent: Mapping[str, float], account: StepAccount | None) -> None:
    """Goodput divides the steps as the account of the steps does."""
    own = account.own_ns if account else {}
    expected = {"training": sum(own.get(phase, 0) for phase in COMPUTE_PHASES),
                "gaps": sum(own.get(gap, 0) for gap in GAPS), "checkpoint": own.get("checkpoint", 0)}  # fmt: skip
    whole, shown = sum(expected.values()), sum(spent[name] for name in expected)
    for name in expected if whole and shown else ():  # steps that overlap are shortened alike
        assert spent[name] / shown == pytest.approx(expected[name] / whole, abs=1e-5)
