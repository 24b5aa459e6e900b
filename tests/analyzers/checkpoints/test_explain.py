"""Evidence and next step of the kinds of `checkpoints`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.analyzers.explained import assert_explains


@pytest.mark.parametrize(
    ("kind", "cause", "evidence", "proof", "remedy"),
    [
        (
            "checkpoint_failed",
            "failed",
            {"reason": "No space left\nmore", "num_good_since": 0},
            "No space left, and nothing has been saved since",
            "Free space on the disk",
        ),
        (
            "checkpoint_age",
            "old",
            {"age_steps": 400, "interval_steps": 50, "lost_s": 80.0},
            "400 steps",
            "before the next",
        ),
    ],
)
def test_evidence_and_next_step(kind: str, cause: str, evidence: dict[str, Any], proof: str, remedy: str) -> None:
    assert_explains(kind, cause, evidence, proof=proof, remedy=remedy)
