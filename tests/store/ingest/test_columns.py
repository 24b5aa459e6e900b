"""What is on a tape and in an event is in the store: values, NULLs, names, times."""

from __future__ import annotations

import json
import math
import random
import time
from pathlib import Path
from typing import Any

import pytest

from probes.tape.format.schema import TABLES, UNSET, Table
from probes.tape.format.writer import COMPLETE, OPEN, TapeWriter
from probes.tape.rundir import NODE_RANK
from store import Ingester, Store
from store.ddl import store_columns
from store.ingest.columns import clean_json
from tests.factories import RankWriter, empty_run

TAPE_TABLES = [table for table in TABLES.values() if table.source == "tape"]
EVENT_TABLES = [table for table in TABLES.values() if table.source == "event"]


def random_value(kind: str, dice: random.Random) -> Any:
    values: dict[str, Any] = {
        "i64": dice.randrange(-(2**60), 2**60),
        "i32": dice.randrange(-(2**31) + 1, 2**31),
        "f64": dice.choice([dice.uniform(-1e9, 1e9), math.inf, -math.inf, 0.0, 5e-324]),
        "bool": dice.random() < 0.5,
        "name": dice.choice(["all_reduce", "größe", "a'b\"c", "x" * 600]),
        "text": dice.choice(["", "plain", "größe", "a\x00b"]),
        "json": dice.choice([{"factor_ratio": 1.5}, {}, {"nested": [1, {"a": None}]}]),
        "list_i64": dice.choice([[], [1, 2, 3], [-1, 2**62]]),
    }
    return values[kind]


def test_a_checksum_may_have_any_of_its_64_bits_where_a_counter_may_not(tmp_path: Path) -> None:
    run, hashes = empty_run(tmp_path), [-(2**63) + 1, -(2**62), 0, 2**62, 2**63 - 1]
    writer = RankWriter(run, rank=0)
    for value in hashes:
        writer.append("fingerprints", COMPLETE, step=value, hash=value, tensor="(all)")
    with Ingester(run) as ingester:
        ingester.tick()
    with Store.open(run, catch_up=False) as store:
        found = store.rows("SELECT step, hash FROM fingerprints ORDER BY hash")
    assert found == [(0 if value == 0 else None, value) for value in hashes]


@pytest.mark.parametrize("table", TAPE_TABLES, ids=lambda table: table.name)
def test_every_tape_table_comes_back(tmp_path: Path, table: Table) -> None:
    dice = random.Random(table.name)
    run = empty_run(tmp_path)
    writer = RankWriter(run, rank=5, attempt=2)
    expected = []
    for _ in range(200):
        row = {c.name: random_value(c.type, dice) for c in table.columns if dice.random() < 0.7}
        writer.append(table.name, COMPLETE, **{k: int(v) if isinstance(v, bool) else v for k, v in row.items()})
        expected.append([2, 5, *(seen(row.get(c.name), c.type) for c in table.columns)])
    with Ingester(run) as ingester:
        assert ingester.tick().rows[table.name] == 200
    header_anchor = anchor(writer.directory / f"{table.name}.00000.tape")
    times = [i + 2 for i, column in enumerate(table.columns) if column.is_time]
    for row_ in expected:
        for i in times:
            row_[i] = None if row_[i] is None else row_[i] + header_anchor
    with Store.open(run, catch_up=False) as store:
        columns = ", ".join(f'"{c.name}"' for c in store_columns(table))
        found = [list(row) for row in store.rows(f"SELECT {columns} FROM {table.name}")]
    assert sorted(found, key=repr) == sorted(expected, key=repr)


def seen(value: Any, kind: str) -> Any:
    return value[:512] if kind == "name" and value is not None else value


def anchor(path: Path) -> int:
    from probes.tape.format.reader import read_header

    return read_header(path).wall_minus_mono_ns


@pytest.mark.parametrize("table", EVENT_TABLES, ids=lambda table: table.name)
def test_every_event_table_comes_back(tmp_path: Path, table: Table) -> None:
    dice = random.Random(table.name)
    run = empty_run(tmp_path)
    writer = RankWriter(run, rank=0)
    expected = []
    for number in range(100):
        row = {c.name: random_value(c.type, dice) for c in table.columns if dice.random() < 0.7}
        writer.events.write(table.event_kind, step=number, wall_ns=number * 10, **row)
        expected.append([0, 0, number * 10, number, *(row.get(c.name) for c in table.columns)])
    columns = ", ".join(f'"{c.name}"' for c in store_columns(table))
    with Store.open(run) as store:
        found = store.rows(f"SELECT {columns} FROM {table.name} WHERE step IS NOT NULL ORDER BY step")
        (count,) = store.rows("SELECT count(*) FROM events WHERE kind = ? AND step IS NOT NULL", [table.event_kind])[0]
    json_at = [i + 4 for i, column in enumerate(table.columns) if column.type == "json"]
    plain = [[json.loads(v) if i in json_at and v is not None else v for i, v in enumerate(row)] for row in found]
    assert plain == expected
    assert count == 100


