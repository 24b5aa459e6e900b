"""Compare each device's speed with devices of the same model in this job, and with earlier preflights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from analyzers.policy import SHARED
from analyzers.robust import median_or_nan
from analyzers.wording import counted, number, percent
from trainer.preflight.verdict.peers import slow_among
from trainer.preflight.verdict.policy import PreflightPolicy
from trainer.preflight.verdict.readings import RankReading, Readings
from trainer.preflight.verdict.report import Line, Status

__all__ = ["device_lines", "flops_text", "slow_devices"]

_MEASURES = (
    ("matrix products", "matmul_flops_per_s"),
    ("memory", "memory_bytes_per_s"),
)


def device_lines(readings: Readings, policy: PreflightPolicy, past: Sequence[Readings]) -> Iterator[Line]:
    """Lines on matrix products, memory bandwidth and waiting for cores."""
    yield from _waiting(readings)
    for check, field in _MEASURES:
        measured = {reading.rank: reading for reading in readings.ranks if getattr(reading, field) is not None}
        if not measured:
            yield Line(check=check, status="warn", text=f"The speed of {check} was not measured.")
            continue
        slow = slow_devices(readings, field, policy)
        for rank, ratio in slow.items():
            yield _slow_line(check, measured[rank], ratio, field, policy)
        aged = [*_against_past(measured, field, check, policy, past)]
        yield from (line for line in aged if line.ranks[0] not in slow)
        if not slow and not aged:
            yield _passed(check, field, [*measured.values()])


def slow_devices(readings: Readings, field: str, policy: PreflightPolicy) -> dict[int, float]:
    """Return {rank: speed relative to devices of the same model} for devices that are too slow."""
    by_model: dict[str, dict[int, float]] = {}
    for reading in readings.ranks:
        value = getattr(reading, field)
        if value is not None:
            by_model.setdefault(reading.device, {})[reading.rank] = value
    found: dict[int, float] = {}
    for values in by_model.values():
        found |= slow_among(values, slow_ratio=policy.slow_device_ratio, policy=policy)
    return found


def _slow_line(check: str, reading: RankReading, ratio: float, field: str, policy: PreflightPolicy) -> Line:
    status: Status = "fail" if ratio < policy.failed_device_ratio else "warn"
    cause = ""
    if reading.core_wait_ratio is not None and reading.core_wait_ratio > SHARED.large_share_ratio:
        cause = f"; it waited for a core {percent(reading.core_wait_ratio)} of the time"
    text = (
        f"The {reading.device} of rank {reading.rank} on {reading.node} reaches "
        f"{_speed(getattr(reading, field), field)} in {check}, {percent(ratio)} of its peers{cause}."
    )
    return Line(check=check, status=status, text=text, nodes=(reading.node,), ranks=(reading.rank,))


def _passed(check: str, field: str, measured: Sequence[RankReading]) -> Line:
    values = [getattr(reading, field) for reading in measured]
    count = counted(len(values), "device")
    if len(values) == 1:
        return Line(check=check, status="pass", text=f"{_speed(values[0], field)}; no peer to compare it with.")
    spread = f"{_speed(min(values), field)} to {_speed(max(values), field)}"
    return Line(check=check, status="pass", text=f"{count} reach {spread}, none slower than its peers.")


def _waiting(readings: Readings) -> Iterator[Line]:
    """Ranks that had to wait for a core while most others did not."""
    waits = {reading.rank: reading.core_wait_ratio for reading in readings.ranks if reading.core_wait_ratio is not None}
    usual = median_or_nan(list(waits.values())) if len(waits) > 1 else 0.0
    for reading in readings.ranks:
        own = waits.get(reading.rank)
        if own is not None and own > SHARED.large_share_ratio and usual < own * SHARED.explained_ratio:
            where = f"Rank {reading.rank} on {reading.node}"
            text = f"{where} waited for a processor core {percent(own)} of the time: other processes take it."
            yield Line(check="cores", status="warn", text=text, nodes=(reading.node,), ranks=(reading.rank,))


def _against_past(
    measured: Mapping[int, RankReading],
    field: str,
    check: str,
    policy: PreflightPolicy,
    past: Sequence[Readings],
) -> Iterator[Line]:
    """Devices that are slower than in earlier preflights of the fleet."""
    earlier: dict[tuple[str, int, str], list[float]] = {}
    for before in past:
        for reading in before.ranks:
            value = getattr(reading, field)
            if value is not None:
                earlier.setdefault((reading.host, reading.local_rank, reading.device), []).append(value)
    for reading in measured.values():
        own = earlier.get((reading.host, reading.local_rank, reading.device), [])
        if len(own) < SHARED.min_times:
            continue
        ratio = getattr(reading, field) / median_or_nan(own)
        if reading.rank in slow_among(
            {reading.rank: getattr(reading, field), **{-1 - index: value for index, value in enumerate(own)}},
            slow_ratio=policy.slow_device_ratio,
            policy=policy,
        ):
            text = (
                f"The {reading.device} of rank {reading.rank} on {reading.node} reaches {percent(ratio)} of its "
                f"speed in {check} of {counted(len(own), 'earlier preflight')}."
            )
            yield Line(check=check, status="warn", text=text, nodes=(reading.node,), ranks=(reading.rank,))


def _speed(value: float, field: str) -> str:
    return flops_text(value) if field == "matmul_flops_per_s" else f"{number(value / 1e9)} GB/s"


def flops_text(flops_per_s: float) -> str:
    """Operations per second as text, in TFLOP/s or GFLOP/s."""
    return f"{number(flops_per_s / 1e12)} TFLOP/s" if flops_per_s >= 1e12 else f"{number(flops_per_s / 1e9)} GFLOP/s"
