"""The classes of a step's time add up to the step, in every kind of run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from analyzers.account.step_account import coverage, step_accounts
from analyzers.account.timings import GAPS
from store import Store
from tests.factories import make_run

KINDS: dict[str, Mapping[str, Any]] = {
    "plain": {},
    "gaps": {"gaps_ms": dict.fromkeys(GAPS, 3.0)},
    "slow_in_a_gap": {"gaps_ms": {"after_optimizer": 4.0}, "slow": {1: 6.0}, "phase": "after_optimizer"},
    "slow_in_forward": {"slow": {2: 1.7}, "phase": "forward"},
    "waits_in_every_phase": {"collective_phases": ("data", "forward", "backward", "optimizer")},
    "without_collectives": {"collective_phases": ()},
    "killed": {"kill": {1: 15}},
    "refused_step": {"nan": {0: 12}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_classes_add_up_to_the_steps(kind: str, tmp_path: Path) -> None:
    with Store.open(make_run(tmp_path, steps=20, **KINDS[kind])) as store:
        accounts = step_accounts(store)
        measured = coverage(store)
    assert len(accounts) == 4
    for account in accounts:
        assert min(account.own_ns.values()) >= 0
        assert account.waiting_ns >= 0
        assert account.not_measured_ns == 0
    assert measured is not None
    assert measured.not_measured_ratio == measured.not_compared_ratio == 0


def test_time_that_no_column_accounts_for_is_not_measured(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=20, gaps_ms={"forward_to_backward": 25.0})
    without_gaps = ", ".join(f"CAST(NULL AS BIGINT) AS {gap}{end}" for gap in GAPS for end in ("_ns", "_wait_ns"))
    with Store.open(run) as store, store.session(steps=f"SELECT * REPLACE ({without_gaps}) FROM steps") as lost:
        measured = coverage(lost)
        (first, *_) = step_accounts(lost)
    assert not set(GAPS) & set(first.own_ns)
    assert measured is not None
    assert measured.not_measured_ratio == pytest.approx(25 / 77, abs=0.02)


def test_gaps_on_a_gpu_are_not_compared(tmp_path: Path) -> None:
    devices = {rank: {"device": f"cuda:{rank}"} for rank in range(4)}
    run = make_run(tmp_path, steps=20, gaps_ms={"after_optimizer": 25.0}, identities=devices)
    with Store.open(run) as store:
        measured = coverage(store)
    assert measured is not None
    assert measured.not_measured_ratio == 0
    assert measured.not_compared_ratio == pytest.approx(25 / 77, abs=0.02)
