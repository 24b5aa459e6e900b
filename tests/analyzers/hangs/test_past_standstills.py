"""A rank that stalled for longer than a hang and went on is an incident of the run, live or not."""

from __future__ import annotations

from collections.abc import Sequence

from analyzers.finding import Finding
from analyzers.hangs.explain import NEXT
from analyzers.hangs.past_standstills import past_standstills
from analyzers.scope import Scope
from tests.analyzers.memory_store import MemoryStore
from tests.analyzers.plain_run import S, plain_run
from tests.sentences import plain


def stood_still(
    *, step: int = 60, still: Sequence[int] = (2,), seconds: int = 40, column: str = "forward_ns", ranks: int = 4
) -> MemoryStore:
    """A healthy run in one step of which some ranks stand still, and the others wait for them in backward."""
    store = plain_run(ranks=ranks)
    execute = store.connection.execute
    execute("UPDATE steps SET collective_wait_ns = 0, forward_wait_ns = 0, backward_wait_ns = 0")
    execute(f"UPDATE steps SET start_ns = start_ns + {seconds * S} WHERE step > {step}")
    execute(f"UPDATE steps SET duration_ns = duration_ns + {seconds * S} WHERE step = {step}")
    listed = ", ".join(map(str, still))
    execute(
        f"UPDATE steps SET {column} = coalesce({column}, 0) + {seconds * S} WHERE step = {step} AND rank IN ({listed})"
    )
    execute(
        f"UPDATE steps SET backward_ns = backward_ns + {seconds * S}, backward_wait_ns = {seconds * S}, "
        f"collective_wait_ns = {seconds * S} WHERE step = {step} AND rank NOT IN ({listed})"
    )
    return store


def test_a_past_standstill_keeps_its_rank_place_step_and_cost() -> None:
    (finding,) = plain(past_standstills(stood_still(), Scope()))
    assert (finding.kind, finding.ranks, finding.first_step, finding.cost_s) == ("standstill", (2,), 60, 40.1)
    assert finding.evidence["waiting_ranks"] == [0, 1, 3]
    assert finding.summary.startswith("Rank 2 stalled for 40.1 s at step 60, in forward, and ranks 0, 1 and 3")


def compiled(store: MemoryStore, seconds: int) -> MemoryStore:
    """Rank 2 was compiling for so long in step 60."""
    (row,) = store.rows("SELECT start_ns FROM steps WHERE step = 60 AND rank = 2")
    store.add(
        "spans",
        [{"attempt": 0, "rank": 2, "step": 60, "kind": "compile", "start_ns": row[0], "end_ns": row[0] + seconds * S}],
    )
    return store


def test_a_rank_that_compiled_again_stood_in_the_compiler_and_the_guard_is_told() -> None:
    store = compiled(stood_still(), 39)
    store.event("recompile", rank=2, step=60, file="model.py", line=7, function="layer", guard="size mismatch at 0")
    (finding,) = plain(past_standstills(store, Scope()))
    assert (finding.cause, finding.ranks) == ("compile", (2,))
    assert finding.summary.startswith("Rank 2 stalled for 40.1 s at step 60, compiling, and ranks 0, 1 and 3")
    assert finding.evidence["recompiled"] == "layer (model.py:7): size mismatch at 0"
    assert "size mismatch at 0" in NEXT["standstill"](finding)


def test_a_short_compilation_is_not_what_a_rank_stood_in() -> None:
    (finding,) = plain(past_standstills(compiled(stood_still(), 3), Scope()))
    assert (finding.cause, finding.evidence["place"]) == ("not_entered", "in forward")


def test_what_watch_saw_of_it_is_added() -> None:
    store = stood_still(column="data_ns")
    reported = Finding(
        analyzer="hang", kind="hang", severity="critical", status="fired", ranks=(2,), first_step=60, last_step=60,
        cause="data", summary="Rank 2 hangs.", evidence={"stacks": {"2": ["loader.py:7 in fetch"]}}, attempt=0,
    )  # fmt: skip
    fields = {
        name: getattr(reported, name)
        for name in (
            "id",
            "analyzer",
            "severity",
            "status",
            "first_step",
            "last_step",
            "cause",
            "summary",
            "evidence",
            "advice",
            "cost_s",
        )
    }
    store.event("finding", step=60, finding_kind="hang", finding_ranks=[2], **fields)
    (finding,) = plain(past_standstills(store, Scope()))
    assert finding.cause == "data"
    assert finding.evidence["stacks"] == {"2": ["loader.py:7 in fetch"]}


