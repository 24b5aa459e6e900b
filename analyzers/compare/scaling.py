"""Scaling efficiency of recorded runs: throughput per rank relative to the run with the fewest ranks.

    scaling = scaling_of([Side(...), Side(...), ...])
    scaling.kind                         # strong | weak | mixed
    scaling.points[2].efficiency_ratio   # 0.87, with .low and .high

*Strong* scaling keeps the tokens per step constant on more ranks; *weak* scaling keeps the tokens per step and rank
constant. The run with the fewest ranks is the base; ideal scaling keeps its throughput per rank. `serial_ratio` is the
experimentally determined serial fraction of Karp and Flatt (1990), computed from the speed-up. If it grows with N,
overhead does too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from analyzers.account.goodput import UNSPLIT
from analyzers.compare.two_runs import Side
from analyzers.policy import SHARED
from analyzers.stragglers.throughput import StepTimes, between, step_times
from analyzers.wording import counted

__all__ = ["Point", "Scaling", "ScalingError", "scaling_of"]

_LOSSES = {
    "communication": "exposed communication",
    "straggler": "waiting for stragglers",
    "bubble": "pipeline bubble",
    "data": "data",
}
_IN_STEPS = ("training", *_LOSSES)


class ScalingError(ValueError):
    """The runs cannot be compared; the message is one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run."""

    run: str
    num_ranks: int
    mesh: Mapping[str, int]
    tokens_per_step: float
    step_ms: float
    tokens_per_s: float
    speedup: float
    """Relative to the base."""
    efficiency_ratio: float
    low: float
    high: float
    """`low` and `high`: 95 % interval of the efficiency, from resampled blocks of steps. Both equal the efficiency for
    the base, and for a run with too few steps."""
    serial_ratio: float | None
    """Serial fraction of Karp and Flatt; None for runs with as many ranks as the base, and unless scaling is strong."""
    shares: Mapping[str, float]
    """Shares of the step time: training, communication, straggler, bubble, data. Shares that were not measured are
    missing; without `straggler`, `communication` includes all waits."""

    @property
    def lost_to(self) -> str:
        """Display name of the largest share besides training; empty if not recorded."""
        losses = {name: self.shares.get(name, 0.0) for name in _LOSSES}
        worst = max(losses, key=lambda name: losses[name])
        if worst == "communication" and "straggler" not in self.shares:
            return UNSPLIT[worst]
        return _LOSSES[worst] if losses[worst] > 0 else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Runs of one job on different numbers of ranks."""

    kind: str
    """strong | weak | mixed; mixed: neither the tokens per step nor the tokens per step and rank are constant."""
    points: tuple[Point, ...]
    """Ordered by number of ranks; the first is the base."""

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "points": [asdict(point) | {"lost_to": point.lost_to} for point in self.points]}


def scaling_of(sides: Sequence[Side]) -> Scaling:
    """Compare each run with the one that has the fewest ranks.

    Raises ScalingError if a run has no steps or tokens, or if all have the same number of ranks.
    """
    runs = [_Run.of(side) for side in sides]
    runs.sort(key=lambda run: (run.num_ranks, run.name))
    if runs[0].num_ranks == runs[-1].num_ranks:
        raise ScalingError(
            f"All runs have {counted(runs[0].num_ranks, 'rank')}. Scaling needs different numbers of ranks."
        )
    kind = _kind(runs)
    return Scaling(kind=kind, points=tuple(_point(run, runs[0], kind) for run in runs))


@dataclass(frozen=True, slots=True)
class _Run:
    name: str
    num_ranks: int
    mesh: Mapping[str, int]
    tokens_per_step: float
    times: StepTimes
    shares: Mapping[str, float]

    @classmethod
    def of(cls, side: Side) -> _Run:
        facts: Mapping[str, Any] = side.diagnosis.run
        name = str(facts.get("run_id") or "?")
        times = step_times(side.source)
        if times is None or not facts.get("num_ranks"):
            raise ScalingError(f"{name} has no recorded steps.")
        if not facts.get("tokens") or not np.isfinite(times.tokens).all():
            raise ScalingError(f"{name} does not record the tokens of a step.")
        tokens = float(np.median(times.tokens))
        return cls(name, int(facts["num_ranks"]), dict(facts.get("mesh") or {}), tokens, times, _shares(side))


def _shares(side: Side) -> Mapping[str, float]:
    account = side.diagnosis.goodput
    if account is None:
        return {}
    known = {name: seconds for name, seconds in account.known_seconds.items() if name in _IN_STEPS}
    total = sum(known.values())
    return {name: known[name] / total for name in known} if total and "training" in known else {}


def _kind(runs: Sequence[_Run]) -> str:
    for kind, sizes in (
        ("strong", [run.tokens_per_step for run in runs]),
        ("weak", [run.tokens_per_step / run.num_ranks for run in runs]),
    ):
        if max(sizes) <= min(sizes) * (1 + SHARED.same_ratio):
            return kind
    return "mixed"


def _point(run: _Run, base: _Run, kind: str) -> Point:
    step_ms, base_ms = float(np.median(run.times.duration)), float(np.median(base.times.duration))
    rank_ratio = run.num_ranks / base.num_ranks
    work = run.tokens_per_step / base.tokens_per_step
    efficiency = low = high = work * base_ms / step_ms / rank_ratio
    if run is not base:
        # `work` is the ratio of the tokens, so the change must be of step times and not of times per token.
        change = between(_without_tokens(base.times), _without_tokens(run.times))
        if change is not None:
            efficiency, low, high = (work / ratio / rank_ratio for ratio in (change.ratio, change.high, change.low))
    speedup = efficiency * rank_ratio
    is_serial = kind == "strong" and rank_ratio > 1
    serial = (1 / speedup - 1 / rank_ratio) / (1 - 1 / rank_ratio) if is_serial else None
    return Point(
        run=run.name,
        num_ranks=run.num_ranks,
        mesh=run.mesh,
        tokens_per_step=run.tokens_per_step,
        step_ms=step_ms,
        tokens_per_s=run.tokens_per_step / step_ms * 1e3,
        speedup=speedup,
        efficiency_ratio=efficiency,
        low=low,
        high=high,
        serial_ratio=serial,
        shares=run.shares,
    )


def _without_tokens(times: StepTimes) -> StepTimes:
    return replace(times, tokens=np.full_like(times.tokens, np.nan))
