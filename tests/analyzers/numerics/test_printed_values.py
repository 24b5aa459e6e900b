"""Printed losses, norms and skipped steps: a step that several ranks print counts once."""

from __future__ import annotations

import math
from typing import Any

import pytest

from analyzers.numerics.loss.printed_values import nonfinite, skipped_steps


def printed(num_ranks: int, num_steps: int, **columns: Any) -> list[dict[str, Any]]:
    """Rows of all ranks. A column is a value, or a function of the step."""
    return [
        {"step": step, "rank": rank} | {name: value(step) for name, value in columns.items()}
        for step in range(1, num_steps + 1)
        for rank in range(num_ranks)
    ]


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_a_step_of_several_ranks_is_one_step(num_ranks: int) -> None:
    (found,) = nonfinite(printed(num_ranks, 20, loss=lambda step: math.nan if step == 10 else 2.0))
    assert found.summary.startswith("The loss was not finite at step 10 only, and finite again afterwards.")
    assert found.evidence["basis"] == "1 of 20 printed steps have a NaN or Inf"


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_the_search_for_a_loss_scale_is_as_long_for_several_ranks(num_ranks: int) -> None:
    overflows = printed(
        num_ranks, 20, loss=lambda step: 2.0, grad_norm=lambda step: math.inf if 8 <= step <= 12 else 1.0
    )
    assert nonfinite(overflows) == []
    (found,) = nonfinite(
        printed(num_ranks, 200, loss=lambda step: 2.0, grad_norm=lambda step: math.inf if step == 100 else 1.0)
    )
    assert found.severity == "warning"


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_skipped_steps_are_counted_once(num_ranks: int) -> None:
    (found,) = skipped_steps(printed(num_ranks, 200, skipped=lambda step: int(step > 150 and step % 2 == 0)))
    assert found.summary.startswith("25 of 49 steps since step 152 were skipped")
    assert found.evidence["skipped_steps"] == 25
    assert skipped_steps(printed(num_ranks, 200, skipped=lambda step: int(step == 150))) == []
