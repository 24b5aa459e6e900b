"""Thousands of dumps: read in limited processes, and to the same end as one by one."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from pathlib import Path

import pytest

from store.readers.dumps import flight_recorder
from store.readers.dumps.flight_recorder import RankDump, read_dump
from store.readers.dumps.many_dumps import FEW, read_many
from store.readers.untrusted.external_files import SourceError
from tests.store.readers.hostile_files import DUMPS, PROOF
from tests.support.simulator.recorder_dumps import Job

HOSTILE = ("a class with __reduce__", "a huge place in the memo", "a bytearray of 2**62", "a FIFO", "a string of 2 GB")


@pytest.mark.parametrize("seed", range(6))
def test_skimming_over_old_entries_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    dice = random.Random(seed)
    job = Job(4, groups={"1": ("tp", [0, 1]), "2": ("rare", [0, 2])}, ring=900)
    for number in range(1200):
        group = "0" if dice.random() < 0.7 else "1" if number > 5 else "2"
        state = "started" if dice.random() < 0.01 else "completed"
        job.collective(dice.choice(["all_reduce", "all_gather"]), group=group, state=state)
        if dice.random() < 0.05:
            job.p2p(0, 1)
        if seed == 5 and number == 300:
            job.coalesced({0: ["send 0->1"], 1: ["recv 1<-0"]})
    job.write(tmp_path, ranks=[0])
    path = tmp_path / "nccl_trace_rank_0"
    skimmed = read_dump(path, 0)
    monkeypatch.setattr(flight_recorder, "_without_old_entries", lambda entries, dump: entries)
    assert skimmed == read_dump(path, 0)


def test_many_are_read_as_one_by_one_and_nothing_runs(tmp_path: Path) -> None:
    job = Job(FEW + 6)
    job.steps(2)
    job.write(tmp_path)
    places = [(tmp_path / f"nccl_trace_rank_{rank}", rank) for rank in range(FEW + 6)]
    for rank, name in enumerate(HOSTILE, start=3):
        folder = tmp_path / f"hostile-{rank}"
        folder.mkdir()
        DUMPS[name][0](folder)
        places[rank] = (next(folder.iterdir()), rank)
    found = list(read_many(places, processes=2))
    assert [path for path, _ in found] == [path for path, _ in places]
    for number, (path, dump) in enumerate(found):
        if 3 <= number < 3 + len(HOSTILE):
            assert isinstance(dump, SourceError), path
        else:
            assert isinstance(dump, RankDump)
            assert replace(dump, modified_ns=0) == replace(read_dump(path, number), modified_ns=0)
    assert not any((folder / PROOF).exists() for folder in tmp_path.glob("hostile-*"))


def test_a_process_that_is_ended_costs_no_dump(tmp_path: Path) -> None:
    """Keys whose hashes collide would keep Python's unpickler busy for minutes: the alarm ends that process."""
    job = Job(FEW + 2)
    job.steps(1)
    job.write(tmp_path)
    good = [(tmp_path / f"nccl_trace_rank_{rank}", rank) for rank in range(1, FEW + 2)]
    same_hash = 2**61 - 1
    bomb = tmp_path / "nccl_trace_rank_0"
    keys = b"".join(pickle.dumps(number * same_hash, protocol=2)[2:-1] + b"K\x00" for number in range(60_000))
    bomb.write_bytes(b"\x80\x02}(X\x09\x00\x00\x00pg_config}(" + keys + b"uu.")
    found = list(read_many([(bomb, 0), *good], processes=2, time_s=0.3))
    assert isinstance(found[0][1], SourceError)
    assert "key that is not text" in str(found[0][1])
    assert all(isinstance(dump, RankDump) for _, dump in found[1:])
