"""Account and verdict of runs recorded on a real GPU whose steps have no stamps: what calls alone prove."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from analyzers.account.goodput import measure
from analyzers.account.step_account import coverage, step_accounts
from analyzers.diagnose import Diagnosis, diagnose
from analyzers.figures.ranks.rank_step import rank_step
from probes.tape.rundir import RunDir
from store import Store
from tests.support.recorded_gpu import copy_gpu_run


@pytest.fixture(scope="module", params=["none", "fsdp2_none", "fsdp2_gpu"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store.open(RunDir(copy_gpu_run(request.param, tmp_path_factory.mktemp("recorded")))) as opened:
        yield opened


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    """A kernel of 30 ms in each forward of rank 1, from the loop's step 40 on: the 41st."""
    run = RunDir(copy_gpu_run("fsdp2_gpu", tmp_path_factory.mktemp("recorded")))
    with Store.open(run) as opened:
        return diagnose(opened, run.manifest())


def test_calls_divide_the_steps(store: Store) -> None:
    """All of it was "not measured", of healthy runs as well."""
    accounts = step_accounts(store)
    assert [account.rank for account in accounts] == [0, 1]
    for account in accounts:
        known = sum(account.own_ns.values()) + account.waiting_ns + account.in_flight_ns
        assert known + account.not_measured_ns == account.duration_ns
        assert account.not_measured_ns == 0
        assert 0.1 < account.in_flight_ns / account.duration_ns < 0.8
        assert account.transfer_ns is None
        assert not account.has_phases
    found = coverage(store)
    assert found is not None
    assert found.not_measured_ratio + found.not_compared_ratio < 0.01


def test_time_in_an_unknown_phase_is_not_goodput(store: Store) -> None:
    account = measure(store)
    assert account is not None
    assert account.goodput_ratio is None
    assert account.to_json()["seconds"]["training"] is None
    for of_rank in account.by_rank.values():
        assert sum(of_rank.values()) == pytest.approx(account.wall_s)


def test_the_heatmap_shows_the_slow_rank(tmp_path: Path) -> None:
    """It was empty."""
    with Store.open(RunDir(copy_gpu_run("fsdp2_gpu", tmp_path))) as opened:
        own, waiting = rank_step(opened, "own work").values, rank_step(opened, "waiting").values
    before, after = slice(20, 38), slice(42, 48)
    assert np.median(own[1, after]) - np.median(own[0, after]) == pytest.approx(26, abs=1)
    assert abs(np.median(own[1, before]) - np.median(own[0, before])) < 1
    assert np.median(waiting[0, after]) == pytest.approx(26.7, abs=1)


def test_a_slow_device_has_rank_phase_side_and_onset(slow: Diagnosis) -> None:
    """It was found eight steps late, without a place: a host that runs ahead is slowed when its launch queue is full.
    Peers waited 26 ms of the kernel's 30: communication that was exposed before is hidden behind the rest."""
    (finding,) = [finding for finding in slow.findings if finding.kind == "straggler" and finding.status == "fired"]
    assert finding.ranks == (1,)
    assert finding.first_step is not None
    assert abs(finding.first_step - 41) <= 2
    assert finding.evidence["place"] == "forward"
    assert finding.evidence["late_side"] == "device"
    assert "at least +26 ms of compute per step in forward, on its device" in finding.summary
    assert finding.evidence["speedup_without_it_ratio"] == pytest.approx(75.0 / 49.7, abs=0.05)
    assert slow.what_if is not None
    assert slow.what_if.gain > 1.05
