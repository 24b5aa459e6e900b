"""Runs recorded on an H200 with stamps of the compute stream (`benchmarks.gpu.record`): account and verdict on each.

The recorder counts steps from 1, the recorded loop from 0: what it did in its step 40 is in step 41 here.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from analyzers.account.device.stalls import stall_parts
from analyzers.account.step_account import coverage, step_accounts
from analyzers.finding import Finding
from analyzers.report.wording.explained import next_step
from probes.tape.rundir import RunDir
from store import Store
from tests.analyzers.test_recorded_gpu_runs import diagnosis_of, only
from tests.depth import later
from tests.support.ended_gpu import tapes
from tests.support.recorded_gpu import copy_gpu_run
from tests.support.recorded_stamps import traced_exposed_ns
from watch.verdicts.diagnosed_run import diagnosed_run

WET_POINTS = {"stamped_none": 3.0, "stamped_fsdp2_none": 6.0}
"""Of the step: the difference to Kineto's trace of the same step where the device did not wait for its host."""
DRY_POINTS = 10.0
"""The same in steps that ran dry, besides what was in flight while the device waited for its host."""
DRY_NS = 500_000


@pytest.mark.parametrize("name", WET_POINTS)
def test_exposed_communication_is_that_of_the_trace(name: str, tmp_path: Path) -> None:
    """`pytest -s` prints the differences."""
    with Store.open(RunDir.open(copy_gpu_run(name, tmp_path))) as store:
        durations = {(rank, step): ns for rank, step, ns in store.rows("SELECT rank, step, duration_ns FROM steps")}
        parts = {(part.rank, part.step): part for part in stall_parts(store, 0)}
        wet, dry = [], []
        for rank in (0, 1):
            for step, traced_ns in traced_exposed_ns(name, rank).items():
                part = parts.get((rank, step))
                if part is None:  # not stamped
                    continue
                ratio = 100 / durations[rank, step]
                over = (traced_ns - part.exposed_ns) * ratio
                if part.host_ns < DRY_NS:
                    wet.append(over)
                    assert -1 < over <= WET_POINTS[name], (part, traced_ns)
                else:  # what was in flight meanwhile may have been exposed
                    dry.append(over)
                    assert -1 < over <= DRY_POINTS + part.host_in_flight_ns * ratio, (part, traced_ns)
        for kind, overs in (("busy", wet), ("waiting for their hosts", dry)):
            if overs:
                print(f"{name}: {len(overs)} steps {kind}, {min(overs):+.2f} to {max(overs):+.2f} points of the trace")
        assert len(wet) >= 2


@pytest.mark.parametrize("name", WET_POINTS)
def test_a_healthy_run_is_measured_whole_and_silent(name: str, tmp_path: Path) -> None:
    diagnosis = diagnosis_of(name, tmp_path)
    assert not diagnosis.fired
    with Store.open(RunDir.open(tmp_path / name)) as store:
        found = coverage(store)
        assert found is not None
        assert found.not_measured_ratio + found.not_compared_ratio < 1e-6
        for account in step_accounts(store):
            known = sum(account.own_ns.values()) + account.waiting_ns + account.in_flight_ns + account.host_late_ns
            assert known + (account.transfer_ns or 0) + account.not_measured_ns == account.duration_ns


def test_a_kernel_of_30_ms_in_each_forward_is_found_there_from_its_first_step_on(tmp_path: Path) -> None:
    """Every fourth step was stamped: the calls of the others date it."""
    finding = only("stamped_slow_forward", tmp_path)
    assert (finding.kind, finding.cause, finding.ranks, finding.first_step) == ("straggler", "compute", (1,), 41)
    assert finding.evidence["excess_ms"] == pytest.approx(30, abs=2)
    assert "in forward, on its device" in finding.summary
    assert finding.evidence["run_s"] > 50 * finding.evidence["step_ms"] / 1e3, "steps that were not stamped count, too"


def test_a_host_that_sleeps_between_forward_and_backward(tmp_path: Path) -> None:
    """It sleeps for 30 ms, of which its lead of two to three steps and the work of its device hide two thirds."""
    finding = only("stamped_slow_between", tmp_path)
    assert (finding.kind, finding.ranks) == ("straggler", (1,))
    assert "between forward and backward, on its host" in finding.summary
    assert 41 <= (finding.first_step or 0) <= 48


def test_a_host_that_sleeps_before_the_batch_costs_what_the_steps_grew(tmp_path: Path) -> None:
    finding = only("stamped_slow_data", tmp_path)
    assert (finding.kind, finding.ranks, finding.evidence["late_side"]) == ("straggler", (1,), "host")
    assert finding.evidence["excess_ms"] == pytest.approx(44.4 - 38.2, abs=0.5)
    assert 41 <= (finding.first_step or 0) <= 44


def test_a_host_that_sleeps_without_cost_is_not_accused(tmp_path: Path) -> None:
    """Its lead and communication hide the sleep: steps take as long as before."""
    assert not diagnosis_of("stamped_hidden_between", tmp_path).fired


def test_the_trainers_slow_rank(tmp_path: Path) -> None:
    finding = only("train_slow", tmp_path)
    assert (finding.kind, finding.ranks, finding.first_step) == ("straggler", (0,), 61)
    assert "on its device" in finding.summary


def test_the_trainers_nan_in_one_weight_names_its_rank(tmp_path: Path) -> None:
    (nan,) = (one for one in diagnosis_of("train_ddp_faults", tmp_path).fired if one.kind == "non_finite")
    assert (nan.ranks, nan.first_step) == ((1,), 40)


