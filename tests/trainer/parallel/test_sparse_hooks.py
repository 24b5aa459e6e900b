"""int8 and top-k reductions: nothing of a gradient is lost for good, and what is not finite arrives everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.processes import run_ranks
from trainer.parallel.sparse_hooks import reduce_int8, reduce_largest

pytestmark = pytest.mark.timeout(120)

COUNT, TIMES = 3000, 60


def reduced(kind: str, corrected: Tensor, sizes: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    group, sizes = dist.group.WORLD, sizes or [corrected.numel()]
    assert group is not None
    if kind == "int8":
        return reduce_int8(corrected, sizes, group)
    return reduce_largest(corrected, group, ratio=0.05)


def in_buckets(buckets: Sequence[Sequence[int]]) -> dict[int, tuple[Tensor, Tensor]]:
    """Mean and error in int8 of parameters of these sizes, reduced in these buckets."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for sizes in buckets:
        own = [torch.randn(n, generator=torch.Generator().manual_seed(n + dist.get_rank())) for n in sizes]
        mean, error = reduced("int8", torch.cat(own), sizes)
        found |= dict(
            zip(sizes, zip(torch.split(mean, [*sizes]), torch.split(error, [*sizes]), strict=True), strict=True)
        )
    return found


def sums(rank: int, world_size: int) -> dict[str, Any]:
    """Of one gradient a rank, sent again and again: relative distance of the mean of what was applied."""
    found: dict[str, Any] = {}
    own = torch.randn(COUNT, generator=torch.Generator().manual_seed(rank))
    exact = own.clone()
    dist.all_reduce(exact)
    exact /= world_size
    for kind in ("int8", "topk"):
        error, applied, distances = torch.zeros(COUNT), torch.zeros(COUNT), []
        for _ in range(TIMES):
            mean, error = reduced(kind, own + error)
            applied += mean
            distances.append(((applied / (len(distances) + 1) - exact).norm() / exact.norm()).item())
        both = [torch.empty_like(error) for _ in range(world_size)]
        dist.all_gather(both, error)
        left = TIMES * exact - applied - sum(both) / world_size
        found[kind] = {
            "distances": distances,
            "lost": (left.norm() / exact.norm()).item(),
            "bits": applied.sum().item(),
        }
        for bad in (float("nan"), float("inf")):
            spoiled = own.clone()
            if rank == 1:
                spoiled[7] = bad
            found[f"{kind} {bad}"] = bool(reduced(kind, spoiled)[0].isfinite().all())
        zero, rest = reduced(kind, torch.zeros(5))
        found[f"{kind} zeros"] = (zero.abs().sum() + rest.abs().sum()).item()
    one, other = in_buckets([[300, 2000, 7]]), in_buckets([[7], [2000, 300]])
    found["rebuilt"] = all(torch.equal(a, b) for size in one for a, b in zip(one[size], other[size], strict=True))
    return found


@pytest.fixture(scope="module")
def three_ranks() -> list[dict[str, Any]]:
    return run_ranks(sums, world_size=3, deadline_s=100)


@pytest.mark.parametrize("kind", ["int8", "topk"])
def test_what_was_not_sent_comes_later(kind: str, three_ranks: list[dict[str, Any]]) -> None:
    of = three_ranks[0][kind]
    assert of["lost"] < 1e-4, "applied and kept are all of it"
    assert of["distances"][-1] < of["distances"][0] / 5
    assert len({one[kind]["bits"] for one in three_ranks}) == 1


@pytest.mark.parametrize("kind", ["int8", "topk"])
def test_zeros_stay_zeros_and_a_bad_number_is_seen_by_all(kind: str, three_ranks: list[dict[str, Any]]) -> None:
    for one in three_ranks:
        assert one[f"{kind} zeros"] == 0
        assert not one[f"{kind} nan"]
        assert not one[f"{kind} inf"]


def test_in_int8_a_parameter_does_not_depend_on_its_bucket(three_ranks: list[dict[str, Any]]) -> None:
    assert all(one["rebuilt"] for one in three_ranks)
