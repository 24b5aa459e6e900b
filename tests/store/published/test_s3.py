"""Three nodes with disks of their own publish to a bucket; a fourth place reads it. The S3 API is moto's."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import rankscope.api
from probes.tape.events import EventWriter
from probes.tape.rundir import NODE_RANK, RunDir
from store import Ingester, is_watched
from store.published.address import AddressError, one_line
from store.published.listing import runs_at
from store.published.mirror import Mirror
from store.published.publish import Publisher
from tests.factories import make_run
from tests.object_store import KEYS, Fault, ObjectStore, s3_server
from tests.ports import free_port
from tests.waiting import wait_for
from watch.records.publishing import Publishing

NODES = 3
SLOW = 4


@pytest.fixture
def server() -> Iterator[ObjectStore]:
    with s3_server() as server:
        yield server


def address(server: ObjectStore, path: str, *, bucket: str = "") -> str:
    return f"s3://{bucket or server.bucket}/{path}?endpoint_override={server.url}&region=us-east-1"


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


def test_three_nodes_are_read_from_a_fourth_place_while_they_live(tmp_path: Path, server: ObjectStore) -> None:
    slow = make_run(
        tmp_path, ranks=2 * NODES, steps=60, slow={SLOW: 2.0}, end="",
        identities={rank: {"node_rank": rank // 2, "host": f"gpu-{rank // 2}"} for rank in range(2 * NODES)},
    )  # fmt: skip
    publishers = []
    for node, run in enumerate(disks(tmp_path, slow)):
        with Ingester(run, node) as ingester:
            ingester.tick(thorough=True)
        publisher = Publisher(address(server, "runs"), run, node_rank=node)
        publisher.write(publisher.read())
        publishers.append(publisher)
    found = rankscope.open(address(server, f"runs/{slow.run_id}"))
    assert is_watched(RunDir(found.path).stores()), "it is live"
    (straggler,) = [finding for finding in found.findings if finding.kind == "straggler"]
    assert straggler.ranks == (SLOW,)
    heat = found.sql("SELECT rank, count(*) AS steps FROM steps WHERE duration_ns > 0 GROUP BY rank ORDER BY rank")
    assert heat.to_dicts() == [{"rank": rank, "steps": 60} for rank in range(2 * NODES)], "rank x step"
    assert found.report()["goodput"] is not None
    for publisher in publishers:
        publisher.write(publisher.read(is_last=True))
    with Mirror(address(server, f"runs/{slow.run_id}"), tmp_path / "mirror") as mirror:
        mirror.refresh()
        assert not mirror.is_live


def test_what_a_bucket_refuses_waits_and_is_named(tmp_path: Path, server: ObjectStore) -> None:
    run = make_run(tmp_path, ranks=2, steps=5)
    events = EventWriter(run.node_dir(0) / "publishing.jsonl", attempt=0, rank=NODE_RANK)
    with Ingester(run) as ingester:
        ingester.tick(thorough=True)
        publishing = Publishing(Publisher(address(server, "runs"), run, node_rank=0), events, every_s=10.0)
        server.faults += [Fault(action="500", method=method, times=1_000_000) for method in ("PUT", "POST")]
        publishing.poll()
        written = run.node_dir(0) / "publishing.jsonl"
        wait_for(lambda: '"publish_failed"' in written.read_text(), "event of the refusal")
        make_run(tmp_path, run=run, attempt=1, ranks=2, steps=7)
        publishing.note(ingester.tick(thorough=True).rows, until_ns=time.time_ns())
        assert not publishing.allows_folding(), "what waits stays in the store"
        server.faults.clear()
        publishing.finish(limit_s=60.0)
    events.close()
    with Mirror(address(server, f"runs/{run.run_id}"), tmp_path / "mirror") as mirror:
        mirror.refresh()
        copied = rankscope.api.Run(mirror.run).sql("SELECT attempt, count(*) AS rows FROM steps GROUP BY 1 ORDER BY 1")
        kept = rankscope.api.Run(run).sql("SELECT attempt, count(*) AS rows FROM steps GROUP BY 1 ORDER BY 1")
        assert copied.to_dicts() == kept.to_dicts()
    assert written.read_text().rindex('"publish_failed"') < written.read_text().rindex('"published"')
    assert not [key for key in KEYS.values() if key in written.read_text()]


def test_a_bucket_that_is_not_there_is_named_without_keys(tmp_path: Path, server: ObjectStore) -> None:
    with pytest.raises(AddressError, match="no run is published there") as raised:
        Mirror(address(server, "runs/demo", bucket="sea"), tmp_path).refresh()
    assert not [key for key in KEYS.values() if key in str(raised.value)]
    assert "\n" not in str(raised.value)


def test_what_to_check_follows_the_failure(server: ObjectStore) -> None:
    nobody = f"s3://lake/x?endpoint_override=http://127.0.0.1:{free_port()}"
    with pytest.raises(AddressError, match=r": AWS Error NETWORK_CONNECTION.*; check the network and the endpoint"):
        runs_at(nobody)
    denied = OSError("When listing objects in 'lake': AWS Error ACCESS_DENIED during ListObjectsV2: Denied")
    assert one_line(denied).startswith("AWS Error ACCESS_DENIED during ListObjectsV2: Denied; check the credentials (")
    assert "; check the bucket's name, and region=" in one_line(OSError("AWS Error NO_SUCH_BUCKET: none"))
    assert one_line(OSError("disk on fire")) == "disk on fire"
