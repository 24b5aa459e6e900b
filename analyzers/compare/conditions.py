"""Conditions, other than settings, under which two runs ran: ranks, devices, hosts, load, tokens per step, memory.

    conditions(Run(source=a, facts=..., times=...), Run(source=b, facts=..., times=...))
    # (("host load per CPU", "0.9", "3.2"), ...): conditions that differ, and the load in any case

A run on a busy host is slower with the same settings, so both loads are listed even if they are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from analyzers.policy import SHARED
from analyzers.source import Source, missing_tables
from analyzers.stragglers.throughput import Change, StepTimes
from analyzers.wording import listed

__all__ = ["Difference", "Run", "conditions", "load_caveat", "tokens_of_step"]

Difference = tuple[str, str | None, str | None]
"""(name, value in A, value in B); None: not recorded."""
MAX_NAMES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One of the two runs: its records, the facts of its diagnosis, and the times of its steps."""

    source: Source
    facts: Mapping[str, Any]
    times: StepTimes | None


def conditions(a: Run, b: Run) -> tuple[Difference, ...]:
    """Differences between the machines and the work of the two runs, and always the host load if it was recorded."""
    found: list[Difference] = []
    for name, value_of in (("ranks", _ranks), ("mesh", _mesh), ("device", _devices), ("hosts", _hosts)):
        pair = value_of(a), value_of(b)
        if pair[0] != pair[1]:
            found.append((name, *pair))
    numbers: list[tuple[str, tuple[float | None, float | None], Callable[[float], str], bool]] = [
        ("tokens a step", (tokens_of_step(a.times), tokens_of_step(b.times)), lambda value: f"{value:,.0f}", False),
        ("host load per CPU", (_load(a.source), _load(b.source)), lambda value: f"{value:.2f}", True),
        ("GPU use", (_use(a.source), _use(b.source)), lambda value: f"{100 * value:.0f} %", False),
        ("GPU clock (MHz)", (_clock(a.source), _clock(b.source)), lambda value: f"{value / 1e6:,.0f}", False),
        ("largest memory of a rank (MiB)", (_memory(a.source), _memory(b.source)), lambda v: f"{v:,.0f}", False),
    ]
    for name, values, text, is_always in numbers:
        before, after = values
        if before is None and after is None:
            continue
        is_equal = (
            before is not None
            and after is not None
            and abs(after - before) <= SHARED.min_change_ratio * max(before, after)
        )
        if is_always or not is_equal:
            found.append((name, None if before is None else text(before), None if after is None else text(after)))
    return tuple(found)


def load_caveat(speed: Change | None, a: Run, b: Run) -> str:
    """If the slower run had a much busier host, return a sentence that this may be the reason; otherwise an empty text.

    A host with fewer runnable processes than CPUs does not count as busy, because no process waits for a core there.
    Runs with different numbers of ranks are not compared: their loads differ even without another job.
    """
    before, after = _load(a.source), _load(b.source)
    if speed is None or before is None or after is None or _ranks(a) != _ranks(b):
        return ""
    busy, idle = (before, after) if speed.high < 1 else (after, before)
    if speed.low <= 1 <= speed.high or busy < 1 or busy < SHARED.doubled_factor * idle:
        return ""
    return (
        f"The load of the hosts differs ({before:.2f} and {after:.2f} per CPU), and the speed may differ because of it."
    )


def _ranks(run: Run) -> str | None:
    ranks = run.facts.get("num_ranks")
    return None if ranks is None else str(ranks)


def _mesh(run: Run) -> str | None:
    mesh = run.facts.get("mesh")
    if not isinstance(mesh, Mapping) or not mesh:  # an attached run does not record its mesh
        return None
    return " x ".join(f"{name} {size}" for name, size in mesh.items() if size != 1) or "one rank"


def _devices(run: Run) -> str | None:
    return listed(sorted({name.partition(":")[0] for name in _names(run.source, "device")}), MAX_NAMES) or None


def _hosts(run: Run) -> str | None:
    return listed(_names(run.source, "host"), MAX_NAMES) or None


def _names(source: Source, column: str) -> list[str]:
    if missing_tables(source, "ranks"):
        return []
    return [
        str(name) for (name,) in source.rows(f"SELECT DISTINCT {column} FROM ranks WHERE {column} <> '' ORDER BY 1")
    ]


def tokens_of_step(times: StepTimes | None) -> float | None:
    """Median number of tokens of a step over all ranks; None if not recorded."""
    known = times.tokens[np.isfinite(times.tokens) & (times.tokens > 0)] if times is not None else np.zeros(0)
    return float(np.median(known)) if len(known) else None


def _load(source: Source) -> float | None:
    return _health(source, "median(load_1m / num_cpus)", "device = 'host' AND num_cpus > 0")


def _use(source: Source) -> float | None:
    return _health(source, "avg(gpu_utilization_ratio)", "device <> 'host'")


def _clock(source: Source) -> float | None:
    return _health(source, "median(sm_clock_hertz)", "device <> 'host'")


def _memory(source: Source) -> float | None:
    return _one(source, "SELECT max(memory_bytes) / 1048576.0 FROM steps", "steps")


def _health(source: Source, value: str, where: str) -> float | None:
    """Read samples taken during steps only: start-up and shutdown do not affect the speed."""
    if missing_tables(source, "steps"):
        return None
    ((first, last),) = source.rows("SELECT min(start_ns), max(start_ns + duration_ns) FROM steps")
    if first is None or last is None:
        return None
    return _one(source, f"SELECT {value} FROM health WHERE {where} AND sample_ns BETWEEN {first} AND {last}", "health")


def _one(source: Source, sql: str, table: str) -> float | None:
    rows: list[tuple[Any, ...]] = [] if missing_tables(source, table) else source.rows(sql)
    return None if not rows or rows[0][0] is None else float(rows[0][0])
