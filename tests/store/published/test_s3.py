"""Three nodes with disks of their own publish to a bucket; a fourth place reads it. The S3 API is moto's."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import rankscope
from probes.tape.events import EventWriter
from probes.tape.rundir import NODE_RANK, RunDir
from store import Ingester, is_watched
from store.published.address import AddressError
from store.published.mirror import Mirror
from store.published.publish import Publisher
from tests.factories import make_run
from tests.store.published.s3_server import KEYS, S3Server, s3_server
from tests.waiting import wait_for
from watch.records.publishing import Publishing

NODES = 3
SLOW = 4


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with s3_server() as server:
        yield server


def disks(tmp_path: Path, whole: RunDir) -> list[RunDir]:
    """The run's folder as each of three nodes has it: with its own two ranks, and the watch of its own."""
    folders = []
    for node in range(NODES):
        copy = RunDir(Path(shutil.copytree(whole.path, tmp_path / f"node-{node}" / whole.run_id)))
        for rank in range(2 * NODES):
            if rank // 2 != node:
                shutil.rmtree(copy.rank_dir(0, rank))
        if node:
            shutil.rmtree(copy.node_dir(0), ignore_errors=True)
        folders.append(copy)
    return folders


def test_three_nodes_are_read_from_a_fourth_place_while_they_live(tmp_path: Path, server: S3Server) -> None:
    slow = make_run(
        tmp_path, ranks=2 * NODES, steps=60, slow={SLOW: 2.0}, end="",
        identities={rank: {"node_rank": rank // 2, "host": f"gpu-{rank // 2}"} for rank in range(2 * NODES)},
    )  # fmt: skip
    publishers = []
    for node, run in enumerate(disks(tmp_path, slow)):
        with Ingester(run, node) as ingester:
            ingester.tick(thorough=True)
        publisher = Publisher(server.address("runs"), run, node_rank=node)
        publisher.write(publisher.read())
        publishers.append(publisher)
    found = rankscope.open(server.address(f"runs/{slow.run_id}"))
    assert is_watched(RunDir(found.path).stores()), "it is live"
    (straggler,) = [finding for finding in found.findings if finding.kind == "straggler"]
    assert straggler.ranks == (SLOW,)
    heat = found.sql("SELECT rank, count(*) AS steps FROM steps WHERE duration_ns > 0 GROUP BY rank ORDER BY rank")
    assert heat.to_dicts() == [{"rank": rank, "steps": 60} for rank in range(2 * NODES)], "rank x step"
    assert found.report()["goodput"] is not None
    for publisher in publishers:
        publisher.write(publisher.read(is_last=True))
    with Mirror(server.address(f"runs/{slow.run_id}"), tmp_path / "mirror") as mirror:
        mirror.refresh()
        assert not mirror.is_live


def test_what_a_bucket_refuses_waits_and_is_named(tmp_path: Path, server: S3Server) -> None:
    run = make_run(tmp_path, ranks=2, steps=5)
    events = EventWriter(run.node_dir(0) / "publishing.jsonl", attempt=0, rank=NODE_RANK)
    with Ingester(run) as ingester:
        ingester.tick(thorough=True)
        publishing = Publishing(Publisher(server.address("runs"), run, node_rank=0), events, every_s=10.0)
        server.fails = 500
        publishing.poll()
        written = run.node_dir(0) / "publishing.jsonl"
        wait_for(lambda: '"publish_failed"' in written.read_text(), "event of the refusal")
        make_run(tmp_path, run=run, attempt=1, ranks=2, steps=7)
        publishing.note(ingester.tick(thorough=True).rows)
        assert not publishing.allows_folding(), "what waits stays in the store"
        server.fails = 0
        publishing.finish(limit_s=60.0)
    events.close()
    with Mirror(server.address(f"runs/{run.run_id}"), tmp_path / "mirror") as mirror:
        mirror.refresh()
        copied = rankscope.api.Run(mirror.run).sql("SELECT attempt, count(*) AS rows FROM steps GROUP BY 1 ORDER BY 1")
        kept = rankscope.api.Run(run).sql("SELECT attempt, count(*) AS rows FROM steps GROUP BY 1 ORDER BY 1")
        assert copied.to_dicts() == kept.to_dicts()
    assert written.read_text().rindex('"publish_failed"') < written.read_text().rindex('"published"')
    assert not [key for key in KEYS.values() if key in written.read_text()]


def test_a_bucket_that_is_not_there_is_named_without_keys(tmp_path: Path, server: S3Server) -> None:
    with pytest.raises(AddressError) as raised:
        Mirror(server.address("runs/demo").replace("lake", "sea"), tmp_path).refresh()
    assert not [key for key in KEYS.values() if key in str(raised.value)]
    assert "\n" not in str(raised.value)
