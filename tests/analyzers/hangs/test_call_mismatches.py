"""Hangs whose cause is that the ranks' calls do not fit: other operations, sizes, orders, calls left out."""

from __future__ import annotations

import pytest

from analyzers.finding import Finding
from tests.analyzers.hangs.test_hang import GATHER, NORM, POLICY, hang_of
from tests.analyzers.judged import judged_hangs, judged_losses
from tests.analyzers.standstill import MS, World


def test_different_operations_group_the_ranks() -> None:
    world = World()
    for rank in range(4):
        world.enter(rank, **({"op": "all_gather"} if rank == 1 else {}))
    finding = hang_of(world)
    assert (finding.cause, finding.ranks) == ("mismatch_operation", (1,))
    assert finding.evidence["differs"] == {"all_reduce": [0, 2, 3], "all_gather": [1]}
    assert finding.evidence["waiting_ranks"] == [0, 2, 3]


@pytest.mark.parametrize(
    ("columns", "cause"),
    [({"bytes": 8192, "shape": "2048"}, "mismatch_size"), ({"dtype": "bfloat16"}, "mismatch_dtype")],
)
def test_different_sizes_and_dtypes(columns: dict[str, object], cause: str) -> None:
    world = World()
    for rank in range(4):
        world.enter(rank, **(columns if rank == 3 else {}))
    finding = hang_of(world)
    assert (finding.cause, finding.ranks) == (cause, (3,))


def test_an_abort_on_a_size_mismatch_is_explained_by_the_mismatch() -> None:
    world = World()
    for rank in range(4):
        world.enter(rank, **({"bytes": 8192} if rank == 0 else {}))
    world.event("rank_exit", 0.2, exit_rank=0, exit_code=-6, signal="SIGABRT", pid=1, message="")
    assert judged_losses(world.store, POLICY) == []
    (finding,) = judged_hangs(world.store, POLICY)
    assert (finding.cause, finding.ranks) == ("mismatch_size", (0,))


def test_a_skipped_collective_leaves_its_rank_one_behind() -> None:
    world = World()
    for rank in (0, 1, 3):
        world.enter(rank, seq=31)
    group = "dp[0, 1, 2, 3]"
    done = {"attempt": 0, "rank": 2, "step": 16, "seq": 30, "process_group": group, "op": "all_reduce"}
    world.store.add("collectives", [done | {"issue_ns": world.now_ns - MS, "end_ns": world.now_ns}])
    finding = hang_of(world)
    assert (finding.cause, finding.ranks) == ("not_entered", (2,))
    assert finding.evidence["last_seq_of_culprits"] == {"2": 30}


def test_two_groups_in_opposite_order_are_a_cycle() -> None:
    world = World(ranks=2, groups={"a[0,1]": (0, 1), "b[0,1]": (0, 1)})
    world.enter(0, "a[0,1]")
    world.enter(1, "b[0,1]")
    finding = hang_of(world)
    assert (finding.cause, finding.ranks, finding.evidence["cycle"]) == ("order_inversion", (0, 1), [0, 1])


def test_a_receive_without_its_send() -> None:
    world = World(ranks=2, groups={"pp[0,1]": (0, 1)})
    world.enter(1, "pp[0,1]", seq=8, op="recv", peer=0)
    finding = hang_of(world)
    assert (finding.cause, finding.ranks) == ("p2p_unmatched", (0,))
    assert "recv #" in finding.summary
    assert "from rank 0" not in finding.summary, "it is the culprit already"


def exchanged(world: World, *, sent: int, received: int) -> None:
    """Both ranks began `sent` messages to each other that nobody waited for, and completed `received` receives."""
    for rank in (0, 1):
        for op, number in (("send", sent), ("recv", received)):
            for seq in range(30, 30 + number):
                world.enter(rank, seq=seq, op=op, peer=1 - rank, caller=f"train.py:{20 if op == 'send' else 26} step")
    world.store.connection.execute(f"UPDATE collectives SET end_ns = {world.now_ns} WHERE op = 'recv'")


@pytest.mark.parametrize("sent", [1, 3, 9])
def test_ranks_without_a_message_are_in_its_receive_and_not_in_completed_sends(sent: int) -> None:
    """A pipeline by hand collects the handles of its sends, and waits for them at the end of the step."""
    world = World(ranks=2, groups={"world:0-1": (0, 1)})
    exchanged(world, sent=sent, received=sent)
    for rank in (0, 1):
        world.enter(rank, seq=30 + sent, op="recv", peer=1 - rank, caller="train.py:26 step")
    finding = hang_of(world)
    assert (finding.cause, finding.ranks) == ("p2p_unmatched", (0, 1))
    assert f"rank 0 in recv #{30 + sent} from rank 1, rank 1 in recv #{30 + sent} from rank 0." in finding.summary


