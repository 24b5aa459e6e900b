"""Conditions under which a comparison fails in CI (`compare --fail-on`), and the reason for each failure in one line.

    gates = gates_of(["slower:10", "loss", "critical"])
    failures(comparison, gates)     # ["B is slower: it takes 33.1 % more time per token (...); the limit is 10 %"]

A gate that cannot be judged, because there are too few steps, fails: "not measured" does not mean "as fast as before".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analyzers.compare.answer import loss_sentence, nonfinite_sentence, speed_words
from analyzers.compare.two_runs import Comparison
from analyzers.finding import Finding
from analyzers.policy import SHARED

__all__ = ["Gate", "GateError", "failures", "gates_of"]

_NAMES = ("slower", "loss", "findings", "critical")


class GateError(ValueError):
    """An unknown condition or an invalid limit; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One condition."""

    name: str
    limit_ratio: float = SHARED.saving_ratio
    """Limit of `slower`: the gate fails if the whole interval of the time ratio is at or above 1 + `limit_ratio`."""


def gates_of(texts: Sequence[str]) -> list[Gate]:
    """Parse conditions. Raises GateError."""
    found = []
    for text in texts:
        name, has_limit, limit = text.partition(":")
        name = "slower" if name == "warning" else name  # in version 0.1, `slower` was called `warning`
        if name not in _NAMES:
            raise GateError(f"{text!r}: choose slower, slower:PERCENT, loss, findings or critical")
        if not has_limit:
            found.append(Gate(name=name))
            continue
        try:
            percent = float(limit.removesuffix("%"))
        except ValueError:
            percent = -1.0
        if name != "slower" or not 0 <= percent < 1e6:
            raise GateError(f"{text!r}: only slower has a limit, a number in percent, for example slower:10")
        found.append(Gate(name=name, limit_ratio=percent / 100))
    return found


def failures(comparison: Comparison, gates: Sequence[Gate]) -> list[str]:
    """Return one line for each gate that fails: the reason."""
    return [reason for gate in gates if (reason := _reason(comparison, gate))]


def _reason(comparison: Comparison, gate: Gate) -> str:
    run, speed, loss = comparison.run_b, comparison.speed, comparison.loss
    if gate.name == "slower":
        if speed is None:
            return f"The speed of {run} was not compared: there are too few steps"
        is_slower = speed.low > 1 and speed.low >= 1 + gate.limit_ratio
        return (
            f"{run} is slower: it {speed_words(speed)}; the limit is {100 * gate.limit_ratio:g} %" if is_slower else ""
        )
    if gate.name == "loss":
        since_a, since_b = comparison.nonfinite_since
        if since_b is not None:
            return nonfinite_sentence(run, since_b) if since_a is None else ""
        if loss is None:
            return f"The loss of {run} was not compared: there are too few common steps"
        is_higher = loss.is_real and loss.difference > 0
        return f"{run} has a higher loss: {loss_sentence(loss)}" if is_higher else ""
    new = [finding for finding in comparison.only_b if finding.status == "fired"]
    if gate.name == "critical":
        new = [finding for finding in new if finding.severity == "critical"]
    return f"{run} has new findings: {_listed(new)}" if new else ""


def _listed(findings: Sequence[Finding], shown: int = 3) -> str:
    more = f" and {len(findings) - shown} more" if len(findings) > shown else ""
    return "; ".join(f"{finding.kind}: {finding.summary}" for finding in findings[:shown]) + more
