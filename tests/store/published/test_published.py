"""Runs published to an address and read from there: the same rows, and only whole rounds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import rankscope
from probes.tape.rundir import RunDir
from rankscope.commands.analyze import judge_run
from store import Ingester, Store, is_watched
from store.published import publish
from store.published.address import AddressError, address_of, check_address, open_address
from store.published.copy_time import recorded_until_ns
from store.published.mirror import Mirror
from store.published.publish import Publisher
from tests.depth import tried
from tests.factories import make_run


def rows(run: RunDir) -> dict[str, Any]:
    with Store.open(run, catch_up=False) as store:
        return {name: store.rows(f"SELECT count(*), sum(hash(t)) FROM {name} t") for name in store.tables()}


@pytest.fixture
def lake(tmp_path: Path) -> str:
    return f"file://{tmp_path}/lake"


@pytest.fixture
def mirror_folder(tmp_path: Path) -> Path:
    (tmp_path / "mirror").mkdir()
    return tmp_path / "mirror"


def test_a_live_run_is_published_in_rounds(tmp_path: Path, lake: str, mirror_folder: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=5, kill={1: 4})  # step 4 of rank 1 stays open
    publisher = Publisher(lake, run, node_rank=0)
    with Ingester(run) as ingester:
        publisher.note(ingester.tick(thorough=True).rows)
        publisher.write(publisher.read())
        mirror = Mirror(f"{lake}/{run.run_id}", mirror_folder)
        mirror.refresh()
        assert rows(mirror.run) == rows(run)
        assert mirror.is_live
        assert mirror.run.manifest()["run_id"] == run.run_id
        assert mirror.refresh() == 0
        make_run(tmp_path, run=run, attempt=1, ranks=2, steps=7)
        publisher.note(ingester.tick(thorough=True).rows)
        publisher.write(publisher.read(is_last=True))
        mirror.refresh()
        assert rows(mirror.run) == rows(run)
        assert not mirror.is_live


def test_a_large_store_takes_several_rounds(
    tmp_path: Path, lake: str, mirror_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "ROUND_ROWS", 7)
    run = make_run(tmp_path, ranks=2, steps=20)
    with Store.open(run):
        pass
    publisher = Publisher(lake, run, node_rank=0)
    num_rounds = 0
    while True:
        found = publisher.read(is_last=True)
        publisher.write(found)
        num_rounds += 1
        if found.is_last:
            break
    assert num_rounds > 3
    mirror = Mirror(f"{lake}/{run.run_id}", mirror_folder)
    mirror.refresh()
    assert rows(mirror.run) == rows(run)


@pytest.mark.parametrize("round_rows", [tried(70, nightly=7), 100_000])
def test_a_store_with_folded_calls_is_published_whole(
    tmp_path: Path, lake: str, mirror_folder: Path, monkeypatch: pytest.MonkeyPatch, round_rows: int
) -> None:
    """Retention has left holes among the rows, and a watch that starts again publishes all of them."""
    monkeypatch.setattr(publish, "ROUND_ROWS", round_rows)
    run = make_run(tmp_path, ranks=2, steps=130)
    with Ingester(run) as ingester:
        ingester.catch_up()
        with Store.open(run, catch_up=False) as store:
            ((middle_ns,),) = store.rows("SELECT max(start_ns) FROM steps WHERE step <= 100")
        ingester.retire(middle_ns)
        publisher = Publisher(lake, run, node_rank=0)
        while not publisher.is_drained:
            publisher.write(publisher.read())
        make_run(tmp_path, run=run, attempt=1, ranks=2, steps=20)
        publisher.note(ingester.tick(thorough=True).rows)
        publisher.write(publisher.read())
        while not publisher.is_drained:
            publisher.write(publisher.read())
    with Store.open(run, catch_up=False) as store:
        ((num_folded,),) = store.rows("SELECT count(*) FROM collective_totals")
    assert num_folded > 0
    mirror = Mirror(f"{lake}/{run.run_id}", mirror_folder)
    mirror.refresh()
    assert rows(mirror.run) == rows(run)


def test_a_round_that_was_cut_off_is_not_read(tmp_path: Path, lake: str, mirror_folder: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=5)
    with Store.open(run):
        pass
    first = Publisher(lake, run, node_rank=0)
    first.write(first.read())
    expected = rows(run)
    make_run(tmp_path, run=run, attempt=1, ranks=2, steps=5)
    with Ingester(run) as ingester:
        first.note(ingester.tick(thorough=True).rows)
    cut = first.read()
    for table, part in cut.new.items():  # all objects but the one that names them
        path = publish.part_path(f"{tmp_path}/lake/{run.run_id}", 0, cut.generation, table, cut.sequence)
        first._put(path, part, cut.sequence)
    mirror = Mirror(f"{lake}/{run.run_id}", mirror_folder)
    mirror.refresh()
    assert rows(mirror.run) == expected
    first.write(cut)
    mirror.refresh()
    assert rows(mirror.run) == rows(run)


def test_a_watch_that_starts_again_replaces_what_was_published(tmp_path: Path, lake: str, mirror_folder: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=5)
    with Store.open(run):
        pass
    mirror = Mirror(f"{lake}/{run.run_id}", mirror_folder)
    for _ in range(2):
        publisher = Publisher(lake, run, node_rank=0)
        publisher.write(publisher.read())
        mirror.refresh()
        assert rows(mirror.run) == rows(run)


def test_a_part_that_is_missing_or_short_is_named(tmp_path: Path, lake: str, mirror_folder: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=5)
    with Store.open(run):
        pass
    publisher = Publisher(lake, run, node_rank=0)
    publisher.write(publisher.read())
    (part,) = (tmp_path / "lake" / run.run_id).glob("node-00000/*/steps_done/part-000001.parquet")
    whole = part.read_bytes()
    part.unlink()
    with pytest.raises(AddressError, match=r"steps_done/part-000001\.parquet"):
        Mirror(f"{lake}/{run.run_id}", mirror_folder).refresh()
    (other,) = (tmp_path / "lake" / run.run_id).glob("node-00000/*/ranks/part-000001.parquet")
    part.write_bytes(other.read_bytes())  # another table's rows
    with pytest.raises(AddressError, match="part 1 of steps_done of node 0 lacks rows"):
        Mirror(f"{lake}/{run.run_id}", mirror_folder).refresh()
    part.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(AddressError):
        Mirror(f"{lake}/{run.run_id}", mirror_folder).refresh()
    part.write_bytes(whole)
    with Mirror(f"{lake}/{run.run_id}", mirror_folder) as mirror:
        mirror.refresh()
        assert rows(mirror.run) == rows(run)


def test_a_copy_is_live_until_the_last_round(tmp_path: Path, lake: str, mirror_folder: Path) -> None:
    run = make_run(tmp_path, ranks=2, steps=5)
    with Store.open(run):
        pass
    publisher = Publisher(lake, run, node_rank=0)
    first = publisher.read()
    publisher.write(first)
    with Mirror(f"{lake}/{run.run_id}", mirror_folder) as mirror:
        mirror.refresh()
        assert is_watched(mirror.run.stores())
        assert recorded_until_ns(mirror.run) == first.read_wall_ns
        assert "of all 1 nodes until" in mirror.note
        publisher.write(publisher.read(is_last=True))
        mirror.refresh()
        assert not is_watched(mirror.run.stores())
        assert mirror.note == ""
    assert recorded_until_ns(run) > first.read_wall_ns  # no copy: the present


def test_the_time_of_the_records_is_that_of_their_ingestion_and_not_of_their_publication(
    tmp_path: Path, lake: str, mirror_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a crowded machine a round of `watch` publishes what was on the tapes half a minute ago."""
    run = make_run(tmp_path, ranks=2, steps=20)
    publisher = Publisher(lake, run, node_rank=0)
    with Ingester(run) as ingester:
        publisher.note(ingester.tick(thorough=True).rows, until_ns=1_000)
    publisher.write(publisher.read())
    with Mirror(f"{lake}/{run.run_id}", mirror_folder) as mirror:
        mirror.refresh()
        assert recorded_until_ns(mirror.run) == 1_000
        monkeypatch.setattr(publish, "ROUND_ROWS", 7)
        make_run(tmp_path, run=run, attempt=1, ranks=2, steps=20)
        with Ingester(run) as ingester:
            publisher.note(ingester.tick(thorough=True).rows, until_ns=2_000)
        rounds = [publisher.read()]
        while rounds[-1].is_partial:
            rounds.append(publisher.read())
    assert {found.read_wall_ns for found in rounds[:-1]} == {1_000}, "some of what was ingested is not there yet"
    assert rounds[-1].read_wall_ns == 2_000


