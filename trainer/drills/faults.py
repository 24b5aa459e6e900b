"""Faults that break a run on purpose, as `--fault KIND@key=value,...` asks for them.

    fault = parse_fault("nan_grad@step=40,rank=2")

| kind | what happens on `rank`, at or from `step` |
|---|---|
| nan_grad | one element of one gradient (`parameter`) becomes NaN before it is reduced |
| slow_compute | every forward and backward takes `factor` (1.5) times as long, really computing |
| slow_data | every batch comes `seconds` later, or so late that the step takes `factor` (2) times as long |
| hang | stops joining collectives after the forward pass and sleeps for ever |
| stop, kill | SIGSTOP, SIGKILL to itself |
| exception, exit | raises RuntimeError; leaves with exit code 1 |
| bad_batch | the batch of that step (or `batch`) holds random tokens; for all ranks if none is given |

A slow rank stays slow until step `until`, or to the end of its attempt. A fault fires once in a run: not again in the
next attempt, nor when its step is replayed after a rollback. `bad_batch` is tied to its batch instead, so whoever
skips the batch is rid of it. `trainer.drills.inject` carries the faults out.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

__all__ = ["KINDS", "Fault", "FaultError", "parse_fault"]

KINDS: dict[str, tuple[str, ...]] = {
    "nan_grad": ("step", "rank", "parameter"),
    "slow_compute": ("step", "rank", "factor", "until"),
    "slow_data": ("step", "rank", "factor", "seconds", "until"),
    "bad_batch": ("step", "rank", "batch"),
    **dict.fromkeys(("hang", "stop", "kill", "exception", "exit"), ("step", "rank")),
}
"""Every kind of fault with the keys that it takes."""


class FaultError(ValueError):
    """A `--fault` that cannot be understood or carried out; its text is one line for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. `step` from 1; `rank` -1 = every rank; `until` 0 = to the end; `batch` -1 = that of `step`."""

    kind: str
    step: int = 0
    rank: int = -1
    factor: float = 0.0
    seconds: float = 0.0
    until: int = 0
    batch: int = -1
    parameter: str = ""
    text: str = ""
    """As it was asked for."""

    @property
    def batch_index(self) -> int:
        """The batch that `bad_batch` spoils; in a run that skipped nothing, step n trains on batch n - 1."""
        return self.batch if self.batch >= 0 else self.step - 1

    def parameters(self) -> dict[str, Any]:
        """What was asked for, without the defaults."""
        return {f.name: getattr(self, f.name) for f in fields(self)[1:-1] if getattr(self, f.name) != f.default}


def parse_fault(text: str) -> Fault:
    """Read `KIND@key=value,key=value`. Raises FaultError: one line with the text, what is wrong and what is allowed."""
    kind, _, rest = text.strip().partition("@")
    if kind not in KINDS:
        raise FaultError(f"--fault {text}: unknown kind {kind!r}; allowed are {', '.join(KINDS)}")
    values: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or key not in KINDS[kind]:
            allowed = ", ".join(KINDS[kind])
            raise FaultError(f"--fault {text}: {item!r} is not for {kind}; allowed are {allowed} (key=value)")
        if key in values:
            raise FaultError(f"--fault {text}: {key} is given twice")
        values[key] = _value(text, key, value)
    if "step" not in values and "batch" not in values:
        raise FaultError(f"--fault {text}: step=N is missing, the step (from 1) at which it happens")
    if "rank" not in values and kind != "bad_batch":
        raise FaultError(f"--fault {text}: rank=R is missing, the rank (from 0) on which it happens")
    return Fault(kind=kind, text=text.strip(), **values)


def _value(text: str, key: str, value: str) -> int | float | str:
    if key == "parameter":
        return value
    try:
        if key in ("factor", "seconds"):
            number = float(value)
            if not (1.0 < number <= 100.0 if key == "factor" else 0.0 < number <= 3600.0):
                raise ValueError
            return number
        whole = int(value)
        if whole < (1 if key in ("step", "until") else 0):
            raise ValueError
        return whole
    except ValueError:
        allowed = {"factor": "a number above 1, at most 100", "seconds": "a number above 0, at most 3600"}.get(
            key, "a whole number from 1" if key in ("step", "until") else "a whole number from 0"
        )
        raise FaultError(f"--fault {text}: {key} = {value!r}: must be {allowed}") from None