def test_a_rank_whose_sends_have_arrived_is_in_its_own_code() -> None:
    world = World(ranks=2, groups={"world:0-1": (0, 1)})
    exchanged(world, sent=2, received=2)
    world.enter(0, seq=32, op="recv", peer=1, caller="train.py:26 step")
    finding = hang_of(world)
    assert (finding.cause, finding.ranks) == ("p2p_unmatched", (1,))
    assert "did not answer recv #32 at step 16: stuck in user code." in finding.summary
    assert finding.summary.endswith("Rank 0 waited for 6 s.")


def test_a_stopped_rank_whose_sends_have_arrived_is_not_in_them() -> None:
    world = World(ranks=2, groups={"world:0-1": (0, 1)})
    exchanged(world, sent=2, received=2)
    world.enter(0, seq=32, op="recv", peer=1, caller="train.py:26 step")
    world.event("rank_state", 0.5, state_rank=1, state="stopped", os_state="T")
    finding = hang_of(world)
    assert (finding.cause, finding.ranks) == ("stopped", (1,))
    assert "send" not in finding.summary


def met(others: tuple[str, str], own: tuple[str, str]) -> Finding:
    """The hang of a run in which each step ends with a norm, and rank 2 is now in another call than the others."""
    world = World(program=(GATHER, NORM))
    for rank in range(4):
        op, caller = own if rank == 2 else others
        world.enter(rank, op=op, caller=caller)
    return hang_of(world)


def test_a_rank_that_left_a_call_out_is_a_call_ahead() -> None:
    finding = met(GATHER, NORM)
    assert (finding.cause, finding.ranks, finding.evidence["waiting_ranks"]) == ("skipped", (2,), [0, 1, 3])
    assert "Rank 2 skipped all_gather #30 (group dp[0, 1, 2, 3])" in finding.summary


def test_three_ranks_that_left_a_call_out_are_named_and_not_the_one_that_made_it() -> None:
    finding = met(NORM, GATHER)
    assert (finding.cause, finding.ranks) == ("skipped", (0, 1, 3))


def test_a_call_that_never_came_next_in_earlier_steps_is_a_mismatch() -> None:
    finding = met(GATHER, ("all_reduce", "train.py:30 other_branch"))
    assert (finding.cause, finding.ranks) == ("mismatch_operation", (2,))


def test_mismatched_calls_are_reported_although_the_end_of_the_run_is_unknown() -> None:
    """Launcher and watch died too: without them a hang looks like a run that was killed, a mismatch does not."""
    world = World(program=(GATHER, NORM))
    for rank in range(4):
        op, caller = NORM if rank == 2 else GATHER
        world.enter(rank, op=op, caller=caller)
    (finding,) = judged_hangs(world.store, POLICY)
    assert (finding.cause, finding.ranks) == ("skipped", (2,))
    assert judged_losses(world.store, POLICY) == []


def test_a_rank_whose_names_a_power_cut_took_has_skipped_nothing() -> None:
    """Its calls are recorded, but which they were is lost: a later step proves no skipped call, and the run ended."""
    world = World(ranks=2)
    world.enter(0)
    groups = [{"attempt": 0, "process_group": "world:0-1", "members": [0, 1]}]
    world.store.add("process_groups", groups)
    step = {"attempt": 0, "rank": 1, "step": world.step + 1, "start_ns": world.now_ns, "duration_ns": None}
    world.store.add("steps", [step])
    (skipped,) = judged_hangs(world.store, POLICY)
    assert skipped.cause == "skipped"
    world.store.connection.execute("UPDATE collectives SET op = '?3', process_group = '?7' WHERE rank = 1")
    assert judged_hangs(world.store, POLICY) == []
    (lost,) = judged_losses(world.store, POLICY)
    assert lost.cause == "killed_all"


def test_two_stages_that_wait_for_each_other_miss_a_message() -> None:
    """Rank 1 waits for a message that rank 0 never sent; rank 0 has gone on to the next collective."""
    world = World(ranks=2)
    world.enter(1, seq=4, op="recv", peer=0)
    world.enter(0)
    finding = hang_of(world)
    assert (finding.cause, finding.ranks) == ("p2p_unmatched", (0, 1))