def test_analyze_and_open_read_an_address(tmp_path: Path, lake: str) -> None:
    run = make_run(tmp_path, ranks=4, steps=60, slow={2: 2.0})
    with Store.open(run):
        pass
    publisher = Publisher(lake, run, node_rank=0)
    publisher.write(publisher.read(is_last=True))
    here = judge_run(run.path)
    there = judge_run(Path(f"{lake}/{run.run_id}"))
    assert there.verdict == here.verdict
    opened = rankscope.open(f"{lake}/{run.run_id}")
    assert opened.verdict == here.verdict
    assert (opened.run_id, opened.state.word) == (run.run_id, "finished")


def test_an_address_without_a_published_run_is_refused_in_one_line(
    tmp_path: Path, lake: str, mirror_folder: Path
) -> None:
    with pytest.raises(AddressError, match="no run is published there"):
        Mirror(lake, mirror_folder).refresh()
    run = make_run(tmp_path, ranks=1, steps=3)
    with Store.open(run):
        pass
    publisher = Publisher(lake, run, node_rank=0)
    publisher.write(publisher.read())
    with pytest.raises(AddressError, match=f"runs there: {run.run_id}"):
        Mirror(lake, mirror_folder).refresh()
    state = tmp_path / "lake" / run.run_id / "node-00000.json"
    for odd in ("[]", "{}", "not json", '{"format": 1, "generation": "../../x"}'):
        state.write_text(odd)
        with pytest.raises(AddressError):
            Mirror(f"{lake}/{run.run_id}", mirror_folder).refresh()


