"""The allocator's counters of a played device: what it does not tell is not 0, and an error stops no step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from probes.device.memory import AllocatorRetries, memory_reader
from probes.fail_open import DEVICE, error_counts
from probes.tape import event_kinds
from probes.tape.format.schema import UNSET


def test_memory_is_what_the_allocator_has_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"allocated_bytes.all.current": 7 << 30})
    assert memory_reader("cuda:0")() == 7 << 30


def test_a_counter_that_is_missing_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator of one's own has none of torch's counters."""
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {})
    assert memory_reader("cuda:0")() == int(UNSET["i64"])
    events: list[str] = []
    AllocatorRetries("cuda:0").report(lambda kind, **detail: events.append(kind))
    assert events == []
    retries: list[dict[str, int]] = []
    allocator = AllocatorRetries("cuda:0", lambda: {"num_alloc_retries": 2})
    allocator.report(lambda kind, **detail: retries.append(detail))
    assert retries == [{"num_retries": 2}]


def test_an_error_of_the_driver_stops_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: Any) -> Any:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")

    monkeypatch.delenv("RANKSCOPE_FAIL_LOUD", raising=False)
    monkeypatch.setattr(torch.cuda, "memory_stats", lost)
    before = error_counts.get(DEVICE, 0)
    assert memory_reader("cuda:0")() == int(UNSET["i64"])
    AllocatorRetries("cuda:0").report(lambda kind, **detail: pytest.fail(kind))
    assert error_counts[DEVICE] == before + 2


def test_a_peak_is_written_when_it_has_grown() -> None:
    peaks = iter([100, 100, 100.5, 200])
    found: list[tuple[str, int]] = []
    allocator = AllocatorRetries("cuda:0", lambda: {"allocated_bytes.all.peak": next(peaks)})
    for _ in range(4):
        allocator.report(lambda kind, allocated_bytes: found.append((kind, allocated_bytes)))
    assert found == [(event_kinds.MEMORY_PEAK, 100), (event_kinds.MEMORY_PEAK, 200)]
