"""A Chrome trace as the Trace Event Format wants it: times, nesting, arrows inside slices, counters, names, order."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from analyzers.report.chrome_trace.tracks import ATTEMPTS, CALLS, EVENTS, PHASES, RUN, STEPS
from analyzers.report.chrome_trace.write import write_trace
from tests.analyzers.memory_store import MemoryStore

MS = 1_000_000
S = 1_000 * MS
BEGIN_NS = 1_700_000_000 * S
STEP_NS = 100 * MS
Events = list[dict[str, Any]]


def call(rank: int, step: int, at_ms: float, number: int, **more: Any) -> dict[str, Any]:
    """A call of 20 ms, `at_ms` after the begin of its step; every row has the same columns."""
    issue_ns = BEGIN_NS + step * STEP_NS + int(at_ms * MS)
    row = {"attempt": 0, "rank": rank, "step": step, "op": "all_reduce", "process_group": "dp:0,1,2", "seq": number,
           "peer": None, "issue_ns": issue_ns, "end_ns": issue_ns + 20 * MS, "wait_ns": MS, "bytes": 4096}  # fmt: skip
    return row | more


def recorded(*, ranks: int = 3, attempts: tuple[tuple[int, int], ...] = ((1, 4), (3, 6))) -> MemoryStore:
    """Attempts of (first, last step); in the last step of all but the last attempt no rank ever came back."""
    store = MemoryStore()
    store.event("run_started", wall_ns=BEGIN_NS - 3 * S)
    for rank in range(ranks):
        store.add("ranks", [{"attempt": 0, "rank": rank, "wall_ns": BEGIN_NS - S, "host": f"node-{rank // 2}",
                             "device": f"cuda:{rank % 2}", "device_uuid": f"GPU-{rank}"}])  # fmt: skip
    for attempt, (first, last) in enumerate(attempts):
        for step in range(first, last + 1):
            begin_ns = BEGIN_NS + (step + 20 * attempt) * STEP_NS
            is_open = step == last and attempt + 1 < len(attempts)
            for rank in range(ranks):
                of = {"attempt": attempt, "rank": rank, "step": step}
                store.add("steps", [of | {
                    "start_ns": begin_ns, "duration_ns": None if is_open else STEP_NS, "tokens": 512,
                    "loss": 4.0 - step / 10, "memory_bytes": (rank + 1) << 20,
                }])  # fmt: skip
                store.add("spans", [of | {"kind": "forward", "start_ns": begin_ns, "end_ns": begin_ns + 40 * MS}])
                made = call(rank, step + 20 * attempt, 50 + 3 * rank, step) | of
                store.add("collectives", [made | {"end_ns": None} if is_open else made])
    return store


def events_of(store: MemoryStore, path: Path, **choice: Any) -> Events:
    """The events of the written file, after the checks that hold for every trace."""
    num = write_trace(store, path / "trace.json", **choice)
    events: Events = json.loads((path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    assert len(events) == num
    check_events(events)
    check_slices(events)
    check_flows(events)
    return events


def check_events(events: Events) -> None:
    """Fields of each kind of event, and names of all processes and threads before their use."""
    needed = {"M": {"args"}, "X": {"ts", "tid", "dur"}, "B": {"ts", "tid"}, "E": {"ts", "tid"}, "i": {"ts", "tid", "s"},
              "C": {"ts", "args"}, **{ph: {"ts", "tid", "id", "cat"} for ph in "stf"}}  # fmt: skip
    named: Counter[tuple[str, int, int | None]] = Counter()
    for event in events:
        assert needed[event["ph"]] <= set(event), event
        assert isinstance(event["pid"], int)
        assert event["name"]
        if event["ph"] == "M":
            named[event["name"], event["pid"], event.get("tid")] += 1
            continue
        assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0
        assert named["process_name", event["pid"], None] == named["process_sort_index", event["pid"], None] == 1
        if event["ph"] == "C":
            assert event["args"]
            assert all(isinstance(value, (int, float)) and math.isfinite(value) for value in event["args"].values())
        else:
            assert named["thread_name", event["pid"], event["tid"]] == 1
            assert named["thread_sort_index", event["pid"], event["tid"]] == 1
    assert set(named.values()) <= {1}


def slices_of(events: Events) -> dict[tuple[int, int], list[tuple[float, float, str]]]:
    """{thread: (begin, end, name) of its slices}; of what never ends the end is infinite."""
    found: dict[tuple[int, int], list[tuple[float, float, str]]] = {}
    for event in events:
        of = found.setdefault((event["pid"], event.get("tid", -1)), [])
        if event["ph"] in "XB":
            of.append((event["ts"], event["ts"] + event.get("dur", math.inf), event["name"]))
        elif event["ph"] == "E":  # ends the slice that was begun last
            place = max(place for place, slice_ in enumerate(of) if slice_[1] == math.inf)
            assert event["ts"] >= of[place][0]
            assert event["name"] == of[place][2]
            of[place] = (of[place][0], event["ts"], of[place][2])
    return found


def check_slices(events: Events) -> None:
    """Slices of a thread nest or follow one another."""
    for thread, of in slices_of(events).items():
        until: list[float] = []
        for begin, end, name in sorted(of, key=lambda slice_: (slice_[0], -slice_[1])):
            while until and until[-1] <= begin + 0.001:
                until.pop()
            assert not until or end <= until[-1] + 0.001, (thread, name)
            until.append(end)


def check_flows(events: Events) -> None:
    """Each id has one start and one end, in the order of time, and every point of it lies inside a slice."""
    slices = slices_of(events)
    flows: dict[int, Events] = {}
    for event in events:
        if event["ph"] in "stf":
            flows.setdefault(event["id"], []).append(event)
            of = slices[event["pid"], event["tid"]]
            assert any(begin <= event["ts"] < end for begin, end, _ in of), event
    for points in flows.values():
        assert "".join(point["ph"] for point in points) == "s" + "t" * (len(points) - 2) + "f"
        assert [point["ts"] for point in points] == sorted(point["ts"] for point in points)
        assert len({(point["cat"], point["name"]) for point in points}) == 1
        assert points[-1]["bp"] == "e"
        assert len({point["pid"] for point in points}) == len(points), "one point a rank"


def arrows(events: Events) -> list[list[int]]:
    """The ranks along each arrow."""
    found: dict[int, list[int]] = {}
    for event in events:
        if event["ph"] in "stf":
            found.setdefault(event["id"], []).append(event["pid"])
    return list(found.values())


def test_an_event_before_the_first_rank_has_no_negative_time(tmp_path: Path) -> None:
    events = events_of(recorded(), tmp_path)
    (started,) = (event for event in events if event["name"] == "run_started" and event["ph"] == "i")
    assert (started["ts"], started["pid"], started["tid"], started["s"]) == (0, RUN, EVENTS, "g")
    first = min(event["ts"] for event in events if event["ph"] == "X")
    assert first == pytest.approx((3 * S + STEP_NS) / 1e3)


def test_arrows_join_the_ranks_of_one_call_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    events = events_of(recorded(), tmp_path)
    assert arrows(events) == [[0, 1, 2]] * 8, "four calls of each attempt, also those that never ended"
    names = Counter(event["name"] for event in events if event["ph"] == "s")
    assert names["dp:0,1,2 number 3"] == 2, "the same number in both attempts: two arrows"
    assert arrows(events_of(recorded(), tmp_path, ranks=[0, 2], attempt=1)) == [[0, 2]] * 4
    assert arrows(events_of(recorded(), tmp_path, ranks=[1])) == []


def test_of_a_transfer_the_arrow_leads_from_the_send_to_the_receive(tmp_path: Path) -> None:
    store = MemoryStore()
    of = {"process_group": "pp:0,1"}
    store.add("collectives", [
        call(0, 1, 10, 0, op="send", peer=1, **of), call(1, 1, 5, 0, op="recv", peer=0, **of),
        call(1, 1, 30, 0, op="send", peer=0, **of), call(0, 1, 40, 0, op="recv", peer=1, **of),
        call(0, 1, 70, 1, op="recv", peer=None, **of), call(1, 1, 72, 1, op="recv", peer=None, **of),
    ])  # fmt: skip
    events = events_of(store, tmp_path)
    assert arrows(events) == [[0, 1], [1, 0]]
    begin, end = (event["ts"] for event in events if event["ph"] in "sf" and event["id"] == 1)
    assert (begin, end) == (5_000, pytest.approx(19_999.999))


def test_calls_that_cannot_be_joined_have_no_arrow(tmp_path: Path) -> None:
    store = MemoryStore()
    store.add("collectives", [
        *(call(rank, 1, 10, None, process_group="a") for rank in range(2)),  # type: ignore[arg-type]
        *(call(rank, 1, 20, 4, process_group=None) for rank in range(2)),
        *(call(rank, 1, 30, 5, process_group="b") for rank in (0, 0, 1)),
        *(call(rank, 1, 40, 6, process_group="c", end_ns=BEGIN_NS) for rank in range(2)),
    ])  # fmt: skip
    assert arrows(events_of(store, tmp_path)) == []


def test_overlapping_calls_have_a_lane_each_and_arrows_lead_to_it(tmp_path: Path) -> None:
    store = MemoryStore()
    store.add("collectives", [call(rank, 1, 10 + number, number) for rank in range(2) for number in range(3)])
    events = events_of(store, tmp_path)
    assert [(event["name"][-1], event["tid"]) for event in events if event["ph"] == "s"] == [
        (str(number), CALLS + number) for number in range(3)
    ]


def test_what_never_ended_ends_with_its_attempt_where_another_follows(tmp_path: Path) -> None:
    events = events_of(recorded(), tmp_path)
    of = slices_of(events)
    (hung,) = (slice_ for slice_ in of[0, STEPS] if slice_[1] - slice_[0] != pytest.approx(STEP_NS / 1e3))
    assert hung[2] == "step 4"
    assert hung[1] < min(begin for begin, _, name in of[0, STEPS] if name == "step 5")
    attempts = of[RUN, ATTEMPTS]
    assert [name for _, _, name in attempts] == ["attempt 0", "attempt 1"]
    assert attempts[0][1] == pytest.approx(hung[1], abs=0.01)
    assert hung[1] < attempts[1][0]
    alone = events_of(recorded(), tmp_path, attempt=0)
    assert {event["name"] for event in alone if event["ph"] == "B"} == {"step 4", "all_reduce"}
    assert not [event for event in alone if event["ph"] == "E"]


def counters_of(events: Events) -> dict[tuple[int, str], list[float]]:
    found: dict[tuple[int, str], list[float]] = {}
    for event in events:
        if event["ph"] == "C":
            (value,) = event["args"].values()
            found.setdefault((event["pid"], event["name"]), []).append(value)
    return found


def test_memory_loss_speed_and_load_of_devices_are_counters(tmp_path: Path) -> None:
    store = recorded(attempts=((1, 4),))
    store.connection.execute("UPDATE steps SET loss = 'nan'::DOUBLE WHERE step = 2")
    store.add("health", [
        {"attempt": 0, "rank": -1, "sample_ns": BEGIN_NS + second * S, "node": "node-1", "device": device,
         "gpu_utilization_ratio": gpu, "cpu_utilization_ratio": cpu}
        for second in range(2)
        for device, gpu, cpu in (("GPU-2", 0.5, None), ("GPU-9", 0.25, None), ("host", None, 0.75))
    ])  # fmt: skip
    events = events_of(store, tmp_path)
    found = counters_of(events)
    (node,) = (event["pid"] for event in events if event["ph"] == "M" and event["args"].get("name") == "node node-1")
    assert [found[rank, "memory (MiB)"] for rank in range(3)] == [[rank + 1.0] * 4 for rank in range(3)]
    assert found[RUN, "loss"] == pytest.approx([3.9, 3.7, 3.6]), "the format has no NaN"
    assert found[RUN, "tokens/s"] == pytest.approx([3 * 512 / 0.1] * 4)
    assert (found[2, "GPU-2 busy (%)"], found[node, "GPU-9 busy (%)"], found[node, "CPU busy (%)"]) == (
        [50.0] * 2, [25.0] * 2, [75.0] * 2)  # fmt: skip


def test_a_step_that_ran_twice_has_the_speed_of_each_time(tmp_path: Path) -> None:
    store = recorded(ranks=1, attempts=((1, 2),))
    again = {"attempt": 0, "rank": 0, "step": 2, "start_ns": BEGIN_NS + 900 * MS, "duration_ns": 2 * STEP_NS}
    store.add("steps", [again | {"tokens": 512, "loss": 1.0}])
    assert counters_of(events_of(store, tmp_path))[RUN, "tokens/s"] == pytest.approx([5120, 5120, 2560])


def test_of_chosen_steps_nothing_lies_outside(tmp_path: Path) -> None:
    store = recorded(attempts=((1, 9),))
    store.event("ingest_lag", wall_ns=BEGIN_NS + 4 * STEP_NS + MS)
    store.add("health", [
        {"attempt": 0, "rank": -1, "sample_ns": BEGIN_NS + step * STEP_NS + MS, "node": "n", "device": "host",
         "cpu_utilization_ratio": step / 10}
        for step in range(1, 10)
    ])  # fmt: skip
    events = events_of(store, tmp_path, steps=(4, 5))
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert max(times) - min(times) <= 2 * STEP_NS / 1e3
    assert [event["name"] for event in events if event["ph"] == "i"] == ["ingest_lag"]
    (load,) = (values for (_, name), values in counters_of(events).items() if name == "CPU busy (%)")
    assert load == pytest.approx([40, 50])
    (attempt,) = slices_of(events)[RUN, ATTEMPTS]
    assert attempt[1] - attempt[0] == pytest.approx(2 * STEP_NS / 1e3)


def test_processes_and_threads_have_names_labels_and_an_order(tmp_path: Path) -> None:
    events = events_of(recorded(), tmp_path)
    of = {(event["name"], event["pid"], event.get("tid")): next(iter(event["args"].values()))
          for event in events if event["ph"] == "M"}  # fmt: skip
    assert [of["process_name", pid, None] for pid in (RUN, 0, 2)] == ["run", "rank 0", "rank 2"]
    assert of["process_labels", 2, None] == "node-1, cuda:0"
    assert of["thread_name", 1, PHASES] == "phases"
    assert sorted((RUN, 0, 1, 2), key=lambda pid: of["process_sort_index", pid, None]) == [RUN, 0, 1, 2]
    assert sorted((CALLS, STEPS, PHASES), key=lambda tid: of["thread_sort_index", 0, tid]) == [STEPS, PHASES, CALLS]


def test_a_record_without_a_time_is_left_out(tmp_path: Path) -> None:
    store = recorded(attempts=((1, 2),))
    store.connection.execute("UPDATE spans SET start_ns = 0 WHERE step = 1")
    store.connection.execute("UPDATE events SET wall_ns = 0")
    events = events_of(store, tmp_path)
    assert len([event for event in events if event["name"] == "forward"]) == 3
    assert not [event for event in events if event["ph"] == "i"]
