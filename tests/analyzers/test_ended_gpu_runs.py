"""Runs recorded on an H200, replayed with a rank that stops (tests/support/ended_gpu.py): the verdict on each.

A host runs two steps ahead of its device, so what a host does last says nothing of where its device stands.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.finding import Finding
from probes.tape.rundir import RunDir
from tests.depth import later
from tests.support.ended_gpu import Ended, ended_run, restarted_run, shift_calls
from tests.support.replayed_gpu import Delay, Stop
from watch.verdicts.diagnosed_run import diagnosed_run

DDP, FSDP2 = "stamped_none", "stamped_fsdp2_none"
OTHERWISE = later("the same end in another layout or place: the cases beside it")


def fired(run: RunDir) -> tuple[Finding, ...]:
    with diagnosed_run(run, is_over=True) as (_, diagnosis):
        return diagnosis.fired


@pytest.mark.parametrize(
    ("name", "stops", "ranks", "seq", "is_stamped"),
    [
        (DDP, [Stop(rank=0, step=31)], (0,), 122, True),
        pytest.param(FSDP2, [Stop(rank=1, step=31, call=9)], (1,), 639, True, marks=OTHERWISE),
        (FSDP2, [Stop(rank=0, step=12)], (0,), 231, False),
        (FSDP2, [Stop(rank=0, step=31, call=1), Stop(rank=1, step=31, call=1)], (0, 1), 631, True),
    ],
)
def test_a_device_that_stops(
    name: str, stops: list[Stop], ranks: tuple[int, ...], seq: int, is_stamped: bool, tmp_path: Path
) -> None:
    (found,) = fired(ended_run(name, tmp_path, *stops, is_stamped=is_stamped))
    assert (found.kind, found.cause, found.ranks, found.first_step) == ("hang", "device_stuck", ranks, stops[0].step)
    assert found.evidence["seq"] == seq


def test_a_stuck_device_and_the_stuck_host_of_its_peer_are_both_named(tmp_path: Path) -> None:
    stops = Stop(rank=1, step=31), Stop(rank=0, step=31, on="host", where="forward")
    (found,) = fired(ended_run(FSDP2, tmp_path, *stops))
    assert (found.kind, found.cause, found.ranks, found.first_step) == ("hang", "device_stuck", (0, 1), 31)
    assert "The device of rank 1 is stuck" in found.summary
    assert "Rank 0 did not reach it either: stuck in forward." in found.summary


def test_a_call_that_all_devices_are_in_accuses_no_single_device(tmp_path: Path) -> None:
    (found,) = fired(ended_run(FSDP2, tmp_path, Stop(step=31, call=2, on="call")))
    assert (found.kind, found.cause, found.first_step, found.evidence["seq"]) == ("hang", "all_entered", 31, 632)


@pytest.mark.parametrize(
    ("name", "where", "step", "seq", "place"),
    [
        (DDP, "forward", 31, 122, "stuck in forward"),
        pytest.param(DDP, "clip", 31, 126, "at step 32: stuck in user code after backward of step 31", marks=OTHERWISE),
        pytest.param(DDP, "optimizer", 31, 126, "at step 32: stuck in optimizer of step 31", marks=OTHERWISE),
        (DDP, "after", 32, 126, "stuck in user code after optimizer"),  # or in the next step's batch
        pytest.param(FSDP2, "backward", 31, 637, "stuck in backward", marks=OTHERWISE),
        (FSDP2, "optimizer", 31, 651, "at step 32: stuck in optimizer of step 31"),
    ],
)
def test_a_host_that_stops_is_told_with_the_step_in_which_it_stands(
    name: str, where: str, step: int, seq: int, place: str, tmp_path: Path
) -> None:
    (found,) = fired(ended_run(name, tmp_path, Stop(step=31, on="host", where=where)))
    assert (found.kind, found.cause, found.ranks, found.first_step) == ("hang", "not_entered", (1,), step)
    assert found.evidence["seq"] == seq
    assert place in found.summary


@pytest.mark.parametrize(
    ("name", "rank", "call", "seq", "by", "cause"),
    [
        (DDP, 0, 1, 123, 1, "skipped"),
        (DDP, 1, 3, 124, -1, "mismatch_size"),
        # Its first all-gathers are equal: the order of calls goes on.
        (FSDP2, 0, 8, 631, 1, "mismatch_operation"),
        pytest.param(FSDP2, 1, 8, 631, 1, "mismatch_operation", marks=OTHERWISE),
        pytest.param(FSDP2, 0, 9, 632, -1, "mismatch_operation", marks=OTHERWISE),
    ],
)
def test_a_call_too_few_or_too_many_accuses_the_rank_that_was_out_of_sync(
    name: str, rank: int, call: int, seq: int, by: int, cause: str, tmp_path: Path
) -> None:
    run = ended_run(name, tmp_path, Stop(step=31, call=call, on="call"))
    shift_calls(run, rank, seq, by)
    hang, desync = sorted(fired(run), key=lambda found: found.kind, reverse=True)
    assert (hang.kind, hang.cause, hang.ranks, hang.first_step) == ("hang", cause, (rank,), 31)
    assert (desync.kind, desync.ranks, desync.first_step) == ("desync", (rank,), 31)
    assert desync.cause == ("skipped" if by > 0 else "extra")


@pytest.mark.parametrize(
    ("name", "end", "where", "cause"),
    [
        (DDP, Ended(rank=0, signal="SIGKILL"), "backward", "signal"),
        pytest.param(FSDP2, Ended(code=3), "data", "exit", marks=OTHERWISE),
        (FSDP2, Ended(rank=0, error="ValueError"), "optimizer", "exception"),
    ],
)
def test_a_rank_that_ends_is_named(name: str, end: Ended, where: str, cause: str, tmp_path: Path) -> None:
    run = ended_run(name, tmp_path, Stop(rank=end.rank, step=31, on="host", where=where), end=end)
    (found,) = fired(run)
    assert (found.kind, found.cause, found.ranks, found.first_step) == ("rank_lost", cause, (end.rank,), 31)


def test_a_rank_that_dies_and_another_that_is_slow_after_the_restart(tmp_path: Path) -> None:
    """The second attempt begins at step 21, and its device is slow from its 41st step on."""
    stop, end = Stop(rank=1, step=31, on="host", where="backward"), Ended(rank=1, signal="SIGKILL")
    again = Delay(rank=0, ms=80, since=41)
    slow, lost = fired(restarted_run(FSDP2, tmp_path, stop, end=end, later_faults=[again]))
    assert (slow.kind, slow.ranks, slow.first_step, slow.attempt) == ("straggler", (0,), 61, 1)
    assert slow.evidence["excess_ms"] == pytest.approx(80, abs=2)
    assert (lost.kind, lost.ranks, lost.first_step, lost.attempt) == ("rank_lost", (1,), 31, 0)
    assert lost.summary.endswith("Restarted as attempt 1, whose first step is 21.")


@pytest.mark.parametrize(
    ("name", "rank", "step", "where", "kind", "words"),
    [
        (FSDP2, 1, 60, "data", "data", "Rank 1 hangs in the data loader at step 60. Rank 0 waited in all_gather #1239"),
        pytest.param(
            DDP,
            0,
            60,
            "after",
            "data",
            "Rank 0 hangs in the data loader at step 60. Rank 1 waited in all_reduce #242",
            marks=OTHERWISE,
        ),
        (FSDP2, 0, 30, "after", "checkpoint", "Rank 0 hangs writing a checkpoint at step 30. Rank 1 waited in"),
        pytest.param(
            DDP,
            1,
            45,
            "data",
            "checkpoint",
            "Rank 1 hangs writing a checkpoint at step 45. Rank 0 waited in",
            marks=OTHERWISE,
        ),
    ],
)
def test_a_host_that_stands_in_its_loader_or_in_a_save(
    name: str, rank: int, step: int, where: str, kind: str, words: str, tmp_path: Path
) -> None:
    """Its peer waits in a call of the next step where the span is the last one of a step."""
    stop = Stop(rank=rank, step=step, on="host", where=where, span=kind)
    (found,) = fired(ended_run(name, tmp_path, stop, after_s=200))
    assert (found.kind, found.cause, found.ranks, found.first_step) == ("hang", kind, (rank,), step)
    assert found.summary.startswith(words)


@pytest.mark.parametrize(
    ("name", "rank", "step", "call"), [(FSDP2, 1, 31, 9), pytest.param(DDP, 0, 58, 1, marks=OTHERWISE)]
)
def test_a_fault_in_a_kernel_is_of_the_step_of_the_device(
    name: str, rank: int, step: int, call: int, tmp_path: Path
) -> None:
    """The watchdog aborts the process where its host is: two steps ahead."""
    end = Ended(rank=rank, signal="SIGABRT", xid=43)
    (found,) = fired(ended_run(name, tmp_path, Stop(rank=rank, step=step, call=call), end=end))
    assert (found.kind, found.cause, found.ranks) == ("rank_lost", "signal", (rank,))
    assert (found.first_step, found.last_step, found.evidence["xids"]) == (step, step, [43])
    assert f"died of SIGABRT at step {step + 2} in backward" in found.summary
    assert f"Its device had reached step {step}." in found.summary