def test_clean_runs_checkpoints_starved_machines_and_short_pauses_have_no_standstill() -> None:
    assert past_standstills(plain_run(), Scope()) == []
    assert past_standstills(stood_still(seconds=3), Scope()) == [], "shorter than a hang"
    assert past_standstills(stood_still(step=1), Scope()) == [], "the first step warms up"
    assert past_standstills(stood_still(column="checkpoint_ns"), Scope()) == [], "it saves, with a limit of its own"
    assert past_standstills(stood_still(still=(0, 1, 2, 3)), Scope()) == [], "no rank waited: nothing of the run"
    starved = stood_still()
    starved.connection.execute(f"UPDATE steps SET run_delay_ns = {40 * S} WHERE step = 60 AND rank = 2")
    assert past_standstills(starved, Scope()) == [], "it was ready to run"


def test_a_rank_that_stood_between_two_steps_is_waited_for_in_the_next() -> None:
    store = stood_still(column="after_optimizer_ns")
    others = "step = 60 AND rank <> 2"
    store.connection.execute(f"UPDATE steps SET collective_wait_ns = 0, duration_ns = 100000000 WHERE {others}")
    store.connection.execute(
        f"UPDATE steps SET collective_wait_ns = {40 * S}, duration_ns = {41 * S} WHERE step = 61 AND rank <> 2"
    )
    (finding,) = plain(past_standstills(store, Scope()))
    assert (finding.ranks, finding.evidence["waiting_ranks"]) == ((2,), [0, 1, 3])
    assert "at step 60, after the optimizer, and ranks 0, 1 and 3 waited" in finding.summary


def test_no_standstill_is_found_without_recorded_waits() -> None:
    store = stood_still()
    store.connection.execute("UPDATE steps SET collective_wait_ns = NULL")
    assert past_standstills(store, Scope()) == []


def test_a_step_that_an_interruption_of_a_hang_ended_is_no_standstill_of_its_own() -> None:
    """Rank 2 stands still in the last step for 40 s. `watch` reports it, and an interruption lets the step end."""
    store = stood_still(step=60)
    store.connection.execute("DELETE FROM steps WHERE step > 60")
    store.connection.execute("DELETE FROM events WHERE kind = 'run_ended'")
    ((start_ns,),) = store.rows("SELECT max(start_ns) FROM steps")
    assert [found.ranks for found in past_standstills(store, Scope())] == [(2,)]
    store.event("finding", step=60, finding_kind="hang", status="fired", wall_ns=start_ns + 10 * S)
    assert past_standstills(store, Scope()) == []


def test_a_step_that_only_an_error_ended_did_not_continue() -> None:
    """Rank 2 waits for 40 s after the update of step 60, then its wait times out and it dies."""
    store = stood_still(column="after_optimizer_ns")
    store.connection.execute("DELETE FROM steps WHERE step > 61")
    store.connection.execute("UPDATE steps SET duration_ns = NULL WHERE step = 61")
    assert [found.ranks for found in past_standstills(store, Scope())] == [(2,)]
    store.event("exception", rank=2, step=61, type="Empty", phase="")
    assert past_standstills(store, Scope()) == [], "the error tells of it"
    ((end_ns,),) = store.rows("SELECT start_ns + duration_ns FROM steps WHERE step = 60 AND rank = 2")
    store.add(
        "spans",
        [{"attempt": 0, "rank": 2, "step": 61, "kind": "forward", "start_ns": end_ns + S, "end_ns": end_ns + 2 * S}],
    )
    assert [found.ranks for found in past_standstills(store, Scope())] == [(2,)], "it worked again before the error"
