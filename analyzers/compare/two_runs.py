"""Differences between two runs: settings, versions, speed, phases, loss, findings, goodput.

    comparison = compare(Side(source=a, manifest=..., diagnosis=...), Side(source=b, manifest=..., diagnosis=...))
    comparison.speed.ratio          # time of a token in B over that in A
    comparison.findings             # a regression, if the interval leaves no doubt

It reports differences and their certainty, not which of them caused which.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from analyzers.account.goodput import CATEGORIES
from analyzers.account.time_classes import GAPS_WORK, OWN_PHASES, WAITED, own
from analyzers.compare.policy import ComparePolicy
from analyzers.printable import escaped
from analyzers.robust import MAD_TO_SIGMA
from analyzers.source import Source, floats, ints, missing_tables

from ..diagnose import Diagnosis
from ..finding import Finding
from ..stragglers.throughput import Change, between, regression, step_times

__all__ = ["Comparison", "LossChange", "Side", "compare"]

_PLACES = (*OWN_PHASES, "between phases", "waiting")
_PASSING = ("run_id", "created_wall_ns", "launcher_pid", "command")
"""Keys of a manifest that differ between any two runs."""
MAX_SETTINGS = 500
MAX_VALUE = 200
SHOWN_SETTINGS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two runs."""

    source: Source
    manifest: Mapping[str, Any]
    diagnosis: Diagnosis


