"""Captures in a report: what a trace shows, what a suspect spends beyond its peer, and what is damaged or removed."""

from __future__ import annotations

from typing import Any

from analyzers.profiling.captures import against_peer, capture_line, captures
from analyzers.run.records.event_log import Event, EventLog

PARTS = {"step": 20.0, "compute": 15.0, "communication": 4.0, "exposed": 2.0, "idle": 3.0, "data": 0.0}


def event(kind: str, *, rank: int = -1, **detail: Any) -> Event:
    return Event(1, 0, rank, None, kind, detail)


def operators(**self_ms: float) -> list[dict[str, Any]]:
    return [
        {"name": f"aten::{name}", "phase": "forward", "device": False, "self_ms": ms, "calls": 1}
        for name, ms in self_ms.items()
    ]


def capture(rank: int, rows: Any, *, request: int | None = 7, **changed: Any) -> list[Event]:
    path = f"traces/attempt-0/rank-{rank}.json.gz"
    both = {"path": path, "first_step": 40, "last_step": 44, "request": request, "reason": "Rank 3 is slow."}
    return [
        event("profile_captured", rank=rank, bytes=1000, removed=[], **both),
        event("profile_summary", capture_rank=rank, **(both | {"parts_ms": PARTS, "operators": rows} | changed)),
    ]


ASKED = event("profile_requested", request=7, ranks=[3, 1])


def test_what_the_suspect_spends_beyond_its_peer_is_named_the_most_first() -> None:
    log = EventLog([ASKED, *capture(3, operators(add=2.5, mm=15, mul=1)), *capture(1, operators(mm=3, add=2, mul=1))])
    found = against_peer(log, attempt=0, rank=3)
    assert found["profile_operators"] == ["aten::mm in forward +12 ms", "aten::add in forward +0.5 ms"]
    assert (found["profile_peer_rank"], found["profile_first_step"], found["profile_last_step"]) == (1, 40, 44)
    assert found["profile_trace"].endswith("rank-3.json.gz")
    assert against_peer(log, attempt=0, rank=1) == {}, "the peer is not the suspect"
    assert against_peer(log, attempt=1, rank=3) == {}


def test_an_operator_that_the_peers_list_lacks_counts_as_its_last_one() -> None:
    log = EventLog([ASKED, *capture(3, operators(sort=9)), *capture(1, operators(mm=3, add=2))])
    assert against_peer(log, attempt=0, rank=3)["profile_operators"] == ["aten::sort in forward +7 ms"]


def test_ranks_that_do_not_differ_name_no_operator() -> None:
    log = EventLog([ASKED, *capture(3, operators(mm=3.01)), *capture(1, operators(mm=3))])
    assert "profile_operators" not in against_peer(log, attempt=0, rank=3)


def test_without_a_trace_of_both_nothing_is_compared() -> None:
    rows = operators(mm=15)
    for log in ([ASKED, *capture(3, rows)], [*capture(3, rows), *capture(1, rows)],
                [ASKED, *capture(3, rows), *capture(1, rows, request=8)],
                [ASKED, *capture(3, rows), *capture(1, rows, problem="is cut off")]):  # fmt: skip
        assert against_peer(EventLog(log), attempt=0, rank=3) == {}


def test_damaged_summaries_are_read_as_far_as_they_go() -> None:
    for rows in (None, 3, [None, {"name": 3}, {"name": "x", "self_ms": "long"}, {"name": "x", "self_ms": True}]):
        log = EventLog([ASKED, *capture(3, rows, parts_ms=[1]), *capture(1, rows)])
        assert "profile_operators" not in against_peer(log, attempt=0, rank=3)
        assert captures(log)[0]["parts_ms"] is None


def test_captures_are_listed_with_their_parts_and_what_is_not_known() -> None:
    lost = event("profile_captured", rank=0, path="traces/b", first_step=1, last_step=2, removed=["traces/a"])
    gone = event("profile_captured", rank=0, path="traces/a", first_step=0, last_step=1, removed=[])
    read, unread, removed = captures(EventLog([*capture(3, operators(mm=15, add=1)), lost, gone]))
    assert (read["rank"], read["is_kept"], read["top_operators"][0]) == (3, True, "aten::mm in forward 15 ms")
    assert capture_line(read).startswith(
        "rank 3, steps 40 to 44: step 20 ms, compute 15 ms, exposed communication 2 ms"
    )
    assert capture_line(unread) == "rank 0, steps 1 to 2: not read. traces/b"
    assert not removed["is_kept"]
    assert capture_line(removed).endswith("removed, beyond profiler.budget_mb")


def test_a_trace_that_was_not_read_to_its_end_is_listed_with_what_it_lacks() -> None:
    cut, empty = (
        captures(EventLog(capture(3, operators(mm=15), problem="is cut off", parts_ms=parts)))[0]
        for parts in (PARTS, {"step": "nan"})
    )
    assert "idle 3 ms (is cut off). traces/" in capture_line(cut)
    assert capture_line(empty).startswith("rank 3, steps 40 to 44: is cut off. traces/")
