"""Speed of the same configuration over runs and versions: where it changed for good.

    for configuration in speeds(runs):
        configuration.status                      # slower | faster | no_change | too_few_runs
        configuration.changes[-1].versions        # {"torch": ("2.12.0", "2.13.0")}

1. Runs of one configuration are ordered by start. Each run's speed is replaced by its rank among the speeds, so that a
   run on a bad host counts once, however slow it was.
2. The statistic is the largest difference of mean ranks before and after a split with at least three runs on each side.
   Differences are in units of their standard deviation under a random order (Pettitt, 1979, with splits weighted
   equally). If no split passes, a second test finds temporary changes: it compares a stretch of runs with all others
   (circular binary segmentation: Olshen et al., 2004). Each test gets half of the permitted error probability.
3. The p-value is the share of random orders of the same runs with as large a statistic. It is valid for small samples
   and assumes nothing about how speeds vary. If even a perfect separation of so few runs could not pass, there is no
   verdict (`too_few_runs`). A single configuration needs twelve runs.
4. The limit is shared by all configurations tested (Bonferroni).
5. The parts before and after a change are searched again by the same rules. Finally, a change is kept only if the runs
   on its two sides, up to the neighbouring changes, differ by `SHARED.min_change_ratio` and in a test by random orders.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from analyzers.fleet.run_speed import RunSpeed
from analyzers.policy import SHARED

__all__ = ["ConfigurationSpeed", "SpeedChange", "SpeedChangePolicy", "SpeedStatus", "speeds"]

SpeedStatus = Literal["slower", "faster", "no_change", "too_few_runs"]
MAX_RUNS = 200
"""Maximum number of the newest runs of a configuration that are compared."""
_BATCH = 100
_TESTS = 2
"""Number of tests on each part of the runs; they share the error probability of the part."""
_ENOUGH = 50
"""The p-value is precise enough after this many random orders that are as extreme as the observed one."""

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedChangePolicy:
    """When the speed of a configuration changed between its runs."""

    family_error_ratio: float = 0.01
    """Probability of reporting a change in any configuration where there is none (ratio). Source: convention,
    Bonferroni; below 0.05 because the list is judged again after each run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedChange:
    """Runs before and after a change point."""

    first_run: str
    """The first run after the change."""
    index: int
    """Index of `first_run` among the runs of the configuration."""
    before: float
    """Median speed of the runs from the previous change (or the first run) to this one."""
    after: float
    p_value: float
    versions: Mapping[str, tuple[str, str]]
    """Versions that changed at the same point: {name: (before, after)}."""

    @property
    def ratio(self) -> float:
        """Speed after the change / speed before it."""
        return self.after / self.before

    @property
    def with_versions(self) -> str:
        """Text of the versions: `torch 2.12.0 -> 2.13.0`."""
        return ", ".join(f"{name} {old[:12]} -> {new[:12]}" for name, (old, new) in self.versions.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationSpeed:
    """The runs of one configuration, in the order of their starts."""

    fingerprint: str
    configuration: Mapping[str, str]
    unit: Literal["tokens/s", "steps/s"]
    run_ids: tuple[str, ...]
    speeds: tuple[float, ...]
    versions: tuple[Mapping[str, str], ...]
    changes: tuple[SpeedChange, ...]
    status: SpeedStatus
    """Direction of the newest change."""

    @property
    def title(self) -> str:
        """Script, model, mesh, batch and device, as far as they are known."""
        facts = self.configuration
        mesh = " x ".join(f"{name.removeprefix('mesh.')} {facts[name]}" for name in facts if name.startswith("mesh."))
        parameters, tokens = facts.get("num_parameters", ""), facts.get("tokens_per_step", "")
        parts = (
            facts.get("script", ""),
            f"{int(parameters):,} parameters" if parameters.isdecimal() else "",
            mesh or (f"{facts['world_size']} ranks" if "world_size" in facts else ""),
            f"batch {facts['train.global_batch_size']}" if "train.global_batch_size" in facts else "",
            f"{int(tokens):,} tokens a step" if tokens.isdecimal() else "",
            facts.get("device_name") or facts.get("devices", ""),
        )
        return ", ".join(part for part in parts if part) or "not recorded"

    @property
    def newest(self) -> float:
        """Median speed of the runs since the last change."""
        return float(np.median(self.speeds[self.changes[-1].index if self.changes else 0 :]))


def speeds(runs: Sequence[RunSpeed], policy: SpeedChangePolicy = SpeedChangePolicy()) -> tuple[ConfigurationSpeed, ...]:
    """Judge each configuration that has at least two runs. Configurations that became slower come first, then faster
    ones; within a status, the ones with most runs."""
    groups: dict[str, list[RunSpeed]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: (run.started_ns, run.run_id)):
        groups[run.fingerprint].append(run)
    newest = {name: group[-MAX_RUNS:] for name, group in groups.items() if len(group) > 1}
    num_tested = sum(_is_enough(len(group), policy.family_error_ratio) for group in newest.values())
    limit = policy.family_error_ratio / max(1, num_tested)
    found = [_judged(name, group, limit) for name, group in newest.items()]
    order = ("slower", "faster", "no_change", "too_few_runs")
    return tuple(sorted(found, key=lambda one: (order.index(one.status), -len(one.run_ids), one.fingerprint)))


def _judged(name: str, runs: Sequence[RunSpeed], limit: float) -> ConfigurationSpeed:
    with_tokens = all(run.tokens_per_s for run in runs)
    values = np.array([run.per_s if with_tokens else 1e3 / run.step_ms for run in runs])
    splits = dict(_confirmed(values, _splits(values, 0, limit), limit))
    bounds = [0, *sorted(splits), len(runs)]
    medians = [float(np.median(values[begin:end])) for begin, end in pairwise(bounds)]
    changes = tuple(
        SpeedChange(
            first_run=runs[index].run_id, index=index, before=medians[place], after=medians[place + 1],
            p_value=splits[index],
            versions=_changed_versions(runs[bounds[place] : index], runs[index : bounds[place + 2]]),
        )
        for place, index in enumerate(sorted(splits))
    )  # fmt: skip
    status: SpeedStatus = "no_change" if _is_enough(len(runs), limit) else "too_few_runs"
    if changes:
        status = "slower" if changes[-1].ratio < 1 else "faster"
    return ConfigurationSpeed(
        fingerprint=name, configuration=runs[-1].configuration, unit="tokens/s" if with_tokens else "steps/s",
        run_ids=tuple(run.run_id for run in runs), speeds=tuple(float(value) for value in values),
        versions=tuple(run.versions for run in runs), changes=changes, status=status,
    )  # fmt: skip


def _is_enough(count: int, limit: float) -> bool:
    """Return True if a perfect separation of this many runs could pass the test. An odd count has two middle splits,
    so twice as many orders separate perfectly."""
    orders = math.comb(count, count // 2) / (2 if count % 2 == 0 else 4)
    return count >= 2 * SHARED.min_times and _TESTS / orders < limit


def _splits(values: Floats, offset: int, limit: float) -> list[tuple[int, float]]:
    """Return (index, p-value) of each possible change."""
    if not _is_enough(len(values), limit):
        return []
    ranks = _ranks(values)
    for arcs in (_Arcs.to_the_newest(len(values), SHARED.min_times), _Arcs.between(len(values), SHARED.min_times)):
        p_value, best = _test(arcs, ranks, limit / _TESTS)
        if _TESTS * p_value < limit:
            break
    else:
        return []
    inner = [int(end) for end in (arcs.begin[best], arcs.end[best]) if end < len(values)]
    found = [(offset + index, _TESTS * p_value) for index in inner]
    for begin, end in pairwise([0, *inner, len(values)]):
        found += _splits(values[begin:end], offset + begin, limit)
    return sorted(found)


def _test(arcs: _Arcs, ranks: Floats, limit: float) -> tuple[float, int]:
    """Return (p-value, index of the stretch that differs most); (1, 0) if there is no stretch to test."""
    if not len(arcs.begin):
        return 1.0, 0
    statistics = arcs.statistics(ranks[None])[0]
    best = int(np.argmax(statistics))
    return _p_value(ranks, lambda orders: arcs.statistics(orders).max(axis=1), float(statistics[best]), limit), best


def _confirmed(values: Floats, splits: Sequence[tuple[int, float]], limit: float) -> list[tuple[int, float]]:
    """Changes at which the parts before and after differ. The least certain change is dropped first, joining them."""
    changes = list(splits)
    while changes:
        bounds = [0, *(index for index, _ in changes), len(values)]
        p_values = [
            _p_value_between(values[a:b], values[b:c], limit)
            for a, b, c in zip(bounds, bounds[1:], bounds[2:], strict=False)
        ]
        worst = int(np.argmax(p_values))
        if p_values[worst] < limit:
            break
        del changes[worst]
    return changes


def _p_value_between(before: Floats, after: Floats, limit: float) -> float:
    """Probability of a difference this large between two groups of runs in random order; 1 if the difference is below
    `SHARED.min_change_ratio`."""
    if abs(float(np.median(after) / np.median(before)) - 1) < SHARED.min_change_ratio:
        return 1.0
    ranks = _ranks(np.concatenate([before, after]))

    def difference(orders: Floats) -> Floats:
        sums: Floats = np.abs(orders[:, : len(before)].sum(axis=1))
        return sums

    return _p_value(ranks, difference, float(difference(ranks[None])[0]), limit)


@dataclass(frozen=True, slots=True)
class _Arcs:
    """Stretches of runs, from index `begin` to index `end` (exclusive)."""

    begin: Indices
    end: Indices
    count: int

    @classmethod
    def to_the_newest(cls, count: int, least: int) -> _Arcs:
        """Stretches from a split to the newest run."""
        begin = np.arange(least, count - least + 1)
        return cls(begin, np.full_like(begin, count), count)

    @classmethod
    def between(cls, count: int, least: int) -> _Arcs:
        """Stretches with at least `least` runs in them, before them and after them."""
        begin, end = np.meshgrid(np.arange(least, count), np.arange(least, count - least + 1), indexing="ij")
        valid = end - begin >= least
        return cls(begin[valid], end[valid], count)

    def statistics(self, orders: Floats) -> Floats:
        """Test statistic for each row of ranks and each stretch."""
        sums = np.concatenate([np.zeros((len(orders), 1)), np.cumsum(orders, axis=1)], axis=1)
        length = self.end - self.begin
        found: Floats = np.abs(sums[:, self.end] - sums[:, self.begin]) / np.sqrt(length * (self.count - length))
        return found


def _ranks(values: Floats) -> Floats:
    """Ranks minus their mean; equal values share a rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    shared = np.cumsum(counts) - (counts + 1) / 2
    ranks: Floats = shared[inverse] - (len(values) - 1) / 2
    return ranks


def _p_value(ranks: Floats, statistic: Callable[[Floats], Floats], observed: float, limit: float) -> float:
    """Share of random orders, including the observed order, with a statistic at least as large as `observed`.

    Sampling stops as soon as the share can no longer fall below `limit` (Besag and Clifford, 1991). The result is then
    an upper estimate.
    """
    rng = np.random.default_rng(0)
    larger = total = 0
    while total < _ENOUGH / limit and larger < _ENOUGH:
        orders = rng.permuted(np.tile(ranks, (_BATCH, 1)), axis=1)
        larger += int((statistic(orders) >= observed * (1 - 1e-9)).sum())
        total += _BATCH
    return (1 + larger) / (1 + total)


def _changed_versions(before: Sequence[RunSpeed], after: Sequence[RunSpeed]) -> dict[str, tuple[str, str]]:
    """{name: (before, after)} of versions in which most runs before a change differ from most runs after it. Not all of
    them have to, because the index of a change is uncertain by a run or two."""
    found = {}
    for name in sorted({name for run in (*before, *after) for name in run.versions}):
        old, new = (_common(name, side) for side in (before, after))
        if old and new and old != new:
            found[name] = (old, new)
    return found


def _common(name: str, runs: Sequence[RunSpeed]) -> str:
    """The version that at least two thirds of the runs have; empty if there is none."""
    ((value, count),) = Counter(run.versions.get(name, "") for run in runs).most_common(1)
    return value if 3 * count >= 2 * len(runs) else ""
