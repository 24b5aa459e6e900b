from __future__ import annotations

import pytest

from analyzers.finding import Finding
from analyzers.scope import Scope
from analyzers.settings.startup import measure, slow_startup
from tests.analyzers.judged import checked
from tests.analyzers.memory_store import MemoryStore
from tests.analyzers.plain_run import BEGIN_NS, S, plain_run


def analyze(store: MemoryStore) -> list[Finding]:
    return checked(slow_startup(store, Scope()))


def test_the_pieces_of_a_start() -> None:
    (start,) = measure(plain_run())
    pieces = {piece: start.longest(piece) for piece in start.by_rank}
    assert pieces == pytest.approx({"launch": 2.0, "imports": 3.0, "setup": 1.0, "first_step": 0.0})
    assert analyze(plain_run()) == []


def later(store: MemoryStore, sql: str) -> MemoryStore:
    store.connection.execute(sql)
    return store


def test_a_rank_that_the_others_wait_for_is_named() -> None:
    store = later(plain_run(), f"UPDATE ranks SET wall_ns = wall_ns + {40 * S} WHERE rank = 2")
    store.connection.execute(f"UPDATE steps SET start_ns = start_ns + {40 * S}")
    (finding,) = analyze(store)
    assert (finding.kind, finding.status, finding.cause, finding.ranks) == ("slow_startup", "advice", "imports", (2,))
    assert finding.evidence["imports_s"] == pytest.approx(43.0)


@pytest.mark.parametrize("node_events", [False, True])
@pytest.mark.parametrize("by_s", [50, -50])
def test_a_host_whose_clock_differs_is_not_named(by_s: int, node_events: bool) -> None:
    moved = f"wall_ns = wall_ns + {by_s * S}"
    store = later(plain_run(), f"UPDATE ranks SET {moved}, host = 'node-1', node_rank = 1 WHERE rank > 1")
    store.connection.execute(f"UPDATE steps SET start_ns = start_ns + {by_s * S} WHERE rank > 1")
    if node_events:  # each node's launcher writes its own
        for kind, after_s in (("run_started", 0), ("attempt_started", 2)):
            store.event(kind, wall_ns=BEGIN_NS + (after_s + by_s) * S, node_rank=1)
    (start,) = measure(store)
    expected = {"launch": 2.0, "imports": 3.0, "setup": 1.0, "first_step": 0.0}
    for piece, seconds in expected.items():
        assert list(start.by_rank[piece].values()) == pytest.approx([seconds] * 4), piece
    assert analyze(store) == []


@pytest.mark.parametrize(
    ("sql", "cause"),
    [
        (f"UPDATE steps SET start_ns = start_ns + {60 * S}", "setup"),
        (f"UPDATE steps SET duration_ns = {90 * S} WHERE step = 1", "first_step"),
        (f"UPDATE events SET wall_ns = wall_ns - {50 * S} WHERE kind = 'run_started'", "launch"),
    ],
)
def test_a_piece_that_is_slow_for_all_names_nobody(sql: str, cause: str) -> None:
    (finding,) = analyze(later(plain_run(), sql))
    assert (finding.cause, finding.ranks) == (cause, ())


def test_slow_starts_of_several_attempts_are_one_advice() -> None:
    store = later(plain_run(), f"UPDATE events SET wall_ns = wall_ns - {50 * S} WHERE kind = 'run_started'")
    for attempt, waited_s in ((1, 30), (2, 1), (3, 40)):
        moved_ns = 100 * attempt * S
        store.event("rank_exit", attempt=attempt - 1, wall_ns=BEGIN_NS + moved_ns - waited_s * S, exit_rank=0)
        store.event("attempt_started", attempt=attempt, wall_ns=BEGIN_NS + moved_ns)
        for table, column in (("ranks", "wall_ns"), ("steps", "start_ns")):
            by_ns = moved_ns - 2 * S
            store.connection.execute(
                f"INSERT INTO {table} SELECT * REPLACE ({attempt} AS attempt, {column} + {by_ns} AS {column}) "
                f"FROM {table} WHERE attempt = 0"
            )
    (finding,) = analyze(store)
    assert finding.summary == (
        "The starts of attempts 0, 1, 3 spent 122.0 s, up to 52.0 s each, on launching the ranks."
    )
    assert (finding.attempt, finding.cost_s) == (0, pytest.approx(122.0))


def test_what_is_missing_is_said() -> None:
    for damage in ("DELETE FROM steps", "DELETE FROM ranks", "DELETE FROM events", "UPDATE ranks SET wall_ns = NULL"):
        (finding,) = analyze(later(plain_run(), damage))
        assert (finding.status, finding.kind) == ("insufficient_data", "slow_startup"), damage
