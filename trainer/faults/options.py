"""Parse `--fault KIND@key=value,...`: faults that break a run on purpose.

    fault = parse_fault("nan_grad@step=40,rank=2")

`trainer.faults.catalogue` defines the kinds; `rankscope drill --list` prints them. `rank` is the struck rank. `step` is
the step at (or from) which the fault strikes. Some kinds take further keys:

| key | meaning |
|---|---|
| until | last step of a lasting fault; without it, the fault lasts to the end of its attempt |
| factor | multiplies a duration (slow_compute 1.5, slow_data 2) or the rate (lr_spike 100, divergence 1.1 per step) |
| seconds | duration of a delay (slow_data), pause (pause 0.5, slow_logging 0.03) or clock error (clock_shift 600) |
| rate_mb | bandwidth of a slow link in megabytes per second (1) |
| parameter | the parameter with the struck gradient |
| where | bit_flip: parameter, optimizer or gradient; skip_restore: parameter, optimizer, rng or data |
| tensor | the parameter whose bit is flipped, or its optimizer state, such as `<parameter>.exp_avg_sq` |
| bit | which bit of the number is flipped: 31 is the sign, 23 to 30 the exponent (22) |
| batch | the struck batch (the batch of `step`) |

Numbers in parentheses are defaults.

A fault fires once in a run: not again in the next attempt, nor when its step is replayed after a rollback. A fault
tied to a batch strikes whenever this batch is trained, so skipping the batch avoids the fault. `trainer.faults.inject`
injects the faults.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import Any

from trainer.faults.catalogue import CATALOGUE

__all__ = ["KINDS", "Fault", "FaultError", "parse_fault"]

KINDS: dict[str, tuple[str, ...]] = {name: kind.keys for name, kind in CATALOGUE.items()}
"""Every kind of fault with the keys that it takes."""
_FLOATS = {"factor": (1.0, 1000.0), "seconds": (0.0, 3600.0), "rate_mb": (0.0, 1e6)}
_FROM_ONE = ("step", "until")


WHERE = ("parameter", "optimizer", "gradient", "rng", "data")
"""Targets of a bit flip (the first three), or of an incomplete restore (all but the gradient)."""


class FaultError(ValueError):
    """A `--fault` is invalid or impossible. The message is one line for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. `step` starts at 1; `rank` -1: every rank; `until` 0: to the end; `batch` -1: the batch of `step`."""

    kind: str
    step: int = 0
    rank: int = -1
    factor: float = 0.0
    seconds: float = 0.0
    rate_mb: float = 0.0
    until: int = 0
    batch: int = -1
    parameter: str = ""
    where: str = ""
    tensor: str = ""
    bit: int = -1
    text: str = ""
    """The text of the option."""

    @property
    def batch_index(self) -> int:
        """Index of the struck batch; in a run without skipped batches, step n trains on batch n - 1."""
        return self.batch if self.batch >= 0 else self.step - 1

    def parameters(self) -> dict[str, Any]:
        """The options that were given, without defaults."""
        return {f.name: getattr(self, f.name) for f in fields(self)[1:-1] if getattr(self, f.name) != f.default}


def parse_fault(text: str) -> Fault:
    """Read `KIND@key=value,key=value`. Raises FaultError: one line with the text, what is wrong and what is allowed."""
    kind, _, rest = text.strip().partition("@")
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=3, cutoff=0.8)
        hint = f"did you mean {' or '.join(near)}?" if near else "see `rankscope drill --list`"
        raise FaultError(f"--fault {text}: unknown kind {kind!r}; {hint}")
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
    if "rank" not in values and not CATALOGUE[kind].all_ranks:
        raise FaultError(f"--fault {text}: rank=R is missing, the rank (from 0) on which it happens")
    return Fault(kind=kind, text=text.strip(), **values)


def _value(text: str, key: str, value: str) -> int | float | str:
    if key in ("parameter", "tensor"):
        return value
    if key == "where":
        if value not in WHERE:
            raise FaultError(f"--fault {text}: where = {value!r}: must be {', '.join(WHERE)}")
        return value
    try:
        if key in _FLOATS:
            number = float(value)
            low, high = _FLOATS[key]
            if not low < number <= high:
                raise ValueError
            return number
        whole = int(value)
        if whole < (1 if key in _FROM_ONE else 0):
            raise ValueError
        return whole
    except ValueError:
        if key in _FLOATS:
            allowed = "a number above {:g}, at most {:g}".format(*_FLOATS[key])
        else:
            allowed = f"a whole number from {1 if key in _FROM_ONE else 0}"
        raise FaultError(f"--fault {text}: {key} = {value!r}: must be {allowed}") from None
