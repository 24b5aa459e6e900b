"""Errors that ranks raised: their own, and those that follow another rank's end."""

from __future__ import annotations

import pytest

from analyzers.report.wording.explained import why
from tests.analyzers.deaths.lost_ranks import GLOO, killed, lost, traced
from tests.analyzers.standstill import World

OWN_ERRORS = [
    ("JSONDecodeError", "Unterminated string starting at: line 1 column 9 (char 8)",
     "/usr/lib/python3.11/json/decoder.py"),
    ("ReadTimeoutError", "AWSHTTPSConnectionPool(host='s3', port=443): Read timed out.",
     "/x/site-packages/urllib3/response.py"),
    ("ConnectionResetError", "[Errno 104] Connection reset by peer", "/home/me/data/shards.py"),
    ("BrokenPipeError", "[Errno 32] Broken pipe", "/home/me/data/shards.py"),
    ("TimeoutError", "[Errno 110] Connection timed out", "/home/me/data/shards.py"),
    ("RuntimeError", "DataLoader timed out after 60 seconds", "/x/site-packages/torch/utils/data/dataloader.py"),
    ("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Terminated. ",
     "/x/site-packages/torch/utils/data/_utils/signal_handling.py"),
]  # fmt: skip


@pytest.mark.parametrize("has_traceback", [True, False])
@pytest.mark.parametrize("in_call", [False, True])
@pytest.mark.parametrize(("error", "message", "path"), OWN_ERRORS)
def test_words_alone_make_no_error_collateral(
    error: str, message: str, path: str, in_call: bool, has_traceback: bool
) -> None:
    world = World()
    trace = {"traceback": traced(path, f"{error}: {message}")} if has_traceback else {}
    if in_call:
        world.enter(2, is_async=True)  # gradients of the step before may still be on their way
    world.event("exception", 0.01, rank=2, type=error, message=message, **trace)
    for other in (0, 1, 3):
        world.enter(other)
        world.event("exception", 0.03, rank=other, type="RuntimeError", message=GLOO,
                    traceback=traced("/home/me/train.py", f"RuntimeError: {GLOO}"))  # fmt: skip
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks) == ("exception", (2,))
    assert finding.evidence["victims"] == [0, 1, 3]
    assert f"Rank 2 died of {error}: {message.strip(' .')}" in finding.summary


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("RuntimeError", GLOO),
        ("RuntimeError", "[/pytorch/gloo/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation"),
        ("DistBackendError", "NCCL error in: ProcessGroupNCCL.cpp:1970, remote process exited or a network error"),
        ("DistNetworkError", "Broken pipe"),
    ],
)  # fmt: skip
def test_a_backends_error_is_collateral_also_where_the_rank_had_not_entered_yet(error: str, message: str) -> None:
    world = World()
    for other in (0, 1, 3):  # they came to their collective only after rank 2 had gone, which nobody saw yet
        world.event("exception", 0.03, rank=other, type=error, message=message)
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks) == ("vanished", (2,))


def test_an_error_that_all_ranks_raise_has_no_collateral() -> None:
    """A gradient norm is NaN on every rank after its reduction, and the loop refuses it."""
    world = World()
    for rank in range(4):
        world.enter(rank, is_async=True)  # records of the reduction may not be completed yet
        world.event("exception", 0.01 * (rank + 1), rank=rank, type="RuntimeError", message="The norm is non-finite")
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks, finding.evidence["victims"]) == ("exception", (0, 1, 2, 3), [])


def test_a_device_error_reported_by_the_backend_is_a_root() -> None:
    world = World()
    message = "NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled cuda error, Cuda failure 'illegal memory access'"
    world.event("exception", 0.01, rank=1, type="DistBackendError", message=message)
    for other in (0, 2, 3):
        world.enter(other)
        world.event("exception", 0.03, rank=other, type="DistBackendError", message="NCCL: remote process exited")
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks) == ("exception", (1,))


CAUSED = "The above exception was the direct cause of the following exception:\n\n"
HANDLED = "During handling of the above exception, another exception occurred:\n\n"


def test_an_error_raised_from_a_backend_error_is_collateral() -> None:
    world = killed(2)
    before = traced("/x/site-packages/torch/distributed/distributed_c10d.py", f"RuntimeError: {GLOO}") + "\n" + CAUSED
    world.store.connection.execute("DELETE FROM events WHERE rank = 0")
    world.event("exception", 0.3, rank=0, type="TrainingError", message="step failed",
                traceback=traced("/home/me/train.py", "TrainingError: step failed", before=before))  # fmt: skip
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks) == ("signal", (2,))


