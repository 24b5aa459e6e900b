"""The plugin's records, through the function table of every version."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from probes.collectives.nccl_plugin.layout import _shift, header_text
from probes.tape.format.names import read_names
from probes.tape.format.nccl_tables import NAMES_FILE
from probes.tape.format.reader import read_segment, segment_paths
from probes.tape.format.schema import TABLES, UNSET
from probes.tape.format.writer import COMPLETE, OPEN
from tests.support.played.nccl_interface import VERSIONS, PlayedNccl
from tests.waiting import wait_for

Play = Callable[..., PlayedNccl]
NONE = UNSET["i64"]


def records(tmp_path: Path, table: str) -> npt.NDArray[Any]:
    parts = [read_segment(path) for path in segment_paths(tmp_path / "tape", table)]
    assert all(part.header.rank == 3 and part.header.attempt == 1 for part in parts)
    return np.concatenate([part.records for part in parts])


def text(tmp_path: Path, number: int) -> str:
    names, skipped = read_names(tmp_path / "tape" / NAMES_FILE)
    assert not skipped
    return names[int(number)]


def test_header_is_generated_from_schema() -> None:
    path = Path(__file__).parents[4] / "probes/collectives/nccl_plugin/tape_layout.h"
    assert path.read_text() == header_text(), "python -m probes.collectives.nccl_plugin.layout > tape_layout.h"


def test_names_follow_a_torn_line_of_an_earlier_process(play: Play, tmp_path: Path) -> None:
    (tmp_path / "tape").mkdir()
    (tmp_path / "tape" / NAMES_FILE).write_text('{"id": 1, "name": "RING"}\n{"id": 2, "na')
    play(5).communicator(num_ranks=8, rank=3).collective("AllReduce", count=4096, channels=2)
    [row] = records(tmp_path, "nccl_calls")
    names, skipped = read_names(tmp_path / "tape" / NAMES_FILE)
    words = [names.get(int(row[column])) for column in ("function", "dtype", "algorithm", "protocol")]
    assert (words, skipped) == (["AllReduce", "ncclFloat32", "RING", "SIMPLE"], 1)


@pytest.mark.parametrize("version", VERSIONS)
def test_collective_of_every_version(play: Play, tmp_path: Path, version: int) -> None:
    nccl = play(version)
    comm = nccl.communicator(name="data_parallel", comm_hash=2**63 + 5, num_ranks=8, rank=3, nodes=2)
    assert nccl.mask & 2
    comm.group()
    call = comm.collective("AllReduce", count=4096, channels=2, seq=17)
    [row] = records(tmp_path, "nccl_calls")
    assert row["state"] == OPEN
    assert row["launched_ns"] == row["kernel_start_ns"] == row["kernel_end_ns"] == NONE
    if version >= 3:
        call.launched()
        first = call.kernel(0, 1000)
        [row] = records(tmp_path, "nccl_calls")
        assert row["state"] == OPEN
        assert row["launched_ns"] >= row["enqueue_ns"]
        assert row["channels_started"] == 1
        second = call.kernel(1, 1010)
        first.stop(1500)
        [row] = records(tmp_path, "nccl_calls")
        assert row["state"] == OPEN
        assert row["kernel_end_ns"] == NONE
        second.stop(1800)
    else:
        call.launched()
    [row] = records(tmp_path, "nccl_calls")
    assert row["state"] == COMPLETE
    assert (row["nccl_seq"], row["seq"], row["count"]) == (17, 0, 4096)
    words = [text(tmp_path, row[column]) for column in ("function", "dtype", "algorithm", "protocol")]
    assert words == ["AllReduce", "ncclFloat32", "RING", "SIMPLE"]
    assert row["root"] == row["peer"] == UNSET["i32"]
    if version >= 3:
        assert row["kernel_end_ns"] >= row["kernel_start_ns"] >= row["enqueue_ns"]
        assert row["channels_started"] == row["channels_stopped"] == 3
    if version >= 4:
        assert (row["gpu_start_ns"], row["gpu_end_ns"]) == (1000, 1800)
        assert (row["slowest_channel"], row["slowest_channel_ns"]) == (1, 790)
        assert row["num_channels"] == 2
    else:
        assert row["gpu_start_ns"] == row["gpu_end_ns"] == NONE
        assert row["num_channels"] == UNSET["i32"]


@pytest.mark.parametrize("version", VERSIONS)
def test_communicator_of_every_version(play: Play, tmp_path: Path, version: int) -> None:
    comm = play(version).communicator(name='mesh "tp"', comm_hash=2**63 + 5, num_ranks=8, rank=3, nodes=2)
    comm.collective("Broadcast", count=1, root=2).launched()
    [row] = records(tmp_path, "nccl_communicators")
    assert row["state"] == OPEN
    assert row["interface_version"] == version
    assert row["comm_hash"] == 2**63 + 5 - 2**64
    assert row["comm_rank"] == 3
    assert text(tmp_path, row["comm_name"]) == 'mesh "tp"'
    assert (row["num_ranks"], row["num_nodes"]) == ((8, 2) if version >= 4 else (UNSET["i32"],) * 2)
    assert records(tmp_path, "nccl_calls")[0]["root"] == 2
    comm.finalize()
    [row] = records(tmp_path, "nccl_communicators")
    assert row["state"] == COMPLETE
    assert row["finalized_ns"] >= row["created_ns"]


@pytest.mark.parametrize("version", VERSIONS)
def test_point_to_point_counts_per_peer_and_direction(play: Play, tmp_path: Path, version: int) -> None:
    comm = play(version).communicator(num_ranks=4)
    for function, peer in (("Send", 1), ("Send", 1), ("Recv", 1), ("Send", 2)):
        comm.point_to_point(function, peer=peer, count=10).run(1 if version >= 3 else 0)
    rows = records(tmp_path, "nccl_calls")
    assert [text(tmp_path, row["function"]) for row in rows] == ["Send", "Send", "Recv", "Send"]
    assert rows["peer"].tolist() == [1, 1, 1, 2]
    assert rows["seq"].tolist() == ([0, 1, 0, 0] if version >= 4 else [NONE] * 4)
    assert (rows["nccl_seq"] == NONE).all()
    assert (rows["state"] == COMPLETE).all()


def test_late_channel_of_a_send_opens_it_again(play: Play, tmp_path: Path) -> None:
    """NCCL polls channel after channel: one may have stopped before it reports that the next has started."""
    call = play(5).communicator().point_to_point("Send", peer=1, count=1, channels=2)
    call.launched()
    call.kernel(0, 10).stop(20)
    assert records(tmp_path, "nccl_calls")[0]["state"] == COMPLETE
    second = call.kernel(1, 10)
    assert records(tmp_path, "nccl_calls")[0]["state"] == OPEN
    second.stop(90)
    [row] = records(tmp_path, "nccl_calls")
    assert row["state"] == COMPLETE
    assert row["gpu_end_ns"] == 90


@pytest.mark.parametrize("version", [6, 7])
def test_collective_by_copy_engines_has_no_end(play: Play, tmp_path: Path, version: int) -> None:
    play(version).communicator().by_copy_engine("AllGather", count=5).launched()
    [row] = records(tmp_path, "nccl_calls")
    assert row["state"] == COMPLETE
    assert text(tmp_path, row["protocol"]) == "CE"
    assert row["kernel_start_ns"] == row["kernel_end_ns"] == NONE
    assert row["channels_started"] == NONE


def test_kernel_that_ends_before_its_call_is_reported_launched(play: Play, tmp_path: Path) -> None:
    call = play(5).communicator().collective("AllReduce", count=1, channels=1)
    call.kernel(0, 10).stop(20)
    assert records(tmp_path, "nccl_calls")[0]["state"] == OPEN
    call.launched()
    assert records(tmp_path, "nccl_calls")[0]["state"] == COMPLETE


def test_channels_are_rows_where_they_are_asked_for(play: Play, tmp_path: Path) -> None:
    nccl = play(5, events="calls,channels")
    assert nccl.communicator().collective("AllReduce", count=1, channels=2).run(2, 1000, 500) is None
    rows = records(tmp_path, "nccl_channels")
    assert rows["channel"].tolist() == [0, 1]
    assert (rows["gpu_end_ns"] - rows["gpu_start_ns"]).tolist() == [500, 500]
    assert (rows["state"] == COMPLETE).all()
    assert not nccl.mask & 8


def test_default_events_are_cheap(play: Play, tmp_path: Path) -> None:
    nccl = play(5)
    nccl.communicator().collective("AllReduce", count=1, channels=1).run(1)
    assert nccl.mask == 2 + 4 + 8 + 64 + 4096
    assert not segment_paths(tmp_path / "tape", "nccl_channels")


@pytest.mark.parametrize("version", VERSIONS)
def test_link_sums_operations_and_shows_the_one_in_flight(play: Play, tmp_path: Path, version: int) -> None:
    comm = play(version).communicator(num_ranks=4)
    call = comm.collective("AllReduce", count=1, channels=1)
    first = call.proxy_op(channel=5, peer=2, steps=8, is_send=True)
    other = call.proxy_op(channel=5, peer=2, steps=8, is_send=False)
    first.stop()
    second = call.proxy_op(channel=5, peer=2, steps=6, is_send=True)
    if version <= 3:
        second.progress(4, 4096)
    send, receive = sorted(records(tmp_path, "nccl_links"), key=lambda row: -row["is_send"])
    assert (send["is_send"], receive["is_send"]) == (1, 0)
    assert (send["num_ops"], send["channel"], send["peer"], send["op_num_steps"]) == (1, 5, 2, 6)
    assert send["op_call"] == 0
    assert send["op_start_ns"] >= send["start_ns"]
    assert send["op_steps_done"] == (4 if version <= 3 else NONE)
    second.stop()
    other.stop()
    send, _ = sorted(records(tmp_path, "nccl_links"), key=lambda row: -row["is_send"])
    assert (send["num_ops"], send["op_start_ns"]) == (2, NONE)
    assert (send["num_steps"], send["bytes"]) == ((4, 4096) if version <= 3 else (NONE, NONE))
    assert send["state"] == OPEN
    comm.finalize()
    assert (records(tmp_path, "nccl_links")["state"] == COMPLETE).all()


@pytest.mark.parametrize("version", [4, 7])
def test_steps_split_into_waits(play: Play, tmp_path: Path, version: int) -> None:
    call = play(version, events="links,steps").communicator().collective("AllReduce", count=1)
    op = call.proxy_op(channel=0, peer=1, steps=2, is_send=True)
    for number in range(2):
        step = op.step(number)
        for state in (8, 20, 9):  # GPU, the peer's credit, the network
            op.step_state(step, state, 1 << 19)
        op.nccl.stop(step)
    [row] = records(tmp_path, "nccl_links")
    assert (row["num_steps"], row["bytes"], row["op_steps_done"]) == (2, 1 << 20, 2)
    assert all(row[f"{part}_wait_ns"] > 0 for part in ("gpu", "peer", "network"))
    assert row["gpu_wait_ns"] + row["peer_wait_ns"] + row["network_wait_ns"] <= row["progress_ns"] - row["start_ns"]


def test_operation_for_another_process_has_no_call(play: Play, tmp_path: Path) -> None:
    """PXN: context and parent are addresses of the neighbour, which must not be followed."""
    call = play(5).communicator().collective("AllReduce", count=1)
    op = call.proxy_op(channel=1, peer=7, steps=3, is_send=True, pid=os.getpid() + 1)
    [row] = records(tmp_path, "nccl_links")
    assert row["op_call"] == NONE
    assert row["communicator"] == UNSET["i32"]
    op.stop()


def test_handles_that_outlive_what_they_stood_for(play: Play, tmp_path: Path) -> None:
    comm = play(5).communicator()
    call = comm.collective("AllReduce", count=1)
    op = call.proxy_op(channel=0, peer=1, steps=1, is_send=True)
    comm.finalize()
    op.stop()
    op.nccl.state(op.handle, 19)
    call.launched()
    assert comm.collective("AllReduce", count=1).handle is None
    assert call.kernel(0, 1).handle is None
    for junk in (None, 1, 2**63, 2**64 - 1, 0x7FFF_0000_1234):
        op.nccl.stop(junk)
        op.nccl.state(junk, 22)
        assert op.nccl.start(junk, op.nccl.descriptor(type=2)) is None
    assert records(tmp_path, "nccl_communicators")[0]["state"] == COMPLETE
    assert records(tmp_path, "nccl_links")[0]["op_start_ns"] != NONE  # in flight when the communicator ended


def test_wrap_around_keeps_every_finished_call(play: Play, tmp_path: Path) -> None:
    capacity = 1 << _shift(TABLES["nccl_calls"])
    comm = play(5).communicator()
    stuck = comm.collective("AllGather", count=7, channels=1)
    number = 5 * capacity + 10
    for _ in range(number):
        comm.collective("AllReduce", count=1, channels=1).run(1)
    stuck.run(1)  # its record has left the window: its end stays unknown, and nothing else is touched
    ahead = tmp_path / "tape" / "nccl_calls.00006.tape"  # made in advance, by a thread; its magic comes last
    wait_for(lambda: ahead.exists() and ahead.read_bytes()[:6] == b"RSTAPE", "segment mapped in advance")
    paths = segment_paths(tmp_path / "tape", "nccl_calls")
    rows = records(tmp_path, "nccl_calls")
    assert len(rows) == number + 1
    assert rows["state"][0] == OPEN
    assert (rows["state"][1:] == COMPLETE).all()
    assert rows["seq"].tolist() == list(range(number + 1))
    assert [read_segment(path).header.sealed for path in paths] == [True, True, True, False, False, False, False]
    assert max(read_segment(path).header.dropped for path in paths) == 0


def test_plugin_survives_being_closed_and_opened_again(play: Play, tmp_path: Path) -> None:
    """NCCL closes its plugin with the last communicator and opens it again for the next."""
    import _ctypes

    nccl = play(5)
    first = nccl.communicator()
    late = first.collective("AllReduce", count=1)
    first.finalize()
    path = nccl._library._name
    _ctypes.dlclose(nccl._library._handle)
    again = PlayedNccl(Path(path), 5)
    again.communicator().collective("AllReduce", count=1).run(1)
    late.launched()  # a thread of NCCL that was still inside
    assert records(tmp_path, "nccl_communicators")["communicator"].tolist() == [0, 1]
    assert records(tmp_path, "nccl_calls")["call"].tolist() == [0, 1]


def test_without_a_folder_nothing_is_recorded(play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = play(5)
    monkeypatch.delenv("RANKSCOPE_NCCL_DIR")
    comm = nccl.communicator()
    assert nccl.mask == 0
    assert comm.context is None
    assert comm.collective("AllReduce", count=1).handle is None
    comm.finalize()


def test_folder_that_another_process_records_in(play: Play, tmp_path: Path) -> None:
    first, second = play(5), play(6)
    assert first.communicator().context
    assert second.communicator().context is None
    assert len(records(tmp_path, "nccl_communicators")) == 1


def test_next_process_in_the_same_folder_goes_on_behind(play: Play, tmp_path: Path) -> None:
    pid = os.fork()
    if not pid:
        play(5).communicator(name="first").collective("AllReduce", count=1).run(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    play(6).communicator(name="second").collective("AllGather", count=1).run(1)
    assert [text(tmp_path, row["comm_name"]) for row in records(tmp_path, "nccl_communicators")] == ["first", "second"]
    assert [text(tmp_path, row["function"]) for row in records(tmp_path, "nccl_calls")] == ["AllReduce", "AllGather"]


def test_forked_child_records_nothing(play: Play, tmp_path: Path) -> None:
    nccl = play(5)
    comm = nccl.communicator()
    call = comm.collective("AllReduce", count=1)
    pid = os.fork()
    if not pid:
        ok = comm.collective("AllReduce", count=1).handle is None
        call.run(1)
        ok &= nccl.communicator().context is None and nccl.mask == 0
        os._exit(0 if ok else 1)
    assert os.waitpid(pid, 0)[1] == 0
    [row] = records(tmp_path, "nccl_calls")
    assert row["state"] == OPEN
    assert len(records(tmp_path, "nccl_communicators")) == 1
    call.run(1)
    assert records(tmp_path, "nccl_calls")[0]["state"] == COMPLETE


def test_full_disk_is_counted_and_survived(play: Play, tmp_path: Path) -> None:
    import resource

    pid = os.fork()
    if not pid:
        comm = play(5).communicator()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        handles = [comm.collective("AllReduce", count=1).handle for _ in range(3000)]
        os._exit(0 if handles == [None] * 3000 else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert not segment_paths(tmp_path / "tape", "nccl_calls")
