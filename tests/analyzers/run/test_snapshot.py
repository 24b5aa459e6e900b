"""Of a long attempt the newest minutes say the same as all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from analyzers.run.calls import step_ends
from analyzers.run.calls.snapshot import SNAPSHOT_EVENTS, AttemptView, take_snapshot
from analyzers.run.records.event_log import EventLog
from tests.analyzers.memory_store import MemoryStore
from tests.analyzers.standstill import SECOND, STEP_NS, World


class Asked:
    """A source that remembers how far back it was asked for steps."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.whole = 0

    def rows(self, sql: str, params: Sequence[object] = ()) -> list[tuple[object, ...]]:
        self.whole += "AND start_ns > ?" in sql and params[-1] == -step_ends.NEVER_NS
        return self.store.rows(sql, params)

    def query(self, sql: str, params: list[object]) -> dict[str, object]:
        return self.store.query(sql, params)

    def has(self, table: str) -> bool:
        return self.store.has(table)


def both(world: World, monkeypatch: pytest.MonkeyPatch) -> tuple[AttemptView, AttemptView, int]:
    """What all steps say, what the newest three say, and how often all were looked at for the latter."""
    asked = Asked(world.store)
    log = EventLog.load(world.store, SNAPSHOT_EVENTS)
    whole = take_snapshot(asked, 0, log)  # type: ignore[arg-type]
    asked.whole = 0
    monkeypatch.setattr(step_ends, "MANY_ROWS", 10)
    monkeypatch.setattr(step_ends, "RECENT_NS", 3 * STEP_NS)
    return whole, take_snapshot(asked, 0, log), asked.whole  # type: ignore[arg-type]


def counted_once(view: AttemptView) -> AttemptView:
    """How many steps were finished is told of those that were looked at."""
    ranks = {rank: replace(of, finished_steps=min(1, of.finished_steps)) for rank, of in view.ranks.items()}
    return replace(view, ranks=ranks)


@pytest.mark.parametrize("entered", [(), (0, 2), (0, 1, 2, 3)])
def test_the_newest_minutes_say_the_same(entered: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    for rank in entered:
        world.enter(rank)
    whole, recent, looks = both(world, monkeypatch)
    assert counted_once(recent) == counted_once(whole)
    assert recent.ranks[0].finished_steps < whole.ranks[0].finished_steps
    assert looks == 0


def test_a_rank_without_newest_records_needs_the_whole_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(clock_offset_ns={2: -600 * SECOND})
    whole, recent, looks = both(world, monkeypatch)
    assert recent == whole
    assert looks == 1