def test_a_barrier_in_a_finally_does_not_hide_the_error_before_it() -> None:
    world = World()
    before = traced("/home/me/data.py", "KeyError: 'tokens'") + "\n" + HANDLED
    for rank in range(4):
        world.enter(rank)
        trace = traced("/home/me/train.py", f"RuntimeError: {GLOO}", before=before if rank == 3 else "")
        world.event("exception", 0.01 * rank, rank=rank, type="RuntimeError", message=GLOO, traceback=trace)
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks) == ("exception", (3,))


def test_errors_of_peers_alone_are_lost_connections_and_nobody_is_named() -> None:
    world = World()
    for rank in range(4):
        world.enter(rank)
        world.event("exception", 0.01 * (4 - rank), rank=rank, type="RuntimeError", message=GLOO)
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks) == ("connection_lost", ())
    assert "4 of 4 ranks report a lost connection" in finding.summary
    assert "rank 3 first" in finding.summary
    assert "RuntimeError: [/pytorch" in why(finding)
    assert "killed" not in finding.summary
    assert "without an error" not in finding.summary


def test_terminated_ranks_are_named_beside_the_errors_of_the_others() -> None:
    world = World()
    for rank in (1, 2, 3):
        world.event("exception", 0.02, rank=rank, type="RuntimeError", message=GLOO)
    world.event("rank_exit", 0.1, exit_rank=0, exit_code=-15, signal="SIGTERM", pid=7, message="")
    (finding,) = lost(world)
    assert (finding.cause, finding.evidence["terminated_ranks"]) == ("connection_lost", [0])
    assert finding.summary.endswith("and rank 0 ended by SIGTERM.")


def test_ranks_that_the_agent_ended_are_not_missing() -> None:
    world = World()
    world.event("exception", 0.01, rank=1, type="RuntimeError", message=GLOO)
    for rank in (0, 2, 3):
        world.event("rank_stopped", 0.3, exit_rank=rank, pid=1, exit_code=-15)
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks) == ("connection_lost", ())


def test_the_line_that_raised_is_named() -> None:
    world = World()
    trace = (
        "Traceback (most recent call last):\n"
        '  File "/home/me/project/train.py", line 140, in main\n    run()\n'
        '  File "/home/me/project/data/shards.py", line 41, in __getitem__\n    return json.loads(x)\n'
        '  File "/usr/lib/python3.11/json/decoder.py", line 355, in raw_decode\n    raise\n'
        "json.decoder.JSONDecodeError: Unterminated string\n"
    )
    world.event("exception", 0.01, rank=2, type="JSONDecodeError", message="Unterminated string", traceback=trace)
    (finding,) = lost(world)
    assert finding.evidence["raised_at"] == "data/shards.py:41 in __getitem__"
    assert finding.evidence["traceback"] == [
        "json/decoder.py:355 in raw_decode", "data/shards.py:41 in __getitem__", "project/train.py:140 in main",
    ]  # fmt: skip
    assert "died of JSONDecodeError: Unterminated string (data/shards.py:41 in __getitem__)" in finding.summary


def test_a_long_message_is_cut_with_a_mark() -> None:
    world = World()
    world.event("exception", 0.01, rank=2, type="ValueError", message="expected " + "a shape, " * 40,
                traceback=traced("/home/me/train.py", "ValueError: x"))  # fmt: skip
    (finding,) = lost(world)
    assert "… (me/train.py" in why(finding)
    assert "… (me/train.py" in finding.summary


@pytest.mark.parametrize("has_launcher", [True, False])
def test_an_error_of_one_rank_is_reported_although_rank_0_finished(has_launcher: bool) -> None:
    """Ranks without a process group train alone: rank 0 reaches its end, and closes its node's records."""
    world = World()
    trace = traced("/home/me/train.py", "ValueError: bad")
    world.event("exception", 0.01, rank=2, type="ValueError", message="bad", traceback=trace)
    for rank in (0, 1, 3):
        world.event("rank_closed", 0.5, rank=rank)
    world.event("run_ended", 0.5, rank=0, reason="finished", exit_code=0)
    if has_launcher:
        world.event("rank_exit", 1.0, exit_rank=2, pid=1, exit_code=1, signal=None, message="")
        world.event("run_ended", 2.0, reason="failed", exit_code=1)
    (finding,) = lost(world)
    assert (finding.cause, finding.ranks) == ("exception", (2,))
    assert finding.evidence["victims"] == []
    assert "because of it" not in finding.summary


def test_a_finished_rank_is_not_collateral_of_an_error() -> None:
    world = World()
    world.event("exception", 0.01, rank=2, type="ValueError", message="bad")
    for rank in (0, 1):
        world.enter(rank)
        world.event("exception", 0.03, rank=rank, type="RuntimeError", message=GLOO)
    world.event("rank_closed", 0.0, rank=3)
    (finding,) = lost(world)
    assert finding.evidence["victims"] == [0, 1]
    assert "Ranks 0 and 1 ended because of it." in finding.summary
