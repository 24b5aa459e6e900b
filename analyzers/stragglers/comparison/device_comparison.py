"""Compare the GPU of a slow rank with the GPUs of its peers: clock, temperature, throttling, and the load of its host.

    device = load_device(source, attempt=0, slow=(3, 40, 90), peers=[0, 1, 2])
    device.explains(factor=1.4)      # "Its GPU runs at 1.20 GHz, its peers at 1.98 GHz: heat, ..."

It uses the readings of table `health` from the start of the first to the end of the last slow step, by the rank's own
clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analyzers.health.analyze import THROTTLE_BITS
from analyzers.policy import SHARED
from analyzers.source import Source, missing_tables

__all__ = ["DeviceComparison", "load_device"]

MAX_PEERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceComparison:
    """Median clock, highest temperature and throttling under load in the slow steps; None for values without a reading.

    Values of the peers are medians over their devices.
    """

    clock_hertz: float | None = None
    peers_clock_hertz: float | None = None
    hottest_celsius: float | None = None
    peers_hottest_celsius: float | None = None
    throttled_ratio: float | None = None
    throttle_words: str = ""
    load_per_cpu: float | None = None

    def explains(self, factor: float) -> str:
        """If the GPU's clock explains why the rank takes `factor` times as long as its peers, return a sentence on it,
        otherwise an empty text."""
        if not self.clock_hertz or not self.peers_clock_hertz or factor <= 1:
            return ""
        if self.peers_clock_hertz / self.clock_hertz - 1 < SHARED.explained_ratio * (factor - 1):
            return ""
        own, peers = self.clock_hertz / 1e9, self.peers_clock_hertz / 1e9
        details = [self.throttle_words] if self.throttle_words else []
        details += [f"{self.hottest_celsius:.0f} degrees"] if self.hottest_celsius is not None else []
        why = f": {', '.join(details)}" if details else ""
        return f"Its GPU runs at {own:.2f} GHz, its peers at {peers:.2f} GHz{why}."

    def evidence(self) -> dict[str, Any]:
        """The readings as evidence of a finding."""
        known = {
            "sm_clock_hertz": self.clock_hertz,
            "sm_clock_of_peers_hertz": self.peers_clock_hertz,
            "temperature_celsius": self.hottest_celsius,
            "temperature_of_peers_celsius": self.peers_hottest_celsius,
            "throttled_ratio": self.throttled_ratio or None,
            "throttle_reason": self.throttle_words,
            "host_load_per_cpu": None if self.load_per_cpu is None else round(self.load_per_cpu, 2),
        }
        return {name: value for name, value in known.items() if value not in (None, "")}


def load_device(
    source: Source, attempt: int, slow: tuple[int, int, int], peers: Sequence[int]
) -> DeviceComparison | None:
    """Read the health of `slow`: (rank, first step, last step) and its peers. None if there is no reading in these
    steps.
    """
    rank, first_step, last_step = slow
    loaded = SHARED.loaded_ratio
    if missing_tables(source, "health", "ranks"):
        return None
    ((begin, end),) = source.rows(
        "SELECT min(start_ns), max(start_ns + duration_ns) FROM steps "
        "WHERE attempt = ? AND rank = ? AND step BETWEEN ? AND ? AND duration_ns IS NOT NULL",
        [attempt, rank, first_step, last_step],
    )
    if begin is None:
        return None
    places = {
        r: (device, host)
        for r, device, host in source.rows(
            "SELECT rank, arg_max(device_uuid, wall_ns), arg_max(host, wall_ns) FROM ranks "
            "WHERE attempt = ? AND rank >= 0 GROUP BY rank",
            [attempt],
        )
    }
    device, host = places.get(rank, (None, None))
    mine = _readings(source, [device] if device else [], (begin, end), loaded)
    others = [places[peer][0] for peer in peers if peer != rank and peer in places and places[peer][0]][:MAX_PEERS]
    theirs = [found for found in _readings(source, others, (begin, end), loaded) if found[0] != device]
    load = _load(source, host, begin, end)
    if not mine and load is None:
        return None
    _, clock, hottest, share, words = mine[0] if mine else (None, None, None, None, "")
    return DeviceComparison(
        clock_hertz=clock,
        peers_clock_hertz=_median([found[1] for found in theirs]),
        hottest_celsius=hottest,
        peers_hottest_celsius=_median([found[2] for found in theirs]),
        throttled_ratio=share,
        throttle_words=words,
        load_per_cpu=load,
    )


def _readings(
    source: Source, devices: Sequence[str], span_ns: tuple[int, int], loaded: float
) -> list[tuple[str, float | None, float | None, float, str]]:
    """Return (device, median clock, highest temperature, share of throttled readings, their reason) under load."""
    if not devices:
        return []
    bits = list(THROTTLE_BITS)
    counts = ", ".join(f"count(*) FILTER (throttle_reasons & {bit} <> 0)" for bit in bits)
    marks = ", ".join("?" for _ in devices)
    found = []
    for device, clock, hottest, number, *hits in source.rows(
        f"""
        SELECT device, median(sm_clock_hertz), max(temperature_celsius), count(*), {counts} FROM health
        WHERE device IN ({marks}) AND sample_ns BETWEEN ? AND ? AND coalesce(gpu_utilization_ratio, 1.0) >= ?
        GROUP BY device ORDER BY device
        """,
        [*devices, *span_ns, loaded],
    ):
        share, bit = max((hit / number, bit) for hit, bit in zip(hits, bits, strict=True))
        found.append((device, clock, hottest, round(share, 3), THROTTLE_BITS[bit][1] if share > 0 else ""))
    return found


def _load(source: Source, host: str | None, begin: int, end: int) -> float | None:
    """Return the median number of runnable processes per CPU of the host."""
    if not host:
        return None
    rows = source.rows(
        "SELECT median(load_1m / num_cpus) FROM health "
        "WHERE device = 'host' AND node = ? AND sample_ns BETWEEN ? AND ? AND num_cpus > 0",
        [host, begin, end],
    )
    return rows[0][0] if rows else None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None
