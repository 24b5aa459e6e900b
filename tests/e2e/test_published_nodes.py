"""Three nodes with disks of their own and a real `watch` each that publishes; the run is read at the address alone."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from probes.attach.launch.watch_process import start_watch
from probes.tape.rundir import RunDir
from store import Store
from store.published.address import AddressError
from store.published.mirror import Mirror
from tests.factories import make_run, still_training
from tests.stand_ins import stand_ins
from tests.waiting import wait_for
from watch.sharing.published_run import published_run

NODES = 3
SLOW = 2


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """One a node that stands for its rank; whatever is left of them and of the watches is ended."""
    started = stand_ins(tmp_path, NODES)
    yield started
    for process in started:
        process.kill()
        process.wait(100)


@pytest.mark.usefixtures("forked_watch")
def test_three_watches_publish_and_a_fourth_place_reads(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    lake = f"file://{tmp_path}/lake"
    where = {rank: {"node_rank": rank, "pid": process.pid} for rank, process in enumerate(processes)}
    whole = make_run(
        tmp_path, ranks=NODES, steps=60, slow={SLOW: 2.0}, end="", identities=where,
        config={"publish": {"address": lake, "every_s": 1.0}, "recovery": {"enabled": False}},
    )  # fmt: skip
    still_training(whole)  # else each watch ends some seconds after its start
    for node in range(NODES):
        copy = RunDir(Path(shutil.copytree(whole.path, tmp_path / f"node-{node}" / whole.run_id)))
        for rank in range(NODES):
            if rank != node:
                shutil.rmtree(copy.rank_dir(0, rank))
        processes.append(start_watch(copy.path, node, num_nodes=NODES, options=["--bare"]))
    address = f"{lake}/{whole.run_id}"
    (tmp_path / "fourth").mkdir()
    with Mirror(address, tmp_path / "fourth") as mirror:

        def all_are_there() -> bool:
            try:
                mirror.refresh()
            except AddressError:  # nothing is there yet
                return False
            with Store.open(mirror.run, catch_up=False) as store:
                return store.rows("SELECT count(*) FROM steps WHERE duration_ns > 0") == [(60 * NODES,)]

        wait_for(all_are_there, "the steps of all ranks at the address")
        assert mirror.is_live
        with published_run(address) as (_, diagnosis, note):
            (straggler,) = [finding for finding in diagnosis.fired if finding.kind == "straggler"]
            assert straggler.ranks == (SLOW,)
            assert diagnosis.goodput is not None
            assert f"of all {NODES} nodes until" in note
        for process in processes[:NODES]:
            process.kill()
            process.wait(100)
        for watch in processes[NODES:]:
            assert watch.wait(60) == 0
        mirror.refresh()
        assert not mirror.is_live, "each watch published its last rows"
        with Store.open(mirror.run, catch_up=False) as store:
            assert store.rows("SELECT count(*) FROM events WHERE kind = 'watch_stopped'") == [(NODES,)]
