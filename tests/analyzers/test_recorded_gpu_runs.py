"""Runs that a real GPU recorded, and the verdict on each: kind, ranks, cause, step and numbers.

The recorder counts steps from 1, the recorded loop from 0: what it did in its step 25 is in step 26 here.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from analyzers.diagnose import Diagnosis, conclude
from analyzers.evidence.diagnose_files import diagnose_files
from analyzers.evidence.joining import join_recorded
from analyzers.finding import Finding
from analyzers.report.wording.explained import next_step
from probes.tape.rundir import RunDir
from tests.support.recorded_gpu import copy_gpu_run, gpu_recording
from tests.support.simulator.recorder_dumps import Job
from watch.verdicts.diagnosed_run import diagnosed_run

HEALTHY = ("none", "fsdp2_none", "healthy_time_sliced")


def diagnosis_of(name: str, into: Path) -> Diagnosis:
    """Of a copy of the recording, which stays in `into`."""
    with diagnosed_run(RunDir.open(copy_gpu_run(name, into)), is_over=True) as (_, diagnosis):
        return diagnosis


@cache
def diagnosis_once(name: str) -> Diagnosis:
    """For recordings that several tests look at."""
    with TemporaryDirectory() as folder:
        return diagnosis_of(name, Path(folder))


def only(name: str, into: Path) -> Finding:
    (finding,) = diagnosis_of(name, into).fired
    return finding


def test_a_device_that_stands_still_is_named_though_its_host_is_three_steps_ahead(tmp_path: Path) -> None:
    finding = only("stuck", tmp_path)
    assert (finding.kind, finding.cause, finding.ranks, finding.first_step) == ("hang", "device_stuck", (1,), 26)
    assert (finding.evidence["op"], finding.evidence["seq"]) == ("all_reduce", 102)
    assert finding.evidence["waiting_ranks"] == [0]
    assert "it never started all_reduce #102 (group world:0-1), although its host is at step 28" in finding.summary


def test_a_host_that_sleeps_is_no_stuck_device() -> None:
    (finding,) = diagnosis_once("hang").fired
    assert (finding.kind, finding.cause, finding.ranks, finding.first_step) == ("hang", "not_entered", (1,), 26)
    assert "gpu_loop.py:62" in finding.summary


def test_a_step_whose_calls_a_rank_left_out_is_out_of_sync(tmp_path: Path) -> None:
    """The plugin recorded 75 calls in every step."""
    finding = only("skip", tmp_path)
    assert (finding.kind, finding.cause, finding.ranks, finding.first_step) == ("desync", "skipped", (1,), 26)
    assert (finding.evidence["num_calls"], finding.evidence["seq"]) == (75, 1875)
    assert (finding.evidence["steps_before"], finding.evidence["steps_since"]) == (24, 18)


def test_an_assertion_in_a_kernel_is_one_finding_and_blames_no_device() -> None:
    diagnosis = diagnosis_once("illegal")
    (finding,) = diagnosis.fired
    assert (finding.kind, finding.cause, finding.ranks, finding.first_step) == ("rank_lost", "exception", (1,), 25)
    assert "device-side assert triggered (gpu_loop.py:66 in <module>)" in finding.summary
    assert finding.evidence["xids"] == [43]
    assert not [found for found in diagnosis.findings if found.kind == "xid"]


def test_the_log_adds_the_text_of_the_assertion_to_the_same_finding() -> None:
    of_run = diagnosis_once("illegal")
    of_log = diagnose_files([gpu_recording("illegal") / "log"])
    (finding,) = conclude(join_recorded(of_run.findings, of_log.findings), of_run.run).fired
    assert (finding.kind, finding.ranks, finding.first_step) == ("rank_lost", (1,), 25)
    assert finding.evidence["assertion"].startswith("-sizes[i] <= index && index < sizes[i]")
    assert finding.evidence["kernel"].endswith("IndexKernel.cu:111")


def test_dumps_of_a_hang_that_the_run_recorded_are_evidence_of_it(tmp_path: Path) -> None:
    of_run = diagnosis_once("hang")
    job = Job(2)
    job.steps(3)
    job.collective("all_reduce", ranks=[0])
    of_dumps = diagnose_files([job.write(tmp_path / "dumps")])
    (finding,) = conclude(join_recorded(of_run.findings, of_dumps.findings), of_run.run).fired
    assert (finding.kind, finding.ranks, finding.first_step) == ("hang", (1,), 26)
    assert finding.summary == of_run.fired[0].summary
    assert finding.evidence["dumps"] == of_dumps.fired[0].summary


def test_memory_that_ran_out_is_reported_as_the_allocator_counted_it(tmp_path: Path) -> None:
    diagnosis = diagnosis_of("oom", tmp_path)
    (finding,) = diagnosis.fired
    assert (finding.kind, finding.cause, finding.ranks, finding.first_step) == ("rank_lost", "out_of_memory", (1,), 25)
    of = finding.evidence
    gib = {name: round(of[f"{name}_bytes"] / (1 << 30), 2) for name in ("requested", "allocated", "own", "others")}
    assert gib == {"requested": 16.0, "allocated": 128.43, "own": 129.62, "others": 6.83}
    assert of["holders"][0] == "process 3762 (rank 0): 1.93 GiB"
    assert "expandable_segments" not in next_step(finding)
    (xid,) = (found for found in diagnosis.findings if found.kind == "xid")
    assert (xid.status, xid.ranks) == ("advice", ()), "another job's assertion on the same device"


def test_a_kill_names_the_killed_rank(tmp_path: Path) -> None:
    finding = only("kill", tmp_path)
    assert (finding.kind, finding.cause, finding.ranks) == ("rank_lost", "signal", (1,))
    assert finding.evidence["signal"] == "SIGKILL"


def test_a_nan_loss_names_its_rank(tmp_path: Path) -> None:
    finding = only("nan", tmp_path)
    assert (finding.kind, finding.cause, finding.ranks, finding.first_step) == ("non_finite", "forward", (1,), 26)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_finding(name: str, tmp_path: Path) -> None:
    diagnosis = diagnosis_of(name, tmp_path)
    assert diagnosis.fired == ()
    assert [found.kind for found in diagnosis.findings if found.status == "suspect"] == []


def test_a_plan_is_not_compared_with_what_it_does_not_model(tmp_path: Path) -> None:
    """A model of 0.8 M parameters: its step is bound by launches, and its memory is that of libraries."""
    diagnosis = diagnosis_of("train", tmp_path)
    assert [found for found in diagnosis.findings if found.cause == "plan"] == []
    (bad,) = (found for found in diagnosis.findings if found.kind == "non_finite")
    assert (bad.status, bad.cause, bad.first_step) == ("suspect", "backward", 40), "inputs were not looked at then"
