from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from analyzers.finding import Finding
from analyzers.hangs.explain import NEXT
from analyzers.hangs.stacks import parse_stack, read_stack
from analyzers.report.wording.explained import why
from analyzers.run.policy import StallPolicy
from tests.analyzers.judged import judged_hangs, judged_losses
from tests.analyzers.standstill import MS, SECOND, STEP_NS, World
from tests.sentences import assert_plain

POLICY = StallPolicy()
SILENT_S = 6.0


def hang_of(world: World, seconds: float = SILENT_S) -> Finding:
    """The one hang seen live after so many seconds of silence, and nothing else."""
    now_ns = world.after(seconds)
    assert judged_losses(world.store, POLICY, now_ns) == []
    (finding,) = judged_hangs(world.store, POLICY, now_ns)
    return finding


def test_the_rank_that_never_entered_is_named_and_the_others_wait() -> None:
    world = World()
    for rank in (0, 2, 3):
        world.enter(rank)
    world.span(1, "forward")
    finding = hang_of(world)
    assert (finding.kind, finding.cause, finding.ranks) == ("hang", "not_entered", (1,))
    assert finding.evidence["waiting_ranks"] == [0, 2, 3]
    assert finding.evidence["seq"] == 30
    assert finding.evidence["last_seq_of_culprits"] == {"1": 29}
    assert "did not reach all_reduce #30 (group dp[0, 1, 2, 3]) at step 16: stuck in forward" in finding.summary
    assert finding.first_step == 16


def test_a_silence_within_the_limit_is_not_a_hang() -> None:
    world = World()
    for rank in (0, 2, 3):
        world.enter(rank)
    assert judged_hangs(world.store, POLICY, world.after(4.5)) == []
    assert judged_hangs(world.store, StallPolicy(floor_s=3.0), world.after(4.5)) != []


def test_a_stopped_process_is_the_culprit_even_inside_the_collective() -> None:
    world = World()
    for rank in range(4):
        world.enter(rank)
    world.event("rank_state", 0.5, state_rank=2, state="stopped", os_state="T")
    finding = hang_of(world)
    assert (finding.cause, finding.ranks) == ("stopped", (2,))
    assert finding.evidence["waiting_ranks"] == [0, 1, 3]
    assert "stopped" in finding.summary


def test_a_process_that_is_stopped_while_it_waits_for_a_running_rank_is_no_culprit() -> None:
    """Somebody attached a debugger to a rank that hung with the others."""
    world = World()
    for rank in (0, 1, 2):
        world.enter(rank)
    world.event("rank_state", 4.0, state_rank=2, state="stopped", os_state="t")
    finding = hang_of(world)
    assert (finding.cause, finding.ranks) == ("not_entered", (3,))


def test_a_process_that_was_continued_is_no_culprit() -> None:
    world = World()
    for rank in (0, 1, 2):
        world.enter(rank)
    world.event("rank_state", 0.5, state_rank=2, state="stopped", os_state="T")
    world.event("rank_state", 1.5, state_rank=2, state="running", os_state="S")
    assert hang_of(world).ranks == (3,)


@pytest.mark.parametrize("phase", ["data", "checkpoint", "evaluate", "compile"])
def test_the_cause_is_where_the_culprit_is_instead_of_the_call(phase: str) -> None:
    world = World()
    for rank in (0, 1, 3):
        world.enter(rank)
    world.span(2, phase)
    finding = hang_of(world, {"data": 6.0, "compile": 610.0}.get(phase, 130.0))
    assert (finding.cause, finding.ranks) == (phase, (2,))


@pytest.mark.parametrize("phase", ["checkpoint", "evaluate", "compile"])
def test_long_phases_have_limits_of_their_own(phase: str) -> None:
    world = World()
    world.span(0, phase)
    for rank in (1, 2, 3):
        world.enter(rank)
    assert judged_hangs(world.store, POLICY, world.after(60)) == []


def test_start_up_is_no_hang() -> None:
    world = World(steps=0)
    for rank in (0, 1, 2):
        world.enter(rank)
    assert judged_hangs(world.store, POLICY, world.after(60)) == []
    assert hang_of(world, 200).ranks == (3,)


def test_the_limit_grows_with_the_step() -> None:
    world = World()
    world.store.connection.execute("UPDATE steps SET duration_ns = duration_ns * 100, start_ns = start_ns - 5000000000")
    for rank in (0, 1, 2):
        world.enter(rank)
    assert judged_hangs(world.store, POLICY, world.after(15)) == []  # steps of 5 s: 5 of them
    assert judged_hangs(world.store, POLICY, world.after(30)) != []


