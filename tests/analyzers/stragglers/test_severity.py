"""A slow rank weighs what it costs: a tiny one is no warning, an unknown cost is."""

from __future__ import annotations

import pytest

from analyzers.stragglers.cost import Cost


@pytest.mark.parametrize(
    ("step_ms", "withheld", "severity"),
    [(100.4, "", "info"), (101.5, "", "warning"), (199.0, "", "warning"), (200.0, "", "critical"),
     (100.0, "no recorded work ran in 21 % of the time", "warning")],
)  # fmt: skip
def test_the_severity_is_that_of_the_gain(step_ms: float, withheld: str, severity: str) -> None:
    cost = Cost(step_ms=step_ms, step_without_ms=100.0, saved_s=1.0, run_s=10.0, basis="calls", withheld=withheld)
    assert cost.severity() == severity
