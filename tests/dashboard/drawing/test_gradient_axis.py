"""Steps under the map of gradients: numbers that thin out on a narrow screen, names where they are few."""

from __future__ import annotations

import pytest

from analyzers.figures import gradients


@pytest.mark.parametrize(("steps", "kind"), [(range(10, 160, 10), "linear"), (range(1, 9), "category")])
def test_the_axis_is_one_of_numbers_where_steps_are_many(steps: range, kind: str) -> None:
    table = {"parameter": ["w"] * len(steps), "step": list(steps), "norm": [0.1] * len(steps)}
    assert gradients.norms(table).layout.xaxis.type == kind
