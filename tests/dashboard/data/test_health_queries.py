"""Health of many devices: what stands out is shown, the rest is a band, and whatever a device complains of is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dashboard.data.sql.health_queries import AT_EACH_END, MAX_PIECES, device_problems, health_trends, xids
from tests.analyzers.memory_store import MemoryStore

SECOND = 1_000_000_000


def readings(num_devices: int, num_samples: int, **columns: Any) -> MemoryStore:
    """A reading a second of each device; `columns`: arrays (device, sample)."""
    device, sample = (grid.ravel() for grid in np.meshgrid(np.arange(num_devices), np.arange(num_samples)))
    shaped = {name: np.asarray(values)[device, sample] for name, values in columns.items()}
    store = MemoryStore()
    store.add_columns(
        "health", attempt=np.zeros(len(device), np.int32), rank=np.full(len(device), -1, np.int32),
        sample_ns=(5 + sample) * SECOND, node=np.array([f"n{i // 8}" for i in range(num_devices)], object)[device],
        device=np.array([f"GPU-{i:08}" for i in range(num_devices)], object)[device], **shaped,
    )  # fmt: skip
    return store


def test_a_few_devices_have_a_line_each_over_the_whole_time() -> None:
    heat = np.tile(60.0 + np.arange(3)[:, None], (1, 100))
    trend = health_trends(readings(3, 100, temperature_celsius=heat), {"temperature_celsius": "max"})
    found = trend["temperature_celsius"]
    assert (found.num_devices, found.all_devices) == (3, None)
    assert [(line.node, line.device, float(line.values[-1])) for line in found.lines] == [
        ("n0", f"GPU-{i:08}", 60.0 + i) for i in range(3)
    ]
    assert all((line.at[0], line.at[-1]) == (0, 99) for line in found.lines)


def test_of_a_thousand_devices_the_hot_one_the_cold_one_and_the_newest_second_are_there() -> None:
    num_devices, num_samples = 1_024, 650
    heat = np.random.default_rng(1).uniform(55, 65, (num_devices, num_samples))
    heat[700, -1], heat[3] = 99.0, 20.0
    store = readings(num_devices, num_samples, temperature_celsius=heat)
    found = health_trends(store, {"temperature_celsius": "max", "power_watts": "avg"})
    assert set(found) == {"temperature_celsius"}  # nobody gives the other
    trend = found["temperature_celsius"]
    by_device = {line.device: line for line in trend.lines}
    assert (len(by_device), trend.num_devices) == (2 * AT_EACH_END, num_devices)
    assert by_device["GPU-00000700"].values.max() == 99.0
    assert by_device["GPU-00000003"].values.max() == 20.0
    bounds = trend.all_devices
    assert bounds is not None
    assert len(bounds["seconds"]) <= MAX_PIECES
    assert bounds["seconds"][-1] >= num_samples - 2
    assert (bounds["high"].max(), bounds["low"].min()) == (99.0, 20.0)
    assert 58 < np.median(bounds["middle"]) < 65


@pytest.mark.parametrize(
    ("num_devices", "name"), [(2, "ecc_corrected_total"), (40, "ecc_corrected_total"), (2, "tcp_retransmits_total")]
)
def test_of_a_counter_the_rise_during_the_run_is_shown(num_devices: int, name: str) -> None:
    errors = np.full((num_devices, 50), 1_000_000)
    errors[0, 20:] += 7
    found = health_trends(readings(num_devices, 50, **{name: errors}), {name: "max"})
    trend = found[name]
    assert max(line.values.max() for line in trend.lines) == 7
    assert min(line.values.min() for line in trend.lines) == 0
    if trend.all_devices is not None:
        assert (trend.all_devices["high"].max(), trend.all_devices["low"].min()) == (7, 0)
    assert trend.has_risen
    still = health_trends(readings(2, 5, **{name: np.full((2, 5), 9)}), {name: "max"})
    assert not still[name].has_risen


def test_the_worst_device_problems_come_first_and_healthy_devices_have_none() -> None:
    reasons, uncorrected = np.full((4, 10), 1), np.zeros((4, 10), int)
    remapped = np.zeros((4, 10), int)
    failed = np.zeros((4, 10), bool)
    reasons[1, 5:] = 0x20 | 4
    uncorrected[2, 6:] = 3
    failed[3] = True
    store = readings(
        4, 10, throttle_reasons=reasons, ecc_uncorrected_total=uncorrected, remap_failed=failed, remap_pending=failed,
        remapped_rows_total=remapped + 2 * failed,
    )  # fmt: skip
    rows, num = device_problems(store, 10)
    assert num == 3
    assert [row["device"] for row in rows] == ["GPU-00000003", "GPU-00000002", "GPU-00000001"]
    assert rows[0]["remapping"] == "a row could not be remapped"
    assert rows[0]["before the run"] == "remapped rows 2"
    assert rows[1]["during the run"] == "memory errors, uncorrected 3"
    assert rows[2]["throttled by"] == ("power cap (50 % of the time), heat (driver) (50 % of the time)")
    assert device_problems(store, 1)[1] == 3


def test_xids_say_what_they_mean() -> None:
    store = MemoryStore()
    for wall_ns in (1, 2):
        store.event("xid", wall_ns=wall_ns, xid=79, device="GPU-1", node="n0", message="")
    store.event("xid", wall_ns=3, xid=99_999, device="GPU-2", node="n0", message="")
    unknown, fallen = xids(store)
    assert (fallen["XID"], fallen["times"], fallen["class"]) == (79, 2, "bus")
    assert "not in the table" in unknown["meaning"]


def test_a_run_without_health_has_none() -> None:
    store = MemoryStore()
    assert (health_trends(store, {"load_1m": "max"}), device_problems(store, 5), xids(store)) == ({}, ([], 0), [])


def test_a_clock_that_falls_late_has_a_line() -> None:
    clock = np.full((40, 60), 1_980.0)
    clock[7, 50:] = 1_200.0
    found = health_trends(readings(40, 60, sm_clock_hertz=clock), {"sm_clock_hertz": "min"})["sm_clock_hertz"]
    assert "GPU-00000007" in {line.device for line in found.lines}