def test_a_rank_whose_device_waits_for_its_host_costs_no_more_than_its_steps_grew(tmp_path: Path) -> None:
    fired = diagnosis_of("train_fsdp2_host_late", tmp_path).fired
    (nan,) = (one for one in fired if one.kind == "non_finite")
    assert (nan.ranks, nan.first_step) == ((1,), 40), "of the trainer's NaN in one weight"
    (slow,) = (one for one in fired if one.kind == "straggler")
    assert (slow.ranks, slow.evidence["late_side"]) == ((0,), "host")
    with Store.open(RunDir.open(tmp_path / "train_fsdp2_host_late")) as store:
        ((before_ms, since_ms),) = store.rows(
            "SELECT median(duration_ns) FILTER (step BETWEEN 6 AND ?) / 1e6, "
            "median(duration_ns) FILTER (step BETWEEN ? AND ?) / 1e6 FROM steps WHERE stamped_steps > 0",
            [slow.first_step - 1, slow.first_step, slow.last_step],
        )
    grown_ms = since_ms - before_ms
    assert slow.evidence["excess_ms"] == pytest.approx(grown_ms, abs=1.0)
    assert slow.evidence["step_ms"] - slow.evidence["step_without_it_ms"] == pytest.approx(grown_ms, abs=1.0)


def test_the_step_that_ends_when_a_hung_run_is_interrupted_is_part_of_that_hang(tmp_path: Path) -> None:
    """On its device it began three steps after its host began it: its start plus its duration is before the report."""
    diagnosis = diagnosis_of("stamped_interrupted", tmp_path)
    (finding,) = diagnosis.fired
    assert (finding.kind, finding.cause, finding.ranks, finding.first_step) == ("hang", "not_entered", (1,), 26)
    assert (finding.evidence["silent_s"], finding.evidence["limit_s"]) == (5.6, 5.0)
    (exposed,) = (one for one in diagnosis.findings if one.kind == "exposed_communication")
    assert exposed.last_step == 24, "5.7 s of sleep are no step to which communication is compared"


def test_two_devices_that_stand_still_in_a_group_of_four(tmp_path: Path) -> None:
    finding = only("two_stuck", tmp_path)
    assert (finding.kind, finding.cause, finding.ranks, finding.first_step) == ("hang", "device_stuck", (1, 2), 26)
    assert finding.evidence["waiting_ranks"] == [0, 3]


def test_a_nan_gradient_under_ddp_names_its_rank(tmp_path: Path) -> None:
    finding = only("nan_gradient", tmp_path)
    assert (finding.kind, finding.cause, finding.ranks, finding.first_step) == ("non_finite", "backward", (1,), 26)


@pytest.mark.parametrize(
    ("rank", "step", "last_step"),
    [(1, 26, 90), pytest.param(0, 77, 90, marks=later("the same rank by rank: beside it")), (1, 40, 40)],
)
def test_a_nan_gradient_under_fsdp2_names_its_rank(rank: int, step: int, last_step: int, tmp_path: Path) -> None:
    """In a run without a fault, the values that a NaN in one rank's backward pass would leave."""
    run = RunDir(copy_gpu_run("stamped_fsdp2_none", tmp_path))
    for one in range(2):
        for table, column in (("scalars", "value"), ("steps", "grad_norm"), ("steps", "loss")):
            for _, rows in tapes(run.rank_dir(0, one), table):
                is_early = column == "loss" or (column == "value" and one != rank)
                first = step + 1 if is_early else step
                rows[column][(rows["step"] >= first) & (rows["step"] <= last_step)] = np.nan
                rows.flush()
    with diagnosed_run(run, is_over=True) as (_, diagnosis):
        (found,) = diagnosis.fired
    assert (found.kind, found.cause, found.ranks) == ("non_finite", "backward", (rank,))
    assert (found.first_step, found.last_step) == (step, last_step)


def test_all_calls_of_a_step_left_out(tmp_path: Path) -> None:
    """One call a parameter, and the model has 77."""
    finding = only("stamped_skip", tmp_path)
    assert (finding.kind, finding.cause, finding.ranks, finding.first_step) == ("desync", "skipped", (1,), 26)
    assert finding.evidence["num_calls"] == 77


def test_a_killed_process_was_not_in_a_call_of_its_device(tmp_path: Path) -> None:
    """Its host had enqueued the call and gone on."""
    finding = only("stamped_kill", tmp_path)
    assert (finding.kind, finding.cause, finding.ranks, finding.first_step) == ("rank_lost", "signal", (1,), 25)
    assert "in user code" in finding.summary


def lost(name: str, into: Path) -> Finding:
    (finding,) = (found for found in diagnosis_of(name, into).fired if found.kind == "rank_lost")
    return finding


def test_an_abort_after_a_fault_in_a_kernel_asks_for_the_kernels_error(tmp_path: Path) -> None:
    """The watchdog of NCCL aborted the process, so nothing of ours has the text of the assertion."""
    finding = lost("stamped_assertion", tmp_path)
    assert (finding.ranks, finding.evidence["signal"], finding.evidence["xids"]) == ((1,), "SIGABRT", [43])
    assert finding.first_step == 26  # its host was at 28
    assert "Assertion" in next_step(finding)
    assert "CUDA_LAUNCH_BLOCKING=1" in next_step(finding)
