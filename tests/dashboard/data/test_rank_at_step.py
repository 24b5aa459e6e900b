"""One rank in one step: account beside its peers', calls, events, host and device, log lines, stack."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyzers.hangs.stacks import read_stack
from dashboard.data.rank_at_step import rank_at_step
from dashboard.data.run_logs import LogLine, lines_at
from dashboard.views.rank_and_step import load_stack
from tests.analyzers.memory_store import MemoryStore

MS = 1_000_000


def recorded() -> MemoryStore:
    """Two stages of two ranks; rank 1 computes twice as long as rank 0; step 7 ran in two attempts."""
    store = MemoryStore()
    store.add("ranks", [
        {"attempt": attempt, "rank": rank, "wall_ns": 1 + attempt, "host": f"node-{rank}", "pp": rank // 2,
         "device": f"cuda:{attempt}"}
        for attempt in range(2)
        for rank in range(4)
    ])  # fmt: skip
    store.add("steps", [
        {"attempt": attempt, "rank": rank, "step": 7, "start_ns": (1 + attempt) * 1000 * MS, "duration_ns": 100 * MS,
         "forward_ns": (20 + 20 * rank) * MS, "forward_wait_ns": 0, "collective_wait_ns": 5 * MS}
        for attempt in range(2)
        for rank in range(4)
    ])  # fmt: skip
    return store


def test_a_rank_is_shown_beside_the_peers_of_its_stage_in_its_newest_attempt() -> None:
    found = rank_at_step(recorded(), rank=1, step=7)
    assert (found["attempt"], found["num_peers"]) == (1, 1)
    assert found["account"]["forward"] == (40, 20)
    assert found["account"]["step"] == (100, 100)


def test_peers_are_those_of_the_attempt() -> None:
    store = recorded()
    store.add("ranks", [
        {"attempt": 2, "rank": rank, "wall_ns": 3, "host": f"node-{rank}", "pp": rank % 2, "device": "cuda:2"}
        for rank in range(4)
    ])  # fmt: skip
    assert rank_at_step(store, rank=1, step=7)["account"]["forward"] == (40, 20), "a later mesh changes no peer"
    store.connection.execute("DELETE FROM ranks WHERE attempt = 1")
    assert rank_at_step(store, rank=1, step=7)["account"]["forward"] == (40, None), "unknown is no peer"


def test_host_and_device_are_those_of_the_attempt() -> None:
    store = recorded()
    assert rank_at_step(store, rank=3, step=7)["place"] == ("node-3", "cuda:1")
    store.connection.execute("UPDATE ranks SET device = NULL WHERE attempt = 1 AND rank = 3")
    assert rank_at_step(store, rank=3, step=7)["place"] is None, "unknown is no device"
    store.drop("ranks")
    assert rank_at_step(store, rank=3, step=7)["place"] is None


def test_a_call_that_never_ended_comes_first_and_events_are_of_the_rank_or_a_node() -> None:
    store = recorded()
    of = {"attempt": 1, "rank": 2, "step": 7, "process_group": "dp:2,3", "bytes": 8, "caller": "a.py:1 f"}
    store.add("collectives", [
        of | {"op": op, "seq": number, "issue_ns": (2000 + number) * MS, "end_ns": end_ns, "wait_ns": 3 * MS}
        for number, (op, end_ns) in enumerate((("all_reduce", 2050 * MS), ("barrier", None)))
    ])  # fmt: skip
    for rank in (2, 3, -1):
        store.event("checkpoint", attempt=1, rank=rank, step=7, wall_ns=2000 * MS, tier="disk")
    store.event("checkpoint", attempt=0, rank=2, step=7, wall_ns=1000 * MS)
    found = rank_at_step(store, rank=2, step=7)
    assert [(call["operation"], call["in flight (ms)"]) for call in found["calls"]] == [
        ("barrier", None), ("all_reduce", 50.0)]  # fmt: skip
    assert sorted(event["from"] for event in found["events"]) == ["a node", "the rank"]
    assert {event["fields"] for event in found["events"]} == {"tier=disk"}, "as on the page of events"


def test_a_rank_without_the_step_has_nothing() -> None:
    store = recorded()
    assert rank_at_step(store, rank=9, step=7)["attempt"] is None
    store.drop("steps")
    assert rank_at_step(store, rank=1, step=7)["attempt"] is None


@pytest.mark.parametrize(
    ("of", "is_shown"),
    [
        ({}, True), ({"attempt": None}, True), ({"attempt": 0}, False), ({"rank": 2}, False), ({"rank": None}, False),
        ({"step": 8}, False), ({"step": None}, False),
    ],
)  # fmt: skip
def test_only_lines_that_are_known_to_be_of_the_rank_and_step_are_shown(
    of: dict[str, int | None], is_shown: bool
) -> None:
    place = {"attempt": 1, "rank": 1, "step": 7} | of
    line = LogLine(source="a.log", line=1, text="x", attempt=place["attempt"], rank=place["rank"], step=place["step"])
    assert lines_at([line], rank=1, step=7, attempt=1) == [line] * is_shown


def test_the_stack_is_the_newest_of_the_newest_attempt(tmp_path: Path) -> None:
    stacks = tmp_path / "stacks"
    stacks.mkdir()
    (stacks / "attempt-1-rank-00001.txt").write_text(
        'Current thread 0x1 (most recent call first):\n  File "/a/data.py", line 3 in old\n'
        'Current thread 0x1 (most recent call first):\n  File "/a/data.py", line 9 in read\n'
        '  File "/a/train.py", line 2 in main\n',
        encoding="utf-8",
    )
    frames = ["a/data.py:9 read", "a/train.py:2 main"]
    assert load_stack(recorded(), str(stacks), 1, 7) == (1, frames) == (1, read_stack(stacks, 1, 1))
    assert load_stack(recorded(), str(stacks), 0, 7) == (1, []), "of another rank"
    assert load_stack(recorded(), str(stacks), 1, 8) == (0, []), "it never had that step"
    assert load_stack(recorded(), str(tmp_path / "none"), 1, 7) == (1, [])


def test_the_stack_of_a_hang_is_shown_though_the_step_ran_again(tmp_path: Path) -> None:
    stack = 'Current thread 0x1 (most recent call first):\n  File "/a/data.py", line 9 in read\n'
    (tmp_path / "attempt-0-rank-00001.txt").write_text(stack, encoding="utf-8")
    (tmp_path / "attempt-1-rank-00001.txt").touch()
    assert load_stack(recorded(), str(tmp_path), 1, 7) == (0, ["a/data.py:9 read"])