@dataclass(frozen=True, slots=True, kw_only=True)
class LossChange:
    """Two loss curves at equal steps, over the last tenth of them. Nat; positive: the second run's is higher."""

    common_steps: int
    difference: float
    noise: float
    """Standard error of the difference, from how much each curve jumps from step to step."""
    first_different_step: int | None
    """Where the curves stop being equal to the last bit; None: nowhere."""

    is_real: bool
    """A difference beyond the noise."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison:
    """A against B. Settings and versions are (name, value in A, value in B); None: not there."""

    run_a: str
    run_b: str
    settings: tuple[tuple[str, str | None, str | None], ...]
    versions: tuple[tuple[str, str | None, str | None], ...]
    speed: Change | None
    """B's time over A's, of a token or a step, with its 95 % interval; None with too few steps."""
    phases: Mapping[str, tuple[float | None, float | None]]
    """Own milliseconds of a step, median over ranks and steps; `waiting` is for others and for transfers."""
    loss: LossChange | None
    """None with fewer than 20 common steps."""
    only_a: tuple[Finding, ...]
    """Findings of A that B does not have: of the same kind, cause and ranks."""
    only_b: tuple[Finding, ...]
    both: tuple[Finding, ...]
    """Findings of both, as B has them."""
    goodput: Mapping[str, tuple[float | None, float | None]]
    """Shares of the wall time."""
    findings: tuple[Finding, ...]
    """What comparing them found: a regression of B's speed, if its interval leaves no doubt."""

    @property
    def sentence(self) -> str:
        """Speed and loss of B against A, two sentences, as `rankscope compare` prints them."""
        speed, loss, a, b = self.speed, self.loss, self.run_a, self.run_b
        if speed is None:
            first = f"{b} and {a} have too few steps to compare their speed."
        else:
            interval = f"95 % interval {speed.low:.2f} to {speed.high:.2f}"
            per = "token" if speed.per_token else "step"
            first = f"{b} takes {speed.ratio:.2f}x as long per {per} as {a} ({interval})."
        if loss is None:
            return f"{first} Too few common steps to compare the loss."
        if loss.first_different_step is None:
            return f"{first} The loss is equal to the last bit in {loss.common_steps} steps."
        side, noise = "higher" if loss.difference > 0 else "lower", "beyond" if loss.is_real else "within"
        difference = f"{abs(loss.difference):.3g} {side} at the end, {noise} its noise of {loss.noise:.2g}"
        return f"{first} The loss is {difference}, and differs from step {loss.first_different_step} on."

    def __repr__(self) -> str:
        return f"Comparison({self.sentence})"

    def _repr_markdown_(self) -> str:
        """The sentence, the settings that differ, and what only one of the runs has, for a notebook."""
        lines = [f"**{escaped(self.sentence)}**", ""]
        lines += [f"- {escaped(f'{name}: {a} in A, {b} in B')}" for name, a, b in self.settings[:SHOWN_SETTINGS]]
        lines += [f"- only in {escaped(self.run_a)}: {escaped(finding.summary)}" for finding in self.only_a]
        lines += [f"- only in {escaped(self.run_b)}: {escaped(finding.summary)}" for finding in self.only_b]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Plain values; NaN never."""
        speed, loss = self.speed, self.loss
        return {
            "run_a": self.run_a,
            "run_b": self.run_b,
            "settings": [{"name": n, "a": a, "b": b} for n, a, b in self.settings],
            "versions": [{"name": n, "a": a, "b": b} for n, a, b in self.versions],
            "speed": speed and {
                "factor_ratio": speed.ratio, "low_ratio": speed.low, "high_ratio": speed.high,
                "per": "token" if speed.per_token else "step", "step_ms_a": speed.ms_before,
                "step_ms_b": speed.ms_after,
            },
            "phases_ms": {name: {"a": a, "b": b} for name, (a, b) in self.phases.items()},
            "loss": loss and {
                "common_steps": loss.common_steps, "difference": loss.difference, "noise": loss.noise,
                "first_different_step": loss.first_different_step, "is_real": loss.is_real,
            },
            "findings_only_a": [finding.to_json() for finding in self.only_a],
            "findings_only_b": [finding.to_json() for finding in self.only_b],
            "findings_both": [finding.to_json() for finding in self.both],
            "goodput_ratio": {name: {"a": a, "b": b} for name, (a, b) in self.goodput.items()},
            "findings": [finding.to_json() for finding in self.findings],
        }  # fmt: skip


def compare(a: Side, b: Side, policy: ComparePolicy = ComparePolicy()) -> Comparison:
    """Everything that differs between two runs; what one of them did not record is None."""
    times_a, times_b = step_times(a.source), step_times(b.source)
    speed = between(times_a, times_b) if times_a is not None and times_b is not None else None
    slower = regression(speed) if speed is not None else None
    keys_a, keys_b = ({_key(f): f for f in side.diagnosis.fired} for side in (a, b))
    goodput_a, goodput_b = (_shares(side.diagnosis) for side in (a, b))
    phases_a, phases_b = _phases(a.source), _phases(b.source)
    return Comparison(
        run_a=str(a.diagnosis.run.get("run_id") or "A"),
        run_b=str(b.diagnosis.run.get("run_id") or "B"),
        settings=_differences(_flat(a.manifest.get("config")), _flat(b.manifest.get("config"))),
        versions=_differences(_flat(_lasting(a.manifest)), _flat(_lasting(b.manifest))),
        speed=speed,
        phases={name: (phases_a.get(name), phases_b.get(name)) for name in _PLACES},
        loss=_loss(a.source, b.source, policy),
        only_a=tuple(finding for key, finding in keys_a.items() if key not in keys_b),
        only_b=tuple(finding for key, finding in keys_b.items() if key not in keys_a),
        both=tuple(finding for key, finding in keys_b.items() if key in keys_a),
        goodput={name: (goodput_a.get(name), goodput_b.get(name)) for name in CATEGORIES},
        findings=(slower,) if slower is not None else (),
    )


def _key(finding: Finding) -> tuple[object, ...]:
    return finding.kind, finding.cause, finding.ranks


def _lasting(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in manifest.items() if key != "config" and key not in _PASSING}


def _flat(value: Any) -> dict[str, str]:
    """Dotted names and their values as text."""
    flat: dict[str, str] = {}

    def walk(prefix: str, item: Any, depth: int) -> None:
        if len(flat) >= MAX_SETTINGS:
            return
        if isinstance(item, Mapping) and depth < 8:
            for key, inner in item.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner, depth + 1)
        else:
            text = item if isinstance(item, str) else json.dumps(item, default=str)
            flat[prefix[:MAX_VALUE]] = text[:MAX_VALUE]

    walk("", value if isinstance(value, Mapping) else {}, 0)
    return flat


def _differences(a: Mapping[str, str], b: Mapping[str, str]) -> tuple[tuple[str, str | None, str | None], ...]:
    names = [*a, *(name for name in b if name not in a)]
    return tuple((name, a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name))


def _shares(diagnosis: Diagnosis) -> dict[str, float]:
    account = diagnosis.goodput
    if account is None or not account.wall_s:
        return {}
    return {name: seconds / account.wall_s for name, seconds in account.seconds.items()}


def _phases(source: Source) -> dict[str, float]:
    if missing_tables(source, "steps"):
        return {}
    columns = [f"median({sql}) / 1e6" for sql in (*map(own, OWN_PHASES), GAPS_WORK, WAITED)]
    (row,) = source.rows(f"SELECT {', '.join(columns)} FROM steps WHERE duration_ns IS NOT NULL")
    return {name: float(value) for name, value in zip(_PLACES, row, strict=True) if value is not None}


def _losses(source: Source) -> dict[int, float]:
    """{step: loss} of the kept executions: the last one of each step."""
    table = source.query(
        """
        SELECT step, arg_max(loss, (attempt, start_ns)) AS loss FROM steps
        WHERE isfinite(loss) AND coalesce(committed, true)
          AND rank = (SELECT min(rank) FROM steps WHERE loss IS NOT NULL)
        GROUP BY step
        """
    )
    return dict(zip(ints(table["step"]).tolist(), floats(table["loss"]).tolist(), strict=True))


def _loss(a: Source, b: Source, policy: ComparePolicy) -> LossChange | None:
    if missing_tables(a, "steps") or missing_tables(b, "steps"):
        return None
    losses_a, losses_b = _losses(a), _losses(b)
    steps = sorted(losses_a.keys() & losses_b.keys())
    if len(steps) < 20:
        return None
    of_a, of_b = (np.array([losses[step] for step in steps]) for losses in (losses_a, losses_b))
    unequal = np.flatnonzero(of_a != of_b)
    last = max(10, len(steps) // 10)
    jumps = sum(float(np.median(np.abs(np.diff(of)))) ** 2 for of in (of_a, of_b))
    difference = float(np.mean(of_b[-last:] - of_a[-last:]))
    noise = MAD_TO_SIGMA * float(np.sqrt(jumps / 2 / last))
    return LossChange(
        common_steps=len(steps),
        difference=difference,
        noise=noise,
        is_real=abs(difference) > policy.loss_sigmas * noise,
        first_different_step=int(steps[unequal[0]]) if len(unequal) else None,
    )
