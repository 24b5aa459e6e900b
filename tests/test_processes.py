"""`run_ranks`: values by rank, a new group each time, and a test that fails if a rank does."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from tests.processes import run_ranks


def _sum(rank: int, world_size: int, base: int) -> tuple[int, int, str | None, torch.dtype]:
    left, kind = os.environ.get("LEFT"), torch.get_default_dtype()
    os.environ["LEFT"] = "behind"
    torch.set_default_dtype(torch.float64)
    total = torch.tensor([base + rank])
    dist.all_reduce(total)
    return rank, int(total), left, kind


def test_values_come_by_rank_and_nothing_is_left_behind() -> None:
    for world_size, total in ((3, 33), (2, 21)):
        found = run_ranks(_sum, world_size=world_size, args=(10,))
        assert found == [(rank, total, None, torch.float32) for rank in range(world_size)]


def _fails(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("a reason")
    dist.barrier()


def _dies(rank: int, world_size: int) -> None:
    store = _get_default_store()
    store.set(f"has-joined-{rank}", "")
    if rank == 1:
        store.wait(["has-joined-0"])  # it would fail to connect to a rank that is gone
        os.abort()
    time.sleep(600)


def test_a_rank_that_fails_is_told_with_its_traceback() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1 \(exit code 1\).*ValueError: a reason"):
        run_ranks(_fails, world_size=2)


def test_a_rank_that_dies_ends_the_others() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 0 \(exit code -9\).*rank 1 \(exit code -6\)"):
        run_ranks(_dies, world_size=2)


def test_the_deadline_ends_all() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 0 \(exit code -9\)\nkilled at the deadline"):
        run_ranks(_dies, world_size=1, deadline_s=3.0)
