"""Tapes and events that are torn, damaged, foreign or links: what can be read is, and what cannot is told."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path

import pytest

from probes.tape.format.writer import COMPLETE, HEADER_BYTES, JSON_OFFSET, OPEN
from probes.tape.rundir import RunDir
from probes.tape.segment_index import BLANK, check_index
from store import Ingester, Store, StoreError, rebuild
from tests.factories import RankWriter, empty_run, make_run
from watch.records.tape_sync import TapeSync


def problems(run: RunDir) -> dict[str, str]:
    with Store.open(run) as store:
        return {path.rpartition("/")[2]: problem for path, problem in store.rows("SELECT * FROM ingest_problems")}


def test_a_truncated_tape_gives_what_is_there(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=100)
    path = run.rank_dir(0, 1) / "spans.00000.tape"
    with path.open("r+b") as file:
        file.truncate(HEADER_BYTES + 56 * 10 + 17)
    with Ingester(run) as ingester:
        result = ingester.tick()
        assert result.truncated == ("tapes/attempt-0/rank-00001/spans.00000.tape",)
        assert result.damaged == ()
        assert 400 < result.rows["spans"] < 420
        assert result.rows["steps"] == 200
        assert ingester.tick().num_rows == 0
    assert "shorter than its header states" in problems(run)["spans.00000.tape"]


def test_lost_names_are_reported(tmp_path: Path) -> None:
    """A power cut took the file of names, and left records that refer to it."""
    run = make_run(tmp_path, ranks=2, steps=10)
    os.truncate(run.rank_dir(0, 1) / "names.jsonl", 0)
    with Ingester(run) as ingester:
        ingester.catch_up()
    assert problems(run)["names.jsonl"].startswith("lacks names that records refer to (")
    with Store.open(run) as store:
        (path,) = (path for path, _ in store.rows("SELECT * FROM ingest_problems"))
        assert path == "tapes/attempt-0/rank-00001/names.jsonl"
        assert store.rows("SELECT count(*) FROM collectives WHERE rank = 1 AND op LIKE '?%'") != [(0,)]
    with Ingester(run) as ingester:
        assert ingester.tick(thorough=True).num_rows == 0
    assert "names.jsonl" in problems(run)


@pytest.mark.parametrize(
    ("blob", "problem"),
    [
        (b"RSTAPE\x00\x01" + b"\xff" * 5000, "written with schema 4294967295"),
        (b"something else" * 500, "not a tape"),
        (b"RS", "too short"),
    ],
)
def test_a_damaged_tape_is_reported_and_the_others_are_read(tmp_path: Path, blob: bytes, problem: str) -> None:
    run = make_run(tmp_path, ranks=2, steps=10)
    (run.rank_dir(0, 0) / "steps.00000.tape").write_bytes(blob)
    with Ingester(run) as ingester:
        assert ingester.tick().rows["steps"] == 10
        result = ingester.tick()
        assert result.damaged == ("tapes/attempt-0/rank-00000/steps.00000.tape",)
    assert problem in problems(run)["steps.00000.tape"]


def test_a_tape_that_is_just_being_made_is_no_problem(tmp_path: Path) -> None:
    """Reserved, not yet written: it becomes a tape a moment later, or never if its writer died."""
    run = make_run(tmp_path, ranks=1, steps=10)
    path = run.rank_dir(0, 0) / "steps.00000.tape"
    whole = path.read_bytes()
    path.write_bytes(bytes(len(whole)))
    with Ingester(run) as ingester:
        for _ in range(3):
            assert ingester.tick().damaged == ()
        path.write_bytes(whole)
        assert ingester.tick().rows == {"steps": 10}
    path.write_bytes(bytes(len(whole)))
    with pytest.raises(StoreError, match="steps 10 -> 0"):
        rebuild(run)
    assert store_rows(run) == 10, "what the store had is kept"
    result = rebuild(run, force=True)
    assert problems(run) == {path.name: BLANK}
    assert result.problems == ("tapes/attempt-0/rank-00000/steps.00000.tape",)
    (kept,) = result.kept
    assert kept.exists()


def store_rows(run: RunDir) -> int:
    with Store.open(run, catch_up=False) as store:
        return int(store.rows("SELECT count(*) FROM steps")[0][0])


DAMAGES = 300


def test_every_damage_of_an_indexed_run_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=30, gradients_every=5, hang={1: 28})
    TapeSync(run).sync(last=True)
    rebuild(run)
    assert problems(run) == {}, "an open record is no damage"
    index, dice = run.node_dir(0) / "segments.jsonl", random.Random(5)
    files = sorted(path for _, _, folder in run.rank_dirs() for path in folder.iterdir())
    files = [path for path in files if used_bytes(path)]
    for number in range(DAMAGES):
        path = files[number % len(files)]
        whole = path.read_bytes()
        harm = ("flip", "blank", "cut", "remove", "zero a page")[dice.randrange(5)]
        damage(path, harm, dice)
        if path.exists() and path.read_bytes() == whole:
            continue
        named = dict(check_index(run.path, index))
        assert list(named) == [path.relative_to(run.path).as_posix()], (number, harm, path.name, named)
        path.write_bytes(whole)
    blob = bytearray(files[0].read_bytes())
    blob[(HEADER_BYTES + used_bytes(files[0])) // 2] ^= 1  # in a record: a header is also checked when it is read
    files[0].write_bytes(blob)
    assert list(problems(run)) == [f"{files[0].name}#checksum"], "a reader checks files that were written since"


def test_a_record_that_is_finished_later_is_no_damage(tmp_path: Path) -> None:
    run = empty_run(tmp_path)
    writer = RankWriter(run, 0)
    slots = [writer.append("steps", OPEN, step=step, start_ns=writer.now_ns) for step in range(5)]
    writer.complete("steps", slots[3], duration_ns=7)
    TapeSync(run, is_running=lambda: True).sync(last=True)
    for slot in slots[:3]:
        writer.complete("steps", slot, duration_ns=8)
    writer.append("steps", COMPLETE, step=9, start_ns=writer.now_ns)
    assert dict(check_index(run.path, run.node_dir(0) / "segments.jsonl")) == {}
    writer.tape("steps").set(slots[3], "duration_ns", 9)
    assert list(dict(check_index(run.path, run.node_dir(0) / "segments.jsonl"))) == [
        "tapes/attempt-0/rank-00000/steps.00000.tape"
    ]


def used_bytes(path: Path) -> int:
    """Up to where a file holds anything."""
    return len(path.read_bytes().rstrip(b"\0"))


def damage(path: Path, harm: str, dice: random.Random) -> None:
    blob = bytearray(path.read_bytes())
    used = used_bytes(path)
    if path.suffix == ".tape":  # beyond the header's text and before the first record nothing is stored
        head = HEADER_BYTES if dice.random() < 0.8 and used > HEADER_BYTES else 0
        place = dice.randrange(HEADER_BYTES, used) if head else dice.randrange(JSON_OFFSET, 300)
    else:
        place = dice.randrange(used)
    if harm == "flip":
        blob[place] ^= 1 << dice.randrange(8)
    elif harm == "blank":
        blob = bytearray(len(blob))
    elif harm == "cut":
        del blob[place:]
    elif harm == "zero a page":
        blob[place : place + 512] = bytes(len(blob[place : place + 512]))
    path.write_bytes(blob)
    if harm == "remove":
        path.unlink()


def test_an_altered_index_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=10)
    TapeSync(run).sync(last=True)
    index = run.node_dir(0) / "segments.jsonl"
    lines = index.read_text().splitlines(keepends=True)
    index.write_text("".join(lines[:2] + lines[3:]))
    assert "lines were altered or removed" in problems(run)["segments.jsonl#checksum"]


def test_a_gap_between_segments_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=1, steps=10)
    path = run.rank_dir(0, 0) / "steps.00000.tape"
    path.rename(path.with_name("steps.00002.tape"))
    (path.with_name("steps.00000.tape")).write_bytes(bytes(5000))
    assert problems(run)["steps.00001.tape#checksum"] == "is missing: later segments are there"


def test_a_resolved_problem_is_removed(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=1, steps=10)
    path = run.rank_dir(0, 0) / "steps.00000.tape"
    whole = path.read_bytes()
    path.write_bytes(b"damaged")
    with Ingester(run) as ingester:
        ingester.tick()
        assert ingester.tick().damaged
        path.write_bytes(whole)
        assert ingester.tick().rows == {"steps": 10}
    assert problems(run) == {}


def test_a_tape_with_the_header_of_another_rank_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=10)
    source = run.rank_dir(0, 0) / "steps.00000.tape"
    (run.rank_dir(0, 1) / "steps.00000.tape").write_bytes(source.read_bytes())
    with Store.open(run) as store:
        assert store.rows("SELECT rank, count(*) FROM steps GROUP BY rank") == [(0, 10)]
    assert "its header states table steps, segment 0, rank 0" in problems(run)["steps.00000.tape"]


def test_flipped_bytes_anywhere_never_stop_the_others(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=20, gradients_every=2)
    folder = run.rank_dir(0, 1)
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    originals = {path: path.read_bytes() for path in paths}
    dice = random.Random(3)
    for _ in range(12):
        for path, blob in originals.items():
            broken = bytearray(blob)
            for _ in range(20):
                broken[dice.randrange(min(len(broken), 8192))] = dice.randrange(256)
            path.write_bytes(broken)
        run.store().unlink(missing_ok=True)
        with Ingester(run) as ingester:
            ingester.tick(thorough=True)
        with Store.open(run, catch_up=False) as store:
            assert store.rows("SELECT count(*) FROM steps WHERE rank = 0") == [(20,)]


def test_torn_and_foreign_lines_of_events_are_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=1, steps=3)
    path = run.rank_dir(0, 0) / "events.jsonl"
    with path.open("ab") as file:
        file.write(b'not json\n[1,2]\n\xff\xfe\n{"kind": "checkpoint", "step": 3}\n{"kind": "checkp')
    with Ingester(run) as ingester:
        result = ingester.tick()
        assert result.skipped_lines == 3
        assert ingester.tick().num_rows == 0
        with path.open("ab") as file:
            file.write(b'oint", "step": 4}\n')
        assert ingester.tick().rows == {"events": 1, "checkpoints": 1}
    with Store.open(run) as store:
        assert store.rows("SELECT step FROM checkpoints ORDER BY step") == [(3,), (4,)]
    assert problems(run) == {"events.jsonl": "3 lines are not events, or are copies of one"}


def test_dropped_records_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = empty_run(tmp_path)
    writer = RankWriter(run, rank=0)

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for step in range(1500):
        if step == 10:
            monkeypatch.setattr(os, "posix_fallocate", no_space)
        writer.append("steps", COMPLETE, step=step)
    with Ingester(run) as ingester:
        ingester.tick()
    dropped = writer.tape("steps").dropped
    assert dropped > 0
    assert problems(run) == {"steps.tape": f"{dropped} records were dropped by the writer: no space for a new segment"}


def test_links_are_not_followed(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=5)
    secret = tmp_path / "events.jsonl"
    secret.write_text('{"kind": "secret"}\n')
    for name in ("events.jsonl", "steps.00000.tape"):
        path = run.rank_dir(0, 1) / name
        path.unlink()
        path.symlink_to(secret)
    with Store.open(run) as store:
        assert store.rows("SELECT count(*) FROM events WHERE kind = 'secret'") == [(0,)]
        assert store.rows("SELECT DISTINCT rank FROM steps") == [(0,)]


def test_a_log_without_a_store_is_removed(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=5)
    secret = tmp_path / "secret"
    secret.write_text("secret")
    log = run.store().with_name(run.store().name + ".wal")
    log.symlink_to(secret)
    with Store.open(run) as store:
        assert store.rows("SELECT count(*) FROM steps") == [(10,)]
    assert not log.is_symlink()
    assert secret.read_text() == "secret"


@pytest.mark.parametrize("when", ["before", "after"], ids=["at once", "after a first look"])
def test_events_that_are_doubled_are_named_and_count_once(tmp_path: Path, when: str) -> None:
    run = make_run(tmp_path, ranks=2, steps=5)
    path = run.node_dir(0) / "events.jsonl"
    count = "SELECT count(*) FROM events"
    with Store.open(run) as store:
        expected = store.rows(count)
    if when == "before":
        run.store().unlink()
    num_lines = len(path.read_bytes().splitlines())
    path.write_bytes(path.read_bytes() * 2)
    with Store.open(run) as store:
        assert store.rows(count) == expected
        problems = [text for _, text in store.rows("SELECT * FROM ingest_problems")]
    assert problems == [f"{num_lines} lines are not events, or are copies of one"]


def test_damage_that_only_a_query_meets_names_the_file(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=30)
    with Store.open(run) as store:
        tables = store.tables()
    path = run.store()
    met: list[tuple[str, str]] = []
    whole, dice = path.read_bytes(), random.Random(1)
    used = len(whole.rstrip(b"\0"))
    for _ in range(12):
        blob = bytearray(whole)
        blob[dice.randrange(3 * 4096, used)] ^= 1 << dice.randrange(8)
        path.write_bytes(blob)
        with contextlib.suppress(StoreError), Store.open(run, catch_up=False) as store:
            for table in tables:
                try:
                    store.rows(f"SELECT count(*), sum(hash(t)) FROM {table} t")
                except StoreError as error:
                    met.append((str(error), str(store.damage)))
                    break
    assert met
    assert all(str(path) in error and error == damage for error, damage in met)


@pytest.mark.parametrize("keeps_store", [True, False])
def test_a_rank_without_its_identity_stays_with_its_node(tmp_path: Path, keeps_store: bool) -> None:
    """A power cut emptied the events of a rank of node 1; node 0 must not store its steps a second time."""
    run = make_run(tmp_path, ranks=2, steps=10, identities={1: {"node_rank": 1, "local_rank": 0}})
    for node in (0, 1):
        run.node_dir(node).mkdir(exist_ok=True)
        TapeSync(run, node).sync(last=True)
    problems(run)
    for store in run.stores() if not keeps_store else ():
        store.unlink()
    os.truncate(run.rank_dir(0, 1) / "events.jsonl", 0)
    with Store.open(run) as store:
        assert store.rows("SELECT rank, count(*) FROM steps GROUP BY rank ORDER BY rank") == [(0, 10), (1, 10)]
