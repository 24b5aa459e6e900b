"""Ranks out of sync: a collective that one rank left out, or made once more, while the job goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from analyzers.finding import Finding
from analyzers.hangs.desync import desynced
from analyzers.scope import Scope
from tests.analyzers.explained import explained
from tests.analyzers.memory_store import MemoryStore

MS = 1_000_000
GROUP = "dp[0,1]"
REDUCE = ("all_reduce", "train.py:9 reduce", "backward")
NORM = ("all_reduce", "train.py:12 clip", "optimizer")
_Program = Callable[[int, int], Sequence[tuple[str, str, str]]]


def recorded(
    program: _Program,
    *,
    ranks: int = 2,
    lost: Sequence[tuple[int, int]] = (),
    attempt: int = 0,
    store: MemoryStore | None = None,
) -> MemoryStore:
    """Ranks whose calls in a step are `program(rank, step)`; of `lost` (rank, number) there is no record."""
    store, calls, spans, rows = store or MemoryStore(), [], [], []
    for rank in range(ranks):
        seq = 0
        for step in range(30):
            at_ns = step * 100 * MS
            rows.append({"rank": rank, "step": step, "start_ns": at_ns, "duration_ns": 99 * MS})
            for kind in ("forward", "backward", "optimizer"):
                spans.append(_span(rank, step, kind, at_ns))
            for place, (op, caller, phase) in enumerate(program(rank, step)):
                call = {"rank": rank, "step": step, "seq": seq, "op": op, "caller": caller}
                call |= {"phase": phase, "process_group": GROUP, "issue_ns": at_ns + (50 + place) * MS}
                calls += [call] if (rank, seq) not in lost else []
                seq += 1
    for table, of in (("collectives", calls), ("spans", spans), ("steps", rows)):
        store.add(table, [{"attempt": attempt, **row} for row in of])
    return store


def _span(rank: int, step: int, kind: str, at_ns: int) -> Mapping[str, Any]:
    at_ns += {"forward": 10, "backward": 30, "optimizer": 80}[kind] * MS
    return {"rank": rank, "step": step, "kind": kind, "start_ns": at_ns, "end_ns": at_ns + 15 * MS}


def found_in(store: MemoryStore, since_step: int = 0) -> list[Finding]:
    return explained(desynced(store, Scope(since_step=since_step)))


def skipping(rank: int, step: int) -> Sequence[tuple[str, str, str]]:
    """Rank 1 leaves the reduction of step 12 out."""
    return [NORM] if (rank, step) == (1, 12) else [REDUCE, NORM]


def test_the_rank_that_left_a_call_out_is_named_with_step_number_and_line() -> None:
    (finding,) = found_in(recorded(skipping))
    assert (finding.kind, finding.cause, finding.ranks, finding.first_step) == ("desync", "skipped", (1,), 12)
    assert finding.summary.startswith("Rank 1 skipped all_reduce #24 (group dp[0,1]) at step 12.")
    assert finding.evidence["caller"] == "train.py:9 reduce"
    assert (finding.evidence["steps_before"], finding.evidence["steps_since"]) == (12, 17)


def test_a_step_without_any_call_is_a_skipped_one() -> None:
    (finding,) = found_in(recorded(lambda rank, step: [] if (rank, step) == (0, 12) else [REDUCE]))
    assert (finding.cause, finding.ranks, finding.first_step) == ("skipped", (0,), 12)


def test_of_four_ranks_the_one_that_differs_is_named_whatever_its_history() -> None:
    def program(rank: int, step: int) -> Sequence[tuple[str, str, str]]:
        evaluates = step % 4 == 0 and (rank, step) != (2, 12)
        return [REDUCE, NORM] if evaluates else [REDUCE]

    (finding,) = found_in(recorded(program, ranks=4))
    assert (finding.cause, finding.ranks, finding.evidence["op"]) == ("skipped", (2,), "all_reduce")
    assert finding.evidence["caller"] == "train.py:12 clip"


def test_two_ranks_with_usual_call_counts_are_both_suspects() -> None:
    def program(rank: int, step: int) -> Sequence[tuple[str, str, str]]:
        return [REDUCE, NORM] if step % 4 == 0 and (rank, step) != (1, 12) else [REDUCE]

    (finding,) = found_in(recorded(program))
    assert (finding.status, finding.ranks) == ("suspect", (0, 1))


def test_an_extra_call_names_the_rank_that_made_it() -> None:
    (finding,) = found_in(recorded(lambda rank, step: [REDUCE] * (1 + ((rank, step) == (1, 12))) + [NORM]))
    assert (finding.cause, finding.ranks, finding.first_step) == ("extra", (1,), 12)


def test_the_first_of_two_skipped_calls_is_reported() -> None:
    (finding,) = found_in(recorded(lambda rank, step: [NORM] if rank == 1 and step in (12, 20) else [REDUCE, NORM]))
    assert (finding.first_step, finding.evidence["num_calls"]) == (12, 1)


def test_only_the_steps_of_the_scope_are_read() -> None:
    assert found_in(recorded(skipping), since_step=5)[0].first_step == 12
    assert found_in(recorded(skipping), since_step=13) == []


@pytest.mark.parametrize("store", [
    pytest.param(lambda: recorded(lambda rank, step: [REDUCE, NORM]), id="in sync"),
    pytest.param(lambda: recorded(lambda rank, step: [REDUCE] * (1 + step % 3)), id="other numbers in other steps"),
    pytest.param(lambda: recorded(lambda rank, step: [NORM] if step == 12 else [REDUCE, NORM]), id="all leave it out"),
    # A stage whose step counter began one earlier: a constant difference.
    pytest.param(lambda: recorded(lambda rank, step: [] if (rank, step) == (1, 0) else [REDUCE]), id="later begin"),
    pytest.param(lambda: recorded(lambda rank, step: [REDUCE, NORM], lost=[(1, 24)]), id="a record is lost"),
    pytest.param(
        lambda: recorded(lambda rank, step: [REDUCE, NORM], lost=[(1, n) for n in range(23, 31)]), id="a gap of steps"
    ),
    # A call that a thread issues in one step or the next, and comes back.
    pytest.param(
        lambda: recorded(lambda rank, step: [REDUCE] * ({12: 0, 13: 2}.get(step, 1) if rank else 1)), id="issued late"
    ),
])  # fmt: skip
def test_calls_that_pair_up_in_the_end_give_no_finding(store: Callable[[], MemoryStore]) -> None:
    assert found_in(store()) == []


def test_a_step_counted_twice_is_no_skipped_call() -> None:
    """Its step 12 has neither forward nor backward: the counter went on, not the program."""
    store = recorded(skipping)
    store.connection.execute("DELETE FROM spans WHERE rank = 1 AND step = 12 AND kind <> 'optimizer'")
    assert found_in(store) == []


def test_calls_of_a_background_thread_belong_to_no_step() -> None:
    """They carry no phase although the rank is in one."""
    store = recorded(lambda rank, step: [] if (rank, step) == (1, 12) else [("broadcast", "prefetch.py:3 fill", "")])
    store.connection.execute("UPDATE collectives SET issue_ns = step * 100000000 + 35000000")
    assert found_in(store) == []


def test_each_attempt_is_judged_by_itself() -> None:
    store = recorded(lambda rank, step: [REDUCE] if step or rank else [])
    recorded(lambda rank, step: [REDUCE], attempt=1, store=store)
    assert found_in(store) == []


def test_steps_that_begin_elsewhere_between_the_same_calls_are_in_sync() -> None:
    """From step 12 on, rank 1 answers the calls of rank 0 without training (`Join`), and its steps end one call later
    in their sequence. The operations pair by number, and do not by their place in the step."""
    fill = ("broadcast", "train.py:14 fill", "")

    def program(rank: int, step: int) -> Sequence[tuple[str, str, str]]:
        if rank == 0 or step < 12:
            return [REDUCE, fill]
        return [REDUCE, fill, REDUCE] if step == 12 else [fill, REDUCE]

    assert found_in(recorded(program)) == []
