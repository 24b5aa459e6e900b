"""From the plugin's tapes into the store: rows of nccl_calls, and rows of collectives for analyzers."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from probes.tape.format.writer import COMPLETE
from store.ingest.ingest import Ingester
from store.reader import Store
from tests.factories import RankWriter, empty_run
from tests.support.played.nccl_interface import PlayedCall, PlayedNccl

RANKS = 4


class World:
    """Ranks of one run, each with a plugin of its own in this process."""

    def __init__(self, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int = 5) -> None:
        self.run = empty_run(tmp_path)
        self.writers = [RankWriter(self.run, rank=rank, ranks=RANKS) for rank in range(RANKS)]
        self.nccl = []
        for rank, writer in enumerate(self.writers):
            copy = tmp_path / f"plugin-{rank}.so"
            shutil.copy(library, copy)
            monkeypatch.setenv("RANKSCOPE_NCCL_DIR", str(writer.directory))
            monkeypatch.setenv("RANKSCOPE_NCCL_RANK", str(rank))
            monkeypatch.setenv("RANKSCOPE_NCCL_ATTEMPT", "0")
            monkeypatch.setenv("RANKSCOPE_NCCL_EVENTS", "")
            self.nccl.append(PlayedNccl(copy, version))
            self.nccl[-1].communicator(comm_hash=999, num_ranks=1).finalize()  # opens the tapes: variables are read

    def group(self, label: str, members: list[int], comm_hash: int, *, recorded_by: str = "nccl_plugin") -> list[Any]:
        """A process group of torch and its communicator, on all members."""
        communicators = []
        for place, rank in enumerate(members):
            self.writers[rank].event(
                "process_group", process_group=label, description=label.partition(":")[0], members=members,
                group_name=str(comm_hash), recorded_by=recorded_by,
            )  # fmt: skip
            communicators.append(self.nccl[rank].communicator(comm_hash=comm_hash, num_ranks=len(members), rank=place))
        return communicators

    def step(self, number: int) -> None:
        """A step begins on every rank, and its forward."""
        for writer in self.writers:
            now = time.monotonic_ns()
            writer.append("steps", COMPLETE, step=number, start_ns=now, duration_ns=10**12)
            writer.append("spans", COMPLETE, step=number, kind="forward", start_ns=now, end_ns=now + 10**12)


@pytest.fixture
def world(plugin_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    return lambda **options: World(plugin_library, tmp_path, monkeypatch, **options)


def rows(world: World, sql: str) -> list[tuple[Any, ...]]:
    with Store.open(world.run, catch_up=False) as store:
        return store.rows(sql)


def test_complete_calls_are_collectives(world: Callable[..., World]) -> None:
    played = world()
    comms = played.group("dp_shard:0-3", [0, 1, 2, 3], comm_hash=5)
    played.step(7)
    for comm in comms:
        comm.collective("AllReduce", count=100, channels=2).run(2)
        comm.collective("ReduceScatter", count=100, channels=1).run(1)
    with Ingester(played.run) as ingester:
        result = ingester.tick()
        assert result.rows["nccl_calls"] == 8
        assert result.rows["collectives"] == 8
        assert "collectives" not in ingester.tick().rows
    found = rows(
        played,
        "SELECT rank, step, seq, bytes, process_group, op, dtype, phase, peer, is_async, wait_ns, end_ns > issue_ns "
        "FROM collectives ORDER BY rank, seq",
    )
    assert found == [
        row
        for rank in range(RANKS)
        for row in (
            (rank, 7, 0, 400, "dp_shard:0-3", "all_reduce", "float32", "forward", None, True, None, True),
            (rank, 7, 1, 1600, "dp_shard:0-3", "reduce_scatter", "float32", "forward", None, True, None, True),
        )
    ]


def test_call_in_flight_is_open_until_it_ends(world: Callable[..., World]) -> None:
    played = world()
    comms = played.group("world:0-3", [0, 1, 2, 3], comm_hash=5)
    calls: list[PlayedCall] = [comm.collective("AllGather", count=8, channels=1) for comm in comms]
    with Ingester(played.run) as ingester:
        ingester.tick()
        open_rows = "SELECT rank FROM collectives WHERE end_ns IS NULL ORDER BY rank"
        assert rows(played, open_rows) == [(0,), (1,), (2,), (3,)]
        for call in calls[:3]:
            call.run(1)
        ingester.tick()
        assert rows(played, open_rows) == [(3,)]
        assert rows(played, "SELECT rank, launched_ns IS NULL FROM nccl_calls WHERE kernel_end_ns IS NULL") == [
            (3, True)
        ]
        calls[3].run(1)
        ingester.tick()
        assert rows(played, open_rows) == []
        assert rows(played, "SELECT count(*) FROM collectives") == [(4,)]


def test_call_of_an_aborted_communicator_is_not_in_flight(world: Callable[..., World]) -> None:
    played = world()
    comms = played.group("world:0-3", [0, 1, 2, 3], comm_hash=5)
    comms[0].collective("AllReduce", count=8, channels=1).launched()
    comms[0].finalize()
    with Ingester(played.run) as ingester:
        ingester.tick()
    assert rows(played, "SELECT count(*) FROM collectives") == [(0,)]
    assert rows(played, "SELECT rank, kernel_end_ns FROM nccl_calls") == [(0, None)]


def test_call_whose_end_was_not_seen_is_not_in_flight_once_a_later_one_is_over(world: Callable[..., World]) -> None:
    played = world()
    comm = played.group("world:0-3", [0, 1, 2, 3], comm_hash=5)[0]
    comm.collective("AllReduce", count=8, channels=2).run(1)  # NCCL planned two channels and reports one
    grouped = comm.collective("AllReduce", count=8, channels=1)
    comm.collective("AllReduce", count=8, channels=1).run(1)  # of the same group call: enqueued before the launch
    grouped.launched()
    with Ingester(played.run) as ingester:
        ingester.tick()
    open_calls = rows(played, "SELECT seq FROM collectives WHERE end_ns IS NULL")
    assert open_calls == [(1,)]


def test_peers_are_global_ranks(world: Callable[..., World]) -> None:
    played = world()
    first, second = played.group("pp:1,3", [1, 3], comm_hash=9)
    first.point_to_point("Send", peer=1, count=4).run(1)
    second.point_to_point("Recv", peer=0, count=4).run(1)
    with Ingester(played.run) as ingester:
        ingester.tick()
    found = rows(played, "SELECT rank, op, peer, seq, process_group FROM collectives ORDER BY rank")
    assert found == [(1, "send", 3, 0, "pp:1,3"), (3, "recv", 1, 0, "pp:1,3")]


def test_calls_that_the_wrapper_records_are_not_there_twice(world: Callable[..., World]) -> None:
    played = world()
    for comm in played.group("world:0-3", [0, 1, 2, 3], comm_hash=5, recorded_by="wrapper"):
        comm.collective("AllReduce", count=8, channels=1).run(1)
    with Ingester(played.run) as ingester:
        ingester.tick()
    assert rows(played, "SELECT count(*) FROM collectives") == [(0,)]
    assert rows(played, "SELECT count(*) FROM nccl_calls") == [(4,)]


def test_program_without_torch(world: Callable[..., World]) -> None:
    played = world()
    for rank in range(RANKS):
        comm = played.nccl[rank].communicator(comm_hash=0xABCDEF << 40, num_ranks=RANKS, rank=rank)
        comm.collective("Broadcast", count=8, channels=1, root=2).run(1)
        comm.point_to_point("Send", peer=3, count=8).run(1)
    with Ingester(played.run) as ingester:
        ingester.tick()
    assert rows(played, "SELECT DISTINCT process_group, step FROM collectives") == [("nccl:n=4@abcdef", None)]
    assert rows(played, "SELECT DISTINCT peer FROM collectives WHERE op = 'send'") == [(3,)]
    assert rows(played, "SELECT DISTINCT root FROM nccl_calls WHERE function = 'Broadcast'") == [(2,)]


@pytest.mark.parametrize("version", [1, 2])
def test_calls_without_an_end_are_no_collectives(world: Callable[..., World], version: int) -> None:
    """Up to version 2 NCCL does not report kernels: the calls were made, and when they ended is not known."""
    played = world(version=version)
    comm = played.nccl[0].communicator(comm_hash=5)
    comm.collective("AllReduce", count=8).launched()
    with Ingester(played.run) as ingester:
        ingester.tick()
    assert rows(played, "SELECT count(*) FROM collectives") == [(0,)]
    assert rows(played, "SELECT function, launched_ns >= enqueue_ns, kernel_end_ns FROM nccl_calls") == [
        ("AllReduce", True, None)
    ]


def test_torn_names_leave_the_rest_readable(world: Callable[..., World]) -> None:
    played = world()
    comm = played.nccl[0].communicator(comm_hash=5, num_ranks=1)
    comm.collective("AllReduce", count=8, channels=2).run(2)
    names = played.writers[0].directory / "nccl_names.jsonl"
    names.write_text(names.read_text()[:-9])  # torn in the middle of its last line
    with Ingester(played.run) as ingester:
        ingester.tick()
    [(function, protocol)] = rows(played, "SELECT function, protocol FROM nccl_calls")
    assert function == "AllReduce"
    assert protocol.startswith("?")
