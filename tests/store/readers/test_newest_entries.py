"""Only the newest entries of a ring are built where the rest says nothing: to the same end as reading all of it."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from store.readers.dumps.flight_recorder import RankDump, read_dump
from store.readers.dumps.many_dumps import _loads
from store.readers.dumps.newest_entries import Shortened
from tests.support.simulator.recorder_dumps import Job


def job(*, oldest: str = "completed", every: int = 7) -> Job:
    """1,500 calls of two ranks in two groups, a ring of 1,200, and a last one that hangs."""
    made = Job(2, groups={"1": ("tp", [0, 1])}, ring=1200)
    for number in range(1500):
        state = oldest if number == 600 else "completed"
        made.collective("all_gather" if number % 3 else "all_reduce", group="1" if number % every == 0 else "0",
                        state=state, numel=8 + number % 5)  # fmt: skip
    made.collective("all_reduce", ranks=[0])
    return made


def read_both(path: Path) -> tuple[Any, RankDump, RankDump]:
    return _loads(path), read_dump(path, 0, unpickle=_loads), read_dump(path, 0)


def test_left_out_entries_change_no_verdict(tmp_path: Path) -> None:
    job().write(tmp_path)
    top, quick, slow = read_both(tmp_path / "nccl_trace_rank_0")
    assert isinstance(top, Shortened)
    assert top.num_left_out > 1000
    assert (quick.num_entries, quick.dropped, quick.last_seq, quick.last_ns) == (
        slow.num_entries, slow.dropped, slow.last_seq, slow.last_ns,
    )  # fmt: skip
    world, rare = sorted(slow.calls, key=lambda group: group[0])
    assert quick.calls[world] == {seq: slow.calls[world][seq] for seq in quick.calls[world]}
    assert [call for call in quick.calls[world].values() if not call.done] == [
        call for call in slow.calls[world].values() if not call.done
    ]
    assert list(quick.calls[rare])[-4:] == list(slow.calls[rare])[-4:]


@pytest.mark.parametrize("state", ["completed", "started"])
def test_a_ring_of_one_group_says_the_same(tmp_path: Path, state: str) -> None:
    """Also with all of its calls in flight: the oldest of them is what the rank waits in."""
    made = Job(3, ring=500)
    made.steps(600)
    for _ in range(400):
        made.collective("all_reduce", state=state)
    made.collective("all_reduce", ranks=[0, 1])
    made.write(tmp_path)
    top, quick, slow = read_both(tmp_path / "nccl_trace_rank_0")
    if state == "started":  # the first hundred are complete
        assert not isinstance(top, Shortened)
        made.entries[0] = made.entries[0][-400:]
        made.write(tmp_path)
        top, quick, slow = read_both(tmp_path / "nccl_trace_rank_0")
    assert isinstance(top, Shortened)
    (group,) = slow.calls
    opened = {seq: call for seq, call in slow.calls[group].items() if not call.done}
    assert next(iter(opened.values())) == next(call for call in quick.calls[group].values() if not call.done)
    assert list(quick.calls[group].values())[-30:] == list(slow.calls[group].values())[-30:]
    assert replace(quick, modified_ns=0, calls={}) == replace(slow, modified_ns=0, calls={})


CHANGES = ("an old call that never ended", "a coalesced batch", "gloo", "a group that is rare now", "a group of old",
           "a p2p call among them", "another protocol")  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_where_old_entries_may_matter_all_are_read(tmp_path: Path, change: str) -> None:
    made = job(oldest="started" if change == "an old call that never ended" else "completed")
    if change == "a coalesced batch":
        made.coalesced({0: ["send 0->1"], 1: ["recv 1<-0"]})
    dump = made.dump(0)
    entries = dump["entries"]
    if change == "gloo":
        entries[3]["profiling_name"] = "gloo:all_reduce"
    if change == "a group that is rare now":
        entries[300]["process_group"] = ("1", "tp, but never again")
    if change == "a group of old":
        entries[700]["process_group"] = ("1", "tp, but never again")
    if change == "a p2p call among them":
        entries[300]["is_p2p"] = True
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps(dump, protocol=4 if change == "another protocol" else 2))
    top, quick, slow = read_both(path)
    assert not isinstance(top, Shortened)
    assert quick == slow


def test_a_number_that_is_missing_is_noticed(tmp_path: Path) -> None:
    dump = job().dump(0)
    del dump["entries"][400]
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps(dump, protocol=2))
    assert not isinstance(_loads(path), Shortened)