def test_ranks_that_wait_across_groups_are_victims() -> None:
    """Rank 3 hangs; its tp partner 2 waits for it, and rank 0 waits for 2 in dp."""
    groups = {"tp[0,1]": (0, 1), "tp[2,3]": (2, 3), "dp[0,2]": (0, 2), "dp[1,3]": (1, 3)}
    world = World(groups=groups)
    world.enter(2, "tp[2,3]")
    world.enter(0, "dp[0,2]")
    world.enter(1, "dp[1,3]")
    finding = hang_of(world)
    assert (finding.cause, finding.ranks) == ("not_entered", (3,))
    assert finding.evidence["waiting_ranks"] == [0, 1, 2]
    assert finding.evidence["waiting_calls"] == {
        "all_reduce #30 (group dp[1,3])": [1],
        "all_reduce #30 (group dp[0,2])": [0],
        "all_reduce #30 (group tp[2,3])": [2],
    }
    assert finding.summary.endswith("Rank 1 waited in that call for 6 s, and ranks 0 and 2 in other calls.")
    assert why(finding).startswith(
        "1 rank waited in all_reduce #30 (group dp[1,3]) at train.py:10 step for 6 s, 2 ranks in other calls."
    )
    assert_plain(why(finding))


def test_the_waiting_ranks_are_counted_although_only_some_calls_are_listed() -> None:
    pairs = [(rank, rank + 1) for rank in range(0, 24, 2)]
    evens = tuple(range(0, 24, 2))
    world = World(ranks=24, steps=3, groups={f"tp{list(pair)}": pair for pair in pairs} | {"dp[0..22]": evens})
    world.enter(0, "tp[0, 1]")
    for rank in evens[1:]:
        world.enter(rank, "dp[0..22]")
        world.enter(rank + 1, f"tp[{rank}, {rank + 1}]")
    finding = hang_of(world, 200)
    assert (finding.ranks, len(finding.evidence["waiting_ranks"])) == ((1,), 23)
    assert len(finding.evidence["waiting_calls"]) < 13
    assert "1 rank waited in all_reduce #6 (group tp[0, 1])" in why(finding)
    assert "22 ranks in other calls" in why(finding)


def test_a_silence_within_the_limit_says_why_it_is_a_hang() -> None:
    """A run that stalled for less than its limit is a hang by another proof, and never "6 s, limit 12.1 s"."""
    silent = hang_of(World())
    for cause, words in {
        "mismatch_size": "Differing calls prove a hang even before the threshold of 12.1 s.",
        "stopped": "A stopped process proves a hang even before the threshold of 12.1 s.",
        "not_entered": "The ranks were ended before the threshold of 12.1 s.",
    }.items():
        short = replace(silent, cause=cause, evidence={**silent.evidence, "silent_s": 6.0, "limit_s": 12.1})
        assert words in why(short)
    assert "Hang threshold here: 5 s." in why(silent)


def test_ranks_that_wait_for_each_other_are_in_calls_and_not_in_user_code() -> None:
    group = "pp[0, 1, 2, 3]"
    world = World(groups={group: (0, 1, 2, 3)})
    world.enter(0, group, 30, op="send", peer=1)
    world.enter(1, group, 30, op="send", peer=0)
    world.enter(2, group, 30, op="recv", peer=1)
    finding = hang_of(world)
    assert (finding.cause, finding.ranks) == ("p2p_unmatched", (0, 1))
    assert finding.summary == (
        "Ranks 0 and 1 wait for each other at step 16: rank 0 in send #30 to rank 1, rank 1 in send #30 to rank 0. "
        "Rank 2 waited in recv #30 from rank 1 for 6 s."
    )


def test_a_call_that_all_ranks_entered_and_none_left_involves_all_ranks() -> None:
    world = World()
    for rank in range(4):
        world.enter(rank)
    finding = hang_of(world)
    assert (finding.cause, finding.ranks) == ("all_entered", (0, 1, 2, 3))


def test_one_rank_alone_makes_no_progress() -> None:
    world = World(ranks=1)
    world.span(0, "forward")
    finding = hang_of(world)
    assert (finding.cause, finding.ranks) == ("busy", (0,))
    assert "in forward" in finding.summary


def test_a_call_that_was_never_waited_for_is_not_in_flight() -> None:
    world = World()
    world.store.connection.execute("UPDATE collectives SET end_ns = NULL WHERE rank = 1 AND seq = 20")
    for rank in (0, 1, 2):
        world.enter(rank)
    assert hang_of(world).ranks == (3,)


def test_a_rank_past_the_phase_in_which_it_began_a_call_is_in_its_own_code() -> None:
    """The loop keeps the handle of a call of the forward pass (`Join`), and waits for it in the backward pass."""
    world = World()
    for rank in range(4):
        world.enter(rank, seq=30, phase="forward", is_async=True)
        world.span(rank, "forward", end_ns=world.now_ns + MS)
    for rank in (0, 1, 3):
        world.enter(rank, seq=31, phase="backward")
    finding = hang_of(world)
    assert (finding.cause, finding.ranks) == ("not_entered", (2,))
    assert finding.summary.startswith("Rank 2 did not reach all_reduce #31 ")
    assert "in user code after forward" in finding.summary


def test_timeouts_of_the_waiting_ranks_are_a_hang_of_the_missing_one() -> None:
    world = World()
    for rank in (0, 2, 3):
        world.enter(rank)
        world.event("exception", 1800.0 + rank, rank=rank, type="RuntimeError", message="Timed out waiting 1800000ms")
    world.event("run_ended", 1810.0, reason="failed", exit_code=1)
    assert judged_losses(world.store, POLICY) == []
    (finding,) = judged_hangs(world.store, POLICY)
    assert finding.ranks == (1,)
    assert finding.cost_s == pytest.approx(1800, abs=1)


