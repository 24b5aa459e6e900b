"""Played devices end to end: the real recorder and plugin write what virtual GPUs did, and analyzers name the fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.finding import Finding
from analyzers.hangs.analyze import hangs
from analyzers.hangs.desync import desynced
from analyzers.scope import Scope
from analyzers.stragglers.analyze import stragglers
from benchmarks.gpu.__main__ import main as check_gpu
from probes.collectives.nccl_plugin.build import BuildError
from store import Store
from tests.depth import later
from tests.support.played.faults import draw
from tests.support.played.host_time import PlayedClock, build
from tests.support.played.programs import LAYOUTS, Job
from tests.support.played.recording import Played, play
from tests.support.played.traces import compare_traces

SMALL = Job(layers=2, microbatches=4)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("played")
    try:
        return folder, build(folder)
    except BuildError as error:
        if "no C compiler" in str(error):
            pytest.skip(str(error))
        raise


FREE = Job(layers=4, microbatches=4, lag=None)
"""Hosts that only a full launch queue stops: with so few kernels a step they are dozens of steps ahead."""

BY_HAND = Job(layers=2, reduces_by_hand=True, lag=0)
"""Calls that belong to no phase, and start on the device while their host is in one."""


def played(place: tuple[Path, Path], layout: str, kind: str = "", job: Job = SMALL) -> Played:
    folder, library = place
    fault = draw(kind, LAYOUTS[layout], seed=0) if kind else None
    clock = PlayedClock(folder)
    return play(layout, steps=40, seed=0, fault=fault, folder=folder, library=library, clock=clock, job=job)


def judged(run: Played) -> list[Finding]:
    with Store.open(run.run) as store:
        assert store.rows("SELECT count(*) FROM collectives WHERE wait_ns IS NOT NULL") == [(0,)]
        found = [*hangs(store, Scope()), *desynced(store, Scope()), *stragglers(store, Scope())]
    return [finding for finding in found if finding.status == "fired"]


@pytest.mark.parametrize(
    ("layout", "kind", "cause"), [("ddp", "device_stall", "device_stuck"), ("fsdp2", "slow_gpu", "compute")]
)
def test_a_fault_of_a_device_is_named(place: tuple[Path, Path], layout: str, kind: str, cause: str) -> None:
    run = played(place, layout, kind)
    assert run.fault is not None
    (finding,) = judged(run)
    assert (finding.cause, finding.ranks) == (cause, (run.fault.rank,))


@pytest.mark.parametrize(
    "layout", ["one_gpu", pytest.param("fsdp2", marks=later("test_a_fault_of_a_device_is_named")), "pp"]
)
def test_a_device_that_stands_still_is_named_however_far_its_host_is_ahead(
    place: tuple[Path, Path], layout: str
) -> None:
    run = played(place, layout, "device_stall", FREE)
    assert run.fault is not None
    hosts = [machine.step for machine in run.world.machines]
    assert max(hosts) > run.fault.step + 2
    (finding,) = judged(run)
    assert (finding.cause, finding.ranks, finding.first_step) == ("device_stuck", (run.fault.rank,), run.fault.step)


@pytest.mark.parametrize("layout", ["one_gpu", pytest.param("ddp", marks=later("test_a_fault_of_a_device_is_named"))])
def test_two_devices_that_stand_still_are_both_named(place: tuple[Path, Path], layout: str) -> None:
    run = played(place, layout, "two_device_stalls", FREE)
    assert run.fault is not None
    (finding,) = judged(run)
    assert (finding.cause, set(finding.ranks)) == ("device_stuck", {run.fault.rank, run.fault.peer})


@pytest.mark.parametrize(("layout", "job"), [("ddp", BY_HAND), ("fsdp2", FREE)])
def test_a_step_whose_calls_a_rank_leaves_out_is_out_of_sync(place: tuple[Path, Path], layout: str, job: Job) -> None:
    """The sizes match again in the next step: nothing hangs before the end, which one rank reaches too early."""
    run = played(place, layout, "skipped_step", job)
    assert run.fault is not None
    (finding,) = (found for found in judged(run) if found.kind == "desync")
    assert (finding.cause, finding.ranks, finding.first_step) == ("skipped", (run.fault.rank,), run.fault.step)
    left_out = 2 if layout == "ddp" else 12  # buckets; gathers of forward and backward, scatters
    assert finding.evidence["num_calls"] == left_out


def test_a_clean_run_has_no_finding_and_its_trace_says_what_was_exposed(place: tuple[Path, Path]) -> None:
    run = played(place, "ddp")
    assert judged(run) == []
    exposed_points, own_ratio = compare_traces(run, place[0] / "traces")
    assert exposed_points < 1.0
    assert own_ratio < 0.01


def test_the_checks_of_a_gpu_run_without_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "gpu.md"
    only = [word for text in ("versions", "peak of", "CUDA graph") for word in ("--only", text)]
    assert check_gpu(["--device", "played", *only, "--markdown", str(table)]) == 0
    assert "1 pass, 0 fail, 2 not here" in capsys.readouterr().out
    assert table.read_text().count("| not here |") == 2
