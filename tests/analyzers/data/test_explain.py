"""Evidence and next step of the kinds of `data`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.analyzers.explained import assert_explains


@pytest.mark.parametrize(
    ("kind", "cause", "evidence", "proof", "remedy"),
    [
        (
            "data_bound",
            "periodic",
            {
                "data_ratio": 0.31,
                "data_ms": 66.0,
                "step_ms": 212.0,
                "data_highest_ms": 400.0,
                "every_steps": 16,
                "starved_steps": 9,
                "steps": 150,
            },
            "Loading takes 31 % of a step: 66 of 212 ms",
            "bridge the pause",
        ),
        (
            "padding",
            "",
            {"padded_ratio": 0.4, "padded_tokens": 16_000, "tokens": 40_000},
            "16,000 of 40,000 positions are masked",
            "group_by_length",
        ),
    ],
)
def test_evidence_and_next_step(kind: str, cause: str, evidence: dict[str, Any], proof: str, remedy: str) -> None:
    assert_explains(kind, cause, evidence, proof=proof, remedy=remedy)
