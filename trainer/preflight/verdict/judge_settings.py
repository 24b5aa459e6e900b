"""Name settings of the communication library that made the all-reduce faster than the library's choice.

A setting is faster where each of its readings is shorter than each one without it: two readings of the same setting
differ, and the fastest of ten is fast by chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from analyzers.wording import listed, percent, sentence, size_text
from trainer.preflight.tuning import named
from trainer.preflight.verdict.judge_links import rate_text
from trainer.preflight.verdict.readings import Readings, SettingReading, bus_bytes_per_s
from trainer.preflight.verdict.report import Line

__all__ = ["setting_lines"]

CHECK = "tuning"
_PINNED = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_NCHANNELS_PER_NET_PEER")


def setting_lines(readings: Readings) -> Iterator[Line]:
    """One line a size, one for settings that could not run, one for variables that already pin a choice."""
    yield from _pinned(readings)
    if not readings.settings:
        return
    usual = [reading for reading in readings.settings if not reading.variables]
    if failed := next((reading.problem for reading in usual if reading.problem), ""):
        text = sentence(f"Without a setting, the all-reduce in new processes failed, so nothing is compared: {failed}")
        yield Line(check=CHECK, status="warn", text=text)
        return
    for size in usual[0].seconds:
        yield Line(check=CHECK, status="pass", text=_compared(size, usual, readings))
    broken: dict[str, list[str]] = {}
    for reading in readings.settings:
        if reading.problem:
            broken.setdefault(reading.problem, []).append(named(reading.variables))
    for problem, settings in broken.items():
        text = sentence(f"Could not run with {listed(settings, len(settings))}: {problem}")
        yield Line(check=CHECK, status="pass", text=text)


def _compared(size: int, usual: Sequence[SettingReading], readings: Readings) -> str:
    """Compare the fastest setting of a size with the library's choice."""
    own = [reading.seconds[size] for reading in usual]
    by_setting: dict[str, list[float]] = {}
    for reading in readings.settings:
        if reading.variables and size in reading.seconds:
            by_setting.setdefault(named(reading.variables), []).append(reading.seconds[size])
    faster = {
        name: took for name, took in by_setting.items() if len(took) == len(own) and max(took) < min(own)
    }  # fmt: skip
    rate = rate_text(bus_bytes_per_s(size, min(own), readings.world_size))
    what = f"An all-reduce of {size_text(size)} reaches {rate} bus bandwidth without a setting"
    if not faster:
        return f"{what}; none of {len(by_setting)} settings is faster in each of {len(own)} readings."
    best = min(faster, key=lambda name: max(faster[name]))
    other = rate_text(bus_bytes_per_s(size, min(faster[best]), readings.world_size))
    return f"{what}, {other} with {best} ({percent(min(own) / min(faster[best]) - 1)} more)."


def _pinned(readings: Readings) -> Iterator[Line]:
    """Variables of rank 0 that take the choice by size from NCCL; differences between ranks are reported elsewhere."""
    if readings.backend != "nccl" or not readings.ranks:
        return
    own = readings.ranks[0].settings
    if found := {name: own[name] for name in _PINNED if name in own}:
        text = (
            f"{named(found)} is set: NCCL does not choose by message size and network any more. "
            "'--tune nccl' without it shows what that costs."
        )
        yield Line(check=CHECK, status="warn", text=text)