def test_invalid_addresses_are_refused_without_their_keys() -> None:
    assert address_of(Path("s3://lake/demo")) == "s3://lake/demo"
    assert address_of(Path("file:///tmp/lake/demo")) == "file:///tmp/lake/demo"
    assert address_of(Path("runs/latest")) is None
    with_keys = ("s3://key:secret@lake/x", "s3://lake/x?key=secret", "s3://b?endpoint_override=http://key:secret@host")
    for wrong in ("ftp://host/x", "runs/lake", "s3://", "file://host/x", "s3://[x", *with_keys):
        with pytest.raises(AddressError) as raised:
            check_address(wrong)
        assert "secret" not in str(raised.value)
    with pytest.raises(AddressError, match="unknown option color"):
        open_address("s3://lake/x?color=red")


def test_nodes_that_begin_together_publish_the_same_manifest(tmp_path: Path, lake: str) -> None:
    run = make_run(tmp_path, ranks=2, steps=2)
    publishers = [Publisher(lake, run, node_rank=node) for node in range(4)]
    path = f"{tmp_path}/lake/run.json"

    def put_often(publisher: Publisher) -> None:
        for _ in range(200):
            publisher._put_bytes(path, b"manifest" * 1000)

    with ThreadPoolExecutor(len(publishers)) as pool:
        list(pool.map(put_often, publishers))
    assert [file.name for file in Path(path).parent.iterdir()] == ["run.json"]
    assert Path(path).read_bytes() == b"manifest" * 1000
