"""How a soak is judged."""

from __future__ import annotations

import numpy as np

from benchmarks.durability.soak import as_taken

S = 10**9


def test_the_order_of_steps_is_by_attempt_and_monotonic_time() -> None:
    """Step 3 was taken again after a rollback; the wall clock went back by an hour before, and orders nothing."""
    rows = {"attempt": [1, 0, 1, 0, 0], "step": [3, 2, 2, 3, 1], "mono_ns": [9 * S, 2 * S, 8 * S, 3 * S, 1 * S]}
    taken = as_taken({name: np.asarray(values) for name, values in rows.items()})
    assert taken["step"].tolist() == [1, 2, 3, 2, 3]
    assert taken["mono_ns"].tolist() == [1 * S, 2 * S, 3 * S, 8 * S, 9 * S]
