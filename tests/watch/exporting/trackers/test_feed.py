"""Each finding is handed to a tracker once, whenever it comes into the store."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.analyzers.memory_store import MemoryStore
from watch.exporting.trackers.feed import TrackerFeed
from watch.exporting.trackers.tracker import TrackedStep

SECOND_NS = 10**9
NOON_NS = 1_800_000_000 * SECOND_NS


class Told:
    """A tracker that remembers the ids and statuses of findings."""

    place = next_step = ""

    def __init__(self) -> None:
        self.findings: list[tuple[str, str]] = []

    def step(self, step: TrackedStep) -> None: ...

    def rolled_back(self, step: int, wall_s: float) -> None: ...

    def finding(self, finding: Mapping[str, Any], wall_s: float, *, is_news: bool = True) -> None:
        self.findings.append((finding["id"], finding["status"]))

    def flush(self) -> None: ...

    def finish(self, summary: Mapping[str, str | float]) -> None: ...


def add(store: MemoryStore, at_s: int, name: str, status: str = "fired") -> None:
    store.event("finding", wall_ns=NOON_NS + at_s * SECOND_NS, id=name, status=status)


def restarted(feed: TrackerFeed, tracker: Told) -> TrackerFeed:
    """The feed of the next process, as `follow` makes it from the file of progress."""
    return TrackerFeed(tracker, progress=json.loads(json.dumps(feed.progress)))


@pytest.mark.parametrize("restarts", [False, True])
def test_a_finding_that_comes_later_than_a_newer_one_is_handed_over(restarts: bool) -> None:
    store, tracker = MemoryStore(), Told()
    feed = TrackerFeed(tracker)
    add(store, 5, "straggler-0-r0")
    assert feed.findings(store) == 1
    add(store, 1, "straggler-0-r9")
    add(store, 5, "straggler-0-r9", "ok")  # at the same time as the first
    if restarts:
        feed = restarted(feed, tracker)
    assert feed.findings(store) == 2
    for of in (feed, restarted(feed, tracker)):
        assert of.findings(store) == 0
    assert tracker.findings == [("straggler-0-r0", "fired"), ("straggler-0-r9", "fired"), ("straggler-0-r9", "ok")]


def test_progress_does_not_grow_with_the_run() -> None:
    store, tracker = MemoryStore(), Told()
    feed = TrackerFeed(tracker)
    for n in range(5):
        add(store, n * 50, f"spike-0-{n}")
        assert feed.findings(store) == 1
    assert len(feed.progress["told"]) == 2
    assert restarted(feed, tracker).findings(store) == 0


def test_progress_of_an_older_version_repeats_nothing() -> None:
    store, tracker = MemoryStore(), Told()
    add(store, 1, "hang-0")
    add(store, 5, "hang-0", "ok")
    feed = TrackerFeed(tracker, progress={"done": {}, "last_step": 0, "told_ns": NOON_NS + 5 * SECOND_NS})
    assert feed.findings(store) == 0
    feed = restarted(feed, tracker)
    assert feed.findings(store) == 0
    add(store, 9, "hang-1")
    assert feed.findings(store) == 1
    assert restarted(feed, tracker).findings(store) == 0
    assert tracker.findings == [("hang-1", "fired")]