def test_sizes_that_differ_count_although_a_later_call_is_done() -> None:
    world = World()
    (group,) = world.groups
    for rank in range(4):
        world.enter(rank, group, 30, op="reduce_scatter", bytes=50 if rank == 2 else 100)
        world.enter(rank, group, 31, op="all_gather", bytes=8, end_ns=world.now_ns + MS)
    finding = hang_of(world)
    assert (finding.cause, finding.ranks) == ("mismatch_size", (2,))


def test_a_rank_in_the_optimizer_that_is_awaited_in_the_backward_pass_has_left_a_call_out() -> None:
    world = World(groups={"world": (0, 1, 2, 3), "tp": (2, 3)})
    world.enter(3, "world", 30, phase="optimizer")
    for rank in (0, 1):
        world.enter(rank, "world", 30, phase="optimizer")
    world.enter(2, "tp", 30, phase="backward")
    finding = hang_of(world)
    assert (finding.cause, finding.ranks) == ("skipped", (3,))


def test_a_call_left_out_among_those_of_one_line_is_known_by_its_shape() -> None:
    """Parameters reduced in a loop: one line, another shape each; rank 1 left the first one of the step out."""
    world = World(ranks=2)
    world.store.connection.execute("UPDATE collectives SET shape = CASE seq % 2 WHEN 0 THEN '128x32' ELSE '128' END")
    world.enter(0, shape="128x32", bytes=16384)
    world.enter(1, shape="128", bytes=512)
    finding = hang_of(world)
    assert (finding.cause, finding.ranks) == ("skipped", (1,))


def test_a_size_that_no_step_had_is_a_mismatch() -> None:
    world = World(ranks=2)
    world.store.connection.execute("UPDATE collectives SET shape = CASE seq % 2 WHEN 0 THEN '128x32' ELSE '128' END")
    world.enter(0, shape="128x32", bytes=16384)
    world.enter(1, shape="7", bytes=28)
    assert hang_of(world).cause == "mismatch_size"


@pytest.mark.parametrize(("later", "cause"), [(0, "finished"), (1, "skipped")])
def test_a_rank_that_went_on_without_the_call_has_skipped_it(later: int, cause: str) -> None:
    """It closed its records; in the step in which it is awaited it has ended, in a later one it went past the call."""
    world = World(ranks=2)
    world.enter(0)
    if later:
        step = {"attempt": 0, "rank": 1, "step": world.step + later, "start_ns": world.now_ns, "duration_ns": MS}
        world.store.add("steps", [step])
    world.event("rank_closed", 0.1, rank=1)
    finding = hang_of(world)
    assert (finding.cause, finding.ranks, finding.first_step) == (cause, (1,), world.step)


@pytest.mark.parametrize("ended", [(0, 1), (2,), (0, 1, 2)])
def test_the_one_that_called_something_else_is_named_whoever_has_left_the_call(ended: tuple[int, ...]) -> None:
    """A rank that has left it (it raised, or its backend let it pass) still counts for its side."""
    world = World()
    for rank in range(4):
        columns: dict[str, object] = {"op": "all_gather", "caller": "train.py:30 branch"} if rank == 2 else {}
        world.enter(rank, **columns, end_ns=world.now_ns + MS if rank in ended else None)
        if rank in ended:
            world.enter(rank, seq=31)
    finding = hang_of(world)
    assert (finding.cause, finding.ranks) == ("mismatch_operation", (2,))


def test_a_mismatch_behind_older_calls_that_all_entered_is_named() -> None:
    """Asynchronous calls whose handles are waited for later stay open before the one in which the ranks stand."""
    world = World()
    for rank in range(4):
        world.enter(rank, seq=30, op="reduce_scatter", is_async=True)
        world.enter(rank, seq=31, op="all_gather" if rank == 2 else "all_reduce")
    finding = hang_of(world)
    assert (finding.cause, finding.ranks) == ("mismatch_operation", (2,))


@pytest.mark.parametrize(("is_known", "ranks"), [(True, (2, 3)), (False, (0, 1, 2, 3))])
def test_of_two_against_two_the_side_with_an_unusual_call_is_named(is_known: bool, ranks: tuple[int, ...]) -> None:
    """In the first step no side is: no former one tells which call was due."""
    world = World()
    if not is_known:
        world.store.connection.execute("DELETE FROM collectives")
    for rank in range(4):
        world.enter(rank, **({"op": "all_gather", "caller": "train.py:30 branch"} if rank >= 2 else {}))
    finding = hang_of(world)
    assert (finding.cause, finding.ranks) == ("mismatch_operation", ranks)