def test_missing_tables_are_reported() -> None:
    for table in ("ranks", "steps", "collectives"):
        world = World()
        world.store.drop(table)
        (finding,) = judged_hangs(world.store, POLICY)
        assert finding.status == "insufficient_data"
        assert table in finding.summary
    for table in ("process_groups", "spans", "events"):
        world = World()
        for rank in (0, 2, 3):
            world.enter(rank)
        world.store.drop(table)
        assert [f.ranks for f in judged_hangs(world.store, POLICY, world.after(SILENT_S))] == [(1,)]


STACK = """
Current thread 0x00007f (most recent call first):
  File "/x/site-packages/torch/distributed/c10d.py", line 5 in all_reduce
  File "/home/me/project/train.py", line 42 in step
  File "/home/me/project/train.py", line 99 in main

Thread 0x00007e (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 1 in wait
"""


def test_stacks_show_the_frames_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "attempt-0-rank-00001.txt").write_text("noise\n" + STACK)
    assert read_stack(tmp_path, 0, 1) == ["project/train.py:42 step", "project/train.py:99 main"]
    assert read_stack(tmp_path, 0, 2) == []
    (tmp_path / "attempt-0-rank-00003.txt").symlink_to("/etc/passwd")
    assert read_stack(tmp_path, 0, 3) == []
    assert parse_stack("") == []
    world = World()
    for rank in (0, 2, 3):
        world.enter(rank)
    (finding,) = judged_hangs(world.store, POLICY, world.after(SILENT_S), tmp_path)
    assert "project/train.py:42 step" in finding.summary
    assert STEP_NS < SECOND


GATHER, NORM = ("all_gather", "fsdp.py:1 gather"), ("all_reduce", "train.py:9 norm")


def test_stacks_that_watch_took_prove_a_hang_whose_launcher_died() -> None:
    """Records that end without a word look like a run that was killed whole, but for watch having looked at it."""
    world = World()
    for rank in (0, 2, 3):
        world.enter(rank)
    assert judged_hangs(world.store, POLICY) == []
    assert [finding.cause for finding in judged_losses(world.store, POLICY)] == ["killed_all"]
    world.event("stacks", SILENT_S, path="stacks", ranks=[0, 1, 2, 3])
    (finding,) = judged_hangs(world.store, POLICY)
    assert (finding.cause, finding.ranks) == ("not_entered", (1,))
    assert finding.evidence["silent_s"] == pytest.approx(SILENT_S, abs=0.1)
    assert judged_losses(world.store, POLICY) == []


def asleep_with_the_lock(after_s: float) -> World:
    world = World()
    for rank in (0, 2, 3):
        world.enter(rank)
    world.span(1, "forward")
    world.event("stacks", after_s, path="stacks", ranks=[0, 1, 2, 3], gil_ranks=[1])
    return world


def test_a_rank_that_sleeps_in_c_with_pythons_lock_does_not_answer() -> None:
    finding = hang_of(asleep_with_the_lock(5.5))
    assert (finding.cause, finding.ranks, finding.advice) == ("gil", (1,), "hang-gil")
    assert "Rank 1 does not respond" in finding.summary
    assert "Ranks 0, 2 and 3 waited in all_reduce #30 (group dp[0, 1, 2, 3])" in finding.summary


def test_a_look_before_the_last_record_says_nothing_of_this_hang() -> None:
    assert hang_of(asleep_with_the_lock(-1.0)).cause == "not_entered"


def test_a_single_rank_hangs_with_the_same_causes() -> None:
    world = World(ranks=1, groups={})
    assert hang_of(world).cause == "busy"
    world.event("stacks", 5.5, path="stacks", ranks=[0], gil_ranks=[0])
    assert (hang_of(world).cause, hang_of(world).ranks) == ("gil", (0,))


def test_a_dead_thread_of_the_culprit_is_named_in_the_hang() -> None:
    world = World()
    for rank in (0, 2, 3):
        world.enter(rank)
    world.span(1, "data")
    trace = 'Traceback (most recent call last):\n  File "/job/loader.py", line 41, in fill\n    raise\nOSError: gone\n'
    fields = {"type": "OSError", "message": "gone\n", "traceback": trace, "thread": "prefetch"}
    world.event("thread_exception", 0.1, rank=1, **fields)
    world.event("thread_exception", 0.1, rank=2, **fields)  # of a rank that waits for it
    finding = hang_of(world)
    assert finding.ranks == (1,)
    assert finding.summary.endswith(
        "Thread prefetch of rank 1 ended at step 16 with OSError: gone (job/loader.py:41 in fill)."
    )
    assert finding.evidence["thread_errors"][0]["error"] == "OSError: gone"
    first = "First check job/loader.py:41 in fill, where thread prefetch ended. Inspect the "
    assert NEXT["hang"](finding).startswith(first)