def test_wrong_types_in_an_event_are_null(tmp_path: Path) -> None:
    run = empty_run(tmp_path)
    writer = RankWriter(run, rank=1)
    wrong: list[Any] = ["text", None, [], {}, True, 1.5, 10**30, math.nan, ["a"], [1, None], "\ud800"]
    for value in wrong:
        line = {"kind": "checkpoint", "attempt": value, "rank": value, "wall_ns": value, "step": value}
        line |= {column.name: value for column in TABLES["checkpoints"].columns}
        with (writer.directory / "events.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    with Store.open(run) as store:
        found = store.rows("SELECT attempt, rank, wall_ns, step, bytes, tier FROM checkpoints")
    assert len(found) == len(wrong)
    assert all(row[:5] == (0, 1, None, None, None) for row in found)
    assert {row[5] for row in found} == {None, "text", "?"}


@pytest.mark.parametrize("value", [math.nan, -math.inf, 10**400, "\ud800", {"\udfff": [1e308 * 10]}, "a\x00"])
def test_any_json_value_becomes_json_that_the_store_takes(tmp_path: Path, value: Any) -> None:
    text = clean_json({"value": value})
    assert text.encode()
    json.loads(text)
    run = empty_run(tmp_path)
    RankWriter(run, rank=0).events.write("finding", evidence=value)
    with Store.open(run) as store:
        assert store.rows("SELECT count(detail ->> 'kind') FROM events") == [(2,)]
        assert store.rows("SELECT count(*) FROM findings WHERE evidence IS NOT NULL") == [(1,)]


@pytest.mark.parametrize("depth", [100, 400, 900, 5000])
def test_an_event_nested_too_deeply_stops_nothing(tmp_path: Path, depth: int) -> None:
    run = empty_run(tmp_path)
    writer = RankWriter(run, rank=0)
    with (writer.directory / "events.jsonl").open("a") as file:
        file.write('{"kind": "finding", "evidence": ' + "[" * depth + "]" * depth + "}\n")
    writer.event("checkpoint", step=1)
    with Store.open(run) as store:
        assert store.rows("SELECT count(*) FROM checkpoints") == [(1,)]
        assert store.rows("SELECT count(*) FROM findings") in ([(1,)], [(0,)])


def test_nan_is_a_value_and_unset_is_null(tmp_path: Path) -> None:
    run = empty_run(tmp_path)
    writer = RankWriter(run, rank=0)
    for step, loss in ((1, math.nan), (2, -math.nan), (3, math.inf), (4, 0.0), (5, UNSET["f64"])):
        writer.append("steps", COMPLETE, step=step, loss=loss)
    with Store.open(run) as store:
        assert store.rows("SELECT step FROM steps WHERE loss IS NULL") == [(5,)]
        assert store.rows("SELECT step FROM steps WHERE isnan(loss) ORDER BY step") == [(1,), (2,)]
        assert store.rows("SELECT step FROM steps WHERE isinf(loss)") == [(3,)]


def test_all_segments_of_a_rank_get_the_anchor_of_its_first(tmp_path: Path) -> None:
    """The wall clock jumps an hour between two segments: durations over the jump stay what they were."""
    run = empty_run(tmp_path)
    writer = RankWriter(run, rank=0)
    begin = time.monotonic_ns()
    count = 3000  # two segments
    for step in range(count):
        writer.append("steps", COMPLETE, step=step, start_ns=begin + step)
    second = writer.directory / "steps.00001.tape"
    blob = second.read_bytes()
    at = blob.index(b'"wall_ns":') + len(b'"wall_ns":')
    end = blob.index(b"}", at)
    later = str(int(blob[at:end]) + 3600 * 10**9).encode()
    assert len(later) == end - at
    second.write_bytes(blob[:at] + later + blob[end:])
    with Store.open(run) as store:
        (span,) = store.rows("SELECT max(start_ns) - min(start_ns) FROM steps")[0]
    assert span == count - 1


def test_ranks_may_number_their_names_differently(tmp_path: Path) -> None:
    run = empty_run(tmp_path)
    for rank, ops in ((0, ["send", "recv", "barrier"]), (1, ["barrier", "send", "recv"])):
        writer = RankWriter(run, rank=rank)
        for seq, op in enumerate(ops):
            writer.append("collectives", COMPLETE, seq=seq, op=op)
    with Store.open(run) as store:
        assert store.rows("SELECT rank, op, caller FROM collectives ORDER BY rank, seq") == [
            *((0, op, None) for op in ("send", "recv", "barrier")),
            *((1, op, None) for op in ("barrier", "send", "recv")),
        ]


def test_an_unexplained_name_is_a_question_mark(tmp_path: Path) -> None:
    run = empty_run(tmp_path)
    writer = RankWriter(run, rank=0)
    writer.append("spans", COMPLETE, kind="forward")
    writer.append("spans", COMPLETE, kind=4_000_000_000)
    writer.append("spans", COMPLETE, kind=17)
    with Store.open(run) as store:
        assert {row[0] for row in store.rows("SELECT kind FROM spans")} == {"forward", "?17", "?4000000000"}


def test_a_name_written_after_the_last_tick_is_found(tmp_path: Path) -> None:
    run = empty_run(tmp_path)
    writer = RankWriter(run, rank=0)
    with Ingester(run) as ingester:
        for kind in ("data", "forward", "backward"):
            writer.append("spans", COMPLETE, kind=kind)
            ingester.tick()
    with Store.open(run) as store:
        assert [row[0] for row in store.rows("SELECT kind FROM spans")] == ["data", "forward", "backward"]


def test_open_records_are_shown_until_they_end(tmp_path: Path) -> None:
    run = empty_run(tmp_path)
    writer = RankWriter(run, rank=0)
    slots = [writer.append("collectives", OPEN, seq=seq, op="all_reduce", issue_ns=seq) for seq in range(3)]
    with Ingester(run) as ingester:
        assert ingester.tick().rows.get("collectives", 0) == 0
        assert seqs(run, "end_ns IS NULL") == [0, 1, 2]
        writer.complete("collectives", slots[1], end_ns=7)
        assert ingester.tick().rows == {"collectives": 1}
        assert seqs(run, "end_ns IS NULL") == [0, 2]
        assert seqs(run, "end_ns IS NOT NULL") == [1]
        assert ingester.tick().rows == {}
        for slot in (slots[0], slots[2]):
            writer.complete("collectives", slot, end_ns=8)
        ingester.tick()
        assert seqs(run, "end_ns IS NOT NULL") == [0, 1, 2]
        assert seqs(run, "end_ns IS NULL") == []


def test_an_open_record_whose_values_change_is_updated(tmp_path: Path) -> None:
    """A step that waits for its late loss has a duration before it is complete."""
    run = empty_run(tmp_path)
    writer = RankWriter(run, rank=0)
    slot = writer.append("steps", OPEN, step=1)
    with Ingester(run) as ingester:
        ingester.tick()
        writer.tape("steps").set(slot, "duration_ns", 5)
        ingester.tick()
        with Store.open(run) as store:
            assert store.rows("SELECT step, duration_ns, loss FROM steps") == [(1, 5, None)]
        writer.complete("steps", slot, loss=2.0)
        ingester.tick()
    with Store.open(run) as store:
        assert store.rows("SELECT step, duration_ns, loss FROM steps") == [(1, 5, 2.0)]


def test_a_place_claimed_and_written_later_is_not_lost(tmp_path: Path) -> None:
    """Two threads: the one with the earlier place stores its record after the other one's was ingested."""
    run = empty_run(tmp_path)
    writer = RankWriter(run, rank=0)
    tape = writer.tape("gradients")
    writer.append("gradients", COMPLETE, step=0)
    late = next(tape._numbers)
    writer.append("gradients", COMPLETE, step=2)
    with Ingester(run) as ingester:
        assert ingester.tick().rows["gradients"] == 2
        row = tape.unset_row()
        row[0] = 1
        tape.rewrite(late, COMPLETE, *row)
        assert ingester.tick().rows == {"gradients": 1}
        assert ingester.tick().rows == {}
    with Store.open(run) as store:
        assert store.rows("SELECT step FROM gradients ORDER BY step") == [(0,), (1,), (2,)]


def test_a_record_left_open_three_segments_ago_stays_open(tmp_path: Path) -> None:
    run = empty_run(tmp_path)
    writer = RankWriter(run, rank=0)
    writer.append("steps", OPEN, step=0)
    with Ingester(run) as ingester:
        for step in range(1, 6000):
            writer.append("steps", COMPLETE, step=step)
            if step % 500 == 0:
                ingester.tick()
        ingester.tick()
        assert len(list(writer.directory.glob("steps.*.tape"))) > 4
        assert ingester.tick().rows == {}
    with Store.open(run) as store:
        assert store.rows("SELECT count(*), min(step) FROM steps") == [(6000, 0)]
        assert store.rows("SELECT done, pending FROM n0.ingest_positions WHERE segment = 0") == [(True, [0])]


def test_health_of_a_node(tmp_path: Path) -> None:
    run = empty_run(tmp_path)
    folder = run.node_dir(0)
    folder.mkdir(parents=True)
    tape = TapeWriter(folder, TABLES["health"], rank=NODE_RANK, attempt=0)
    row = tape.unset_row()
    row[0] = time.monotonic_ns()
    tape.append(COMPLETE, *row)
    with Store.open(run) as store:
        ((rank, sample_ns, power),) = store.rows("SELECT rank, sample_ns, power_watts FROM health")
    assert rank == NODE_RANK
    assert power is None
    assert abs(sample_ns - time.time_ns()) < 60e9


def seqs(run: Any, condition: str) -> list[int]:
    with Store.open(run, catch_up=False) as store:
        return [row[0] for row in store.rows(f"SELECT seq FROM collectives WHERE {condition} ORDER BY seq")]
