"""The gap in which the host of a slow rank on a GPU is longer than those of its peers."""

from __future__ import annotations

from typing import Any

import pytest

from analyzers.stragglers.comparison.peer_comparison import Straggler
from analyzers.stragglers.slow_place import host_place
from tests.analyzers.memory_store import MemoryStore

MS = 1_000_000
GAPS = ("before_forward", "forward_to_backward", "backward_to_optimizer", "after_optimizer")


def hosts(
    longer: dict[str, float], *, usual: dict[str, float] | None = None, on_device_ms: int | None = None
) -> MemoryStore:
    """Three ranks; gaps of rank 1 are longer by so many ms, and those of all ranks so long. `on_device_ms`: by how much
    its stamped steps are longer on its device."""
    store = MemoryStore()
    rows: dict[str, list[dict[str, Any]]] = {"steps": [], "spans": []}
    for rank in range(3):
        for step in range(1, 5):
            at = begin = step * 1000
            for kind, gap in zip(("forward", "backward", "optimizer", ""), GAPS, strict=True):
                at += int((usual or {}).get(gap, 0) + (longer.get(gap, 0) if rank == 1 else 0))
                same = {"attempt": 0, "rank": rank, "step": step}
                if kind:
                    rows["spans"].append(same | {"kind": kind, "start_ns": at * MS, "end_ns": (at + 20) * MS})
                    at += 20
            more_ms = (on_device_ms or 0) * (rank == 1)
            stamps = {} if on_device_ms is None else {"stamped_steps": 1}
            rows["steps"].append(same | stamps | {"start_ns": begin * MS, "duration_ns": (at - begin + more_ms) * MS})
    for table, of in rows.items():
        store.add(table, of)
    return store


def place(store: MemoryStore, *, excess_ms: float = 40.0) -> str:
    slow = Straggler(
        rank=1, cause="compute", segments=(), first_step=1, last_step=4, factor=1.4, excess_ms=excess_ms, step_ms=100.0,
        step_without_ms=60.0, phase_factors={}, phase_excess_ms={}, peers_wait_more_ms=0.0, num_steps=4, ongoing=True,
    )  # fmt: skip
    found, _ = host_place(store, 0, slow, [0, 1, 2])
    return found


@pytest.mark.parametrize("gap", GAPS)
def test_the_gap_that_holds_the_excess_is_the_place(gap: str) -> None:
    assert place(hosts({gap: 40.0})) == gap


def test_a_gap_that_holds_a_part_of_it_is_no_place() -> None:
    assert place(hosts({"before_forward": 20.0})) == ""


def test_where_the_peers_wait_for_their_devices_the_host_says_nothing() -> None:
    """A value is read back there: a slow device makes this gap longer, wherever it is slow."""
    assert place(hosts({"forward_to_backward": 40.0}, usual={"forward_to_backward": 30.0})) == ""


def test_a_stamped_step_ends_on_its_host_where_the_next_one_begins() -> None:
    """Its duration is that of its device, which is 70 ms longer: its host seemed late after the optimizer."""
    assert place(hosts({"forward_to_backward": 40.0}, on_device_ms=70)) == "forward_to_backward"


def test_without_spans_there_is_no_place() -> None:
    assert place(MemoryStore()) == ""
