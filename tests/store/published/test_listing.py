"""Several runs under one address: listed, the newest first; each of them can be opened, and all be followed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

import rankscope
from probes.tape.rundir import RunDir
from rankscope.commands.analyze import judge_run
from store import Store
from store.published.address import AddressError
from store.published.listing import newest_run, run_address, runs_at
from store.published.mirror import SILENT_S, Mirror
from store.published.publish import Publisher
from store.runs_folder import RunsFolder
from tests.factories import make_run
from tests.waiting import wait_for
from watch.sharing import followed as followed_module
from watch.sharing.followed import followed

SECOND = 10**9


def publish(run: RunDir, lake: str, *, node_rank: int = 0, is_last: bool = True) -> Publisher:
    with Store.open(run):
        pass
    publisher = Publisher(lake, run, node_rank=node_rank)
    publisher.write(publisher.read(is_last=is_last))
    return publisher


@pytest.fixture
def lake(tmp_path: Path) -> str:
    """Two runs: the older one has a slow rank, and the name that comes last."""
    lake = f"file://{tmp_path}/lake"
    for name, begun_s, slow in (("zebra", 1000, {1: 2.0}), ("apple", 2000, {})):
        run = RunDir(tmp_path / "runs" / name)
        make_run(tmp_path, run=run, ranks=2, steps=60, slow=slow)
        publish(run, lake)
        os.utime(tmp_path / "lake" / name / "run.json", (begun_s, begun_s))
    return lake


@pytest.fixture
def folder(lake: str) -> Iterator[Path]:
    with followed(lake, report=print, every_s=0.05) as folder:
        yield folder


def test_runs_are_listed_newest_first(tmp_path: Path, lake: str) -> None:
    (tmp_path / "lake" / "no run").mkdir()
    (tmp_path / "lake" / ".hidden").mkdir()
    (tmp_path / "lake" / ".hidden" / "run.json").write_text("{}")
    assert runs_at(lake) == ["apple", "zebra"]
    assert runs_at(f"{lake}/apple") == []
    assert runs_at(f"{lake}/nowhere") == []
    assert newest_run(lake) == (f"{lake}/apple", ["apple", "zebra"])
    assert newest_run(f"{lake}/zebra") == (f"{lake}/zebra", [])
    assert run_address("s3://lake/runs/?region=eu-west-1", "a") == "s3://lake/runs/a?region=eu-west-1"


def test_of_too_many_runs_the_newest_are_listed(lake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last by name were."""
    monkeypatch.setattr("store.published.listing.MAX_RUNS", 1)
    assert runs_at(lake) == ["apple"]


def test_a_prefix_is_its_newest_run(tmp_path: Path, lake: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert judge_run(Path(lake)).fired == (), "zebra has a finding"
    assert "holds 2 runs; newest: apple; others: zebra" in capsys.readouterr().err
    assert rankscope.open(lake).run_id == "apple"
    assert any(found.ranks == (1,) for found in rankscope.open(f"{lake}/zebra").findings)


def test_all_runs_of_a_prefix_are_followed(tmp_path: Path, lake: str, folder: Path) -> None:
    assert RunsFolder(folder).newest() == "apple", "the first copy is that of the newest"
    wait_for(lambda: RunsFolder(folder).run_ids() == ["apple", "zebra"], "a copy of both")
    later = RunDir(tmp_path / "runs" / "later")
    make_run(tmp_path, run=later, ranks=1, steps=5)
    publish(later, lake)
    wait_for(lambda: RunsFolder(folder).newest() == "later", "the run that began later")


def test_a_run_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path, lake: str) -> None:
    (tmp_path / "lake" / "apple" / "node-00000.json").write_text("{}")
    told: list[str] = []
    with (
        followed(lake, report=told.append, every_s=0.05) as folder,
        Store.open(RunsFolder(folder).open("zebra"), catch_up=False) as store,
    ):
        assert store.rows("SELECT count(*) FROM steps") == [(120,)]
    with followed(f"{lake}/zebra", report=told.append) as one:
        assert one.name == "zebra"
    (tmp_path / "lake" / "zebra" / "node-00000.json").write_text("{}")
    with pytest.raises(AddressError, match="apple"), followed(lake, report=told.append):
        pass


def test_an_unreadable_run_is_reported_once_until_it_is_readable(
    tmp_path: Path, lake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was refused is looked at now and then; in the rounds between it is not up to date either."""
    rounds: list[str] = []

    def counted(address: str) -> list[str]:
        rounds.append(address)
        return runs_at(address)

    monkeypatch.setattr(followed_module, "ENDED_EVERY", 2)
    monkeypatch.setattr(followed_module, "runs_at", counted)
    state = tmp_path / "lake" / "apple" / "node-00000.json"
    good = tmp_path / "good.json"
    state.rename(good)
    state.write_text("{}")
    told: list[str] = []
    with followed(lake, report=told.append, every_s=0.01):
        wait_for(lambda: len(rounds) > 8, "four looks at the run")
        assert len(told) == 1, told
        assert told[0].startswith("not up to date: ")
        assert "apple" in told[0]
        good.replace(state)
        wait_for(lambda: len(told) > 1, "word that the run can be read")
    assert told[1:] == [f"{lake}: up to date again"]


@pytest.mark.parametrize(("max_runs", "num_lists"), [(50, 9), (1, 3)])
def test_a_prefix_of_more_runs_than_are_copied_is_listed_less_often(
    tmp_path: Path, lake: str, monkeypatch: pytest.MonkeyPatch, max_runs: int, num_lists: int
) -> None:
    """Of each run that is listed, the object store is asked when it began."""
    lists: list[str] = []

    def counted(address: str) -> list[str]:
        lists.append(address)
        return runs_at(address)

    monkeypatch.setattr(followed_module, "MAX_RUNS", max_runs)
    monkeypatch.setattr(followed_module, "ENDED_EVERY", 4)
    monkeypatch.setattr(followed_module, "runs_at", counted)
    (tmp_path / "copies").mkdir()
    with closing(followed_module._Copies(lake, tmp_path / "copies")) as copies:
        copies.begin()
        assert not any(copies.refresh(threading.Event()) for _ in range(8))
    assert len(lists) == num_lists


def test_a_node_whose_rows_are_old_is_named_with_their_age(tmp_path: Path) -> None:
    run = make_run(tmp_path, ranks=1, steps=5)
    publish(run, f"file://{tmp_path}/lake", is_last=False)
    with Mirror(f"file://{tmp_path}/lake/{run.run_id}", tmp_path / "mirror") as mirror:
        mirror.refresh()
        state = mirror.states[0]
        now_ns = time.time_ns()
        ages_s = {0: 5, 1: 8, 2: 100, 3: 1000}
        mirror.states |= {
            node: replace(state, published_wall_ns=now_ns - age_s * SECOND) for node, age_s in ages_s.items()
        }
        mirror.states[3] = replace(mirror.states[3], is_last=True)  # it has left, with all of its rows there
        assert mirror.note == (
            "records of all 4 nodes until 100 s ago; no recent publication from node 2 (100 s ago); "
            "other nodes: 8 s ago"
        )
        assert mirror.recorded_until_ns == now_ns - 100 * SECOND
        mirror.states[2] = replace(mirror.states[2], is_last=True)
        assert mirror.note == "records of all 4 nodes until 8 s ago"
        mirror.states[1] = replace(mirror.states[1], published_wall_ns=now_ns - int((SILENT_S + 10) * SECOND))
        assert mirror.recorded_until_ns == now_ns - 5 * SECOND, "a node that publishes no more holds nothing up"
