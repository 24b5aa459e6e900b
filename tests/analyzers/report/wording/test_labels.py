from __future__ import annotations

import pytest

from analyzers.report.wording.labels import label_of, shown


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("window_steps", 40, ("window", "40 steps")), ("wait_ms", 3.5, ("wait", "3.5 ms")),
     ("starved_steps", 7, ("steps that waited", "7")), ("open_steps", 7, ("open steps", "7")),
     ("whatif_withheld", "too few steps", ("no prediction, because", "too few steps"))],
)  # fmt: skip
def test_a_unit_is_printed_once(name: str, value: float, said: tuple[str, str]) -> None:
    assert (label_of(name), shown(name, value)) == said
