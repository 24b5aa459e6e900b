"""Times on pages round as the report does."""

from __future__ import annotations

import pytest

from dashboard.drawing.units import age, duration


@pytest.mark.parametrize(
    ("seconds", "shown"), [(175.716, "2 min 56 s"), (175.2, "2 min 55 s"), (100.4, "100 s"), (99.94, "99.9 s")]
)
def test_a_duration_is_rounded_and_an_age_counts_whole_seconds(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
    assert age(seconds - seconds % 1 + 0.9) == age(seconds - seconds % 1)
